"""The cluster's lock, held for real by a process at the other end of an SSH connection."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from blocks import Cluster
from tasks import locks, remote
from tasks.converge import Run
from tasks.errors import CommandFailed, Locked
from tasks.locks import PROGRAM, Lock, release_lock, take_lock
from tests.ssh.conftest import Start
from tests.ssh.sshd import Sshd, lives, poll, spec

ADA, BOB = Run(id="run-1", who="ada@control"), Run(id="run-2", who="bob@laptop")


class Node:
    """A head whose home folder is the test's own."""

    def __init__(self, cluster: Cluster, home: Path) -> None:
        self.cluster, self.home = cluster, home
        self.lock = home / ".sparkrail" / "loopback" / "lock"

    def take(self, run: Run) -> str:
        outcome = take_lock.fn(self.cluster, self.cluster.head, run)
        assert outcome.status == "unchanged"
        return outcome.detail

    @property
    def holder(self) -> int:
        return int(json.loads((self.lock / "owner.json").read_text())["pid"])


@pytest.fixture
def node(start: Start, tmp_path: Path, login_key: Path) -> Iterator[Node]:
    home = tmp_path / "home"
    home.mkdir()
    sshd: Sshd = start(f'ForceCommand HOME={home} exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"')
    known = tmp_path / "known_hosts_of_locks"
    known.write_text(sshd.known)
    found = Node(spec(sshd.place("head"), None, known_hosts=known, key_file=login_key), home)
    yield found
    release_lock(found.cluster)
    locks._held.clear()


def test_it_is_held_until_it_is_released(node: Node) -> None:
    assert node.take(ADA) == ""
    holder = node.holder
    assert lives(holder)
    release_lock(node.cluster)
    poll(lambda: not lives(holder), "it has ended")
    assert not (node.lock / "owner.json").exists()
    assert not remote.STOP.is_set()


def other(node: Node, run: Run) -> "subprocess.Popen[bytes]":
    """A holder of the lock that is not of this process."""
    owner = json.dumps({"run": run.id, "who": run.who})
    argv = (sys.executable, "-IS", "-c", PROGRAM, str(node.lock), owner, "60")
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout
    assert json.loads(process.stdout.readline())["held"] is True
    return process


@pytest.fixture
def bob(node: Node) -> Iterator["subprocess.Popen[bytes]"]:
    process = other(node, BOB)
    yield process
    process.kill()
    process.communicate()


def test_another_run_is_refused_and_told_who_holds_it(
    node: Node, bob: "subprocess.Popen[bytes]"
) -> None:
    with pytest.raises(Locked) as caught:
        node.take(ADA)
    first, second = str(caught.value).splitlines()
    assert first.startswith("head: loopback is worked on by run run-2 of bob@laptop, since ")
    assert second == (
        "Wait until it has ended, or end it; a run that died frees its lock within 20 s."
    )
    assert bob.poll() is None


def test_a_dry_run_takes_no_lock(node: Node, bob: "subprocess.Popen[bytes]") -> None:
    assert node.take(ADA.model_copy(update={"dry_run": True})) == "not needed"
    assert bob.poll() is None


def test_a_lock_that_was_left_behind_is_taken_over(
    node: Node, bob: "subprocess.Popen[bytes]"
) -> None:
    bob.kill()
    bob.wait()
    said = node.take(ADA)
    assert said.startswith("taken over from run run-2 of bob@laptop, since ")
    assert said.endswith(", which died")


def test_an_earlier_attempt_of_the_same_run_is_waited_for(node: Node) -> None:
    """A step that is tried again must not be refused by what it started before."""
    earlier = other(node, ADA)
    assert earlier.stdin and earlier.stdout
    wake = earlier.stdin
    poll(lambda: lives(earlier.pid), "it runs")
    threading.Timer(0.3, wake.close).start()
    assert node.take(ADA) == ""
    assert earlier.wait(10) == 0
    earlier.stdout.close()


def test_when_its_process_is_killed_the_run_is_stopped(node: Node) -> None:
    node.take(ADA)
    os.kill(node.holder, signal.SIGKILL)
    poll(remote.STOP.is_set, "the run is cancelled")
    assert locks._held["loopback"].lost == "the process that holds it on the head has ended"


def test_when_our_process_is_killed_the_lock_is_free_at_once(node: Node) -> None:
    script = (
        "import sys, time\n"
        "from blocks import Cluster\nfrom tasks.converge import Run\n"
        "from tasks.locks import take_lock\n"
        "cluster = Cluster.model_validate_json(sys.argv[1])\n"
        "take_lock.fn(cluster, cluster.head, Run(id='run-2', who='bob'))\n"
        "print('held', flush=True)\ntime.sleep(300)\n"
    )
    argv = (sys.executable, "-c", script, node.cluster.model_dump_json())
    root = Path(__file__).parents[2]
    with subprocess.Popen(argv, cwd=root, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == b"held\n"
            holder = node.holder
            with pytest.raises(Locked):
                node.take(ADA)
        finally:
            process.kill()
    poll(lambda: not lives(holder), "the lock's process ends")
    assert node.take(ADA) == ""


def test_a_node_that_is_frozen_loses_the_lock_for_us_first(node: Node) -> None:
    channel = remote.connect(node.cluster, node.cluster.head).start(
        ("python3", "-IS", "-c", PROGRAM, str(node.lock), '{"run": "r", "who": "w"}', "60"),
        shown="take the lock",
    )
    assert json.loads(channel.recv(4096))["held"] is True
    lock = Lock(channel, beat=0.05, silence=1.0)
    holder = node.holder
    os.kill(holder, signal.SIGSTOP)
    try:
        poll(remote.STOP.is_set, "the run is cancelled")
        assert lock.lost == "the head has not answered for 0.8 s"
        assert lives(holder)
    finally:
        os.kill(holder, signal.SIGCONT)
    lock.release()
    poll(lambda: not lives(holder), "its process ends with the channel")


def test_a_head_where_it_cannot_be_held_says_why(node: Node) -> None:
    (node.home / ".sparkrail").write_text("not a folder")
    with pytest.raises(CommandFailed) as caught:
        node.take(ADA)
    lines = str(caught.value).splitlines()
    assert lines[0] == "head: exit code 1: take the lock"
    assert lines[-1].startswith("NotADirectoryError: [Errno 20] Not a directory: ")


def test_a_module_in_the_home_folder_changes_nothing(node: Node) -> None:
    (node.home / "json.py").write_text("raise SystemExit('not the json you want')")
    assert node.take(ADA) == ""
