"""Nothing that we started on a node outlives its run."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from blocks import Cluster
from tasks import remote
from tasks.errors import Cancelled, CommandTimedOut, NodeUnreachable
from tasks.remote import Remote, connect
from tests.ssh.conftest import LogIn, Start
from tests.ssh.sshd import lives, poll

ROOT = Path(__file__).parents[2]
# A parent and a child; both write down their pids.
FAMILY = """\
echo $$ >"$1/parent"
sh -c "$2"' echo $$ >"$1/child"; sleep 300; sleep 300' sh "$1" &
exec sleep 300
"""


class Family:
    """Processes on a node that should end."""

    def __init__(self, folder: Path, *, stubborn: bool = False) -> None:
        trap = "trap '' TERM;" if stubborn else ""
        self.argv = ("sh", "-c", FAMILY, "sh", str(folder), trap)
        self._files = [folder / "parent", folder / "child"]

    def begun(self) -> bool:
        return all(file.exists() and file.read_text().strip() for file in self._files)

    def ended(self) -> bool:
        return not any(lives(int(file.read_text())) for file in self._files)


@pytest.fixture
def family(tmp_path: Path) -> Family:
    return Family(tmp_path)


def in_background(run: Callable[[], object]) -> Future[object]:
    pool = ThreadPoolExecutor(1)
    future: Future[object] = pool.submit(run)
    pool.shutdown(wait=False)
    return future


@pytest.mark.parametrize("stdin", [None, b"", b"some input"])
@pytest.mark.parametrize("node", ["head", "worker"])
def test_after_its_deadline_the_whole_process_group_is_ended(
    node: str, stdin: bytes | None, family: Family, request: pytest.FixtureRequest
) -> None:
    connection: Remote = request.getfixturevalue(node)
    with pytest.raises(CommandTimedOut) as caught:
        connection.run(family.argv, timeout=1, stdin=stdin)
    assert str(caught.value).startswith(f"{connection.node.name}: still running after 1 s: sh -c")
    assert str(caught.value).endswith("Its processes on the node were ended.")
    assert family.begun()
    poll(family.ended, "the group ends")


def test_a_process_that_ignores_sigterm_is_killed(head: Remote, tmp_path: Path) -> None:
    stubborn = Family(tmp_path, stubborn=True)
    with pytest.raises(CommandTimedOut):
        head.run(stubborn.argv, timeout=1)
    poll(stubborn.ended, "the group ends")


def test_a_deadline_error_shows_the_last_words(head: Remote) -> None:
    with pytest.raises(CommandTimedOut) as caught:
        head.run(("sh", "-c", "seq 20; exec sleep 300"), timeout=0.5)
    assert caught.value.details.splitlines() == [str(number) for number in range(11, 21)]


def test_a_command_under_a_forced_command_is_ended_too(
    start: Start, only: LogIn, family: Family
) -> None:
    """There our shell does not lead the process group of the session."""
    connection = only(start('ForceCommand /bin/sh -c "$SSH_ORIGINAL_COMMAND"; true'))
    with pytest.raises(CommandTimedOut):
        connection.run(family.argv, timeout=1)
    poll(family.ended, "the group ends")


def test_cancel_ends_commands_in_all_threads(worker: Remote, family: Family) -> None:
    result = in_background(lambda: worker.run(family.argv))
    poll(family.begun, "the command runs")
    remote.cancel()
    with pytest.raises(Cancelled, match="cancelled during: sh -c"):
        result.result(5)
    poll(family.ended, "the group ends")


def test_after_cancel_no_command_begins(head: Remote, tmp_path: Path) -> None:
    remote.cancel()
    with pytest.raises(Cancelled):
        head.run(("touch", str(tmp_path / "never")))
    assert not (tmp_path / "never").exists()


def test_after_cancel_a_thread_may_still_clean_up(head: Remote) -> None:
    remote.cancel()
    with remote.despite_cancel():
        assert head.run(("echo", "released")).stdout == "released\n"
    with pytest.raises(Cancelled):
        head.run(("true",))


def test_whatever_interrupts_the_scope_cancels(head: Remote, family: Family) -> None:
    with pytest.raises(KeyboardInterrupt), remote.cancel_scope():
        result = in_background(lambda: head.run(family.argv))
        poll(family.begun, "the command runs")
        raise KeyboardInterrupt
    with pytest.raises(Cancelled):
        result.result(5)
    poll(family.ended, "the group ends")


@pytest.mark.parametrize(
    ("index", "stdin"),
    [
        pytest.param(0, "None", id="head"),
        pytest.param(1, "b'some input'", id="worker, with input"),
    ],
)
def test_killing_our_process_ends_the_remote_group(
    index: int, stdin: str, cluster: Cluster, family: Family, tmp_path: Path
) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from blocks import Cluster; from tasks import remote\n"
        "cluster = Cluster.model_validate_json(Path(sys.argv[1]).read_text())\n"
        f"node = remote.connect(cluster, cluster.nodes[{index}])\n"
        f"node.run(sys.argv[2:], timeout=300, stdin={stdin})\n"
    )
    spec = tmp_path / "spec.json"
    spec.write_text(cluster.model_dump_json())
    process = subprocess.Popen((sys.executable, "-c", program, str(spec), *family.argv), cwd=ROOT)
    try:
        poll(family.begun, "the command runs", 60)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    poll(family.ended, "the group ends")


def test_a_command_that_ended_leaves_nothing_of_ours(head: Remote) -> None:
    """The guard and its helpers end with the command."""
    token = f"ours-{os.getpid()}-{time.monotonic_ns()}"
    head.run(("true",), environment={"TOKEN": token})
    script = f'ps e -A -ww | grep -F "{token[:4]}""{token[4:]}" | grep -v grep'
    poll(lambda: head.run(("sh", "-c", script), ok=(0, 1)).code == 1, "all of it has ended")


def test_a_dropped_connection_is_named_and_the_next_one_works(
    start: Start, only: LogIn, family: Family
) -> None:
    node = start()
    connection = only(node)
    result = in_background(lambda: connection.run(family.argv))
    poll(family.begun, "the command runs")
    node.stop()
    with pytest.raises(NodeUnreachable, match="head: connection lost during: sh -c"):
        result.result(10)
    poll(family.ended, "the group ends")
    assert not connection.alive
    with pytest.raises(NodeUnreachable, match="the SSH connection is closed"):
        connection.run(("true",))
    node.start()
    again = only(node)
    assert again is not connection
    assert again.run(("echo", "back")).stdout == "back\n"


def test_a_way_through_the_head_that_ended_first_is_closed_quietly(
    worker: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else paramiko's own thread would die of it, and print that among what a user reads."""

    def ended(_message: object) -> None:
        raise EOFError

    way: Any = worker.transport.sock
    monkeypatch.setattr(way.transport.packetizer, "send_message", ended)
    way.close()
    monkeypatch.undo()
    with pytest.raises(NodeUnreachable):
        worker.run(("true",), timeout=20)


def test_a_head_that_dropped_is_reached_again_through_its_worker(
    cluster: Cluster, head: Remote, worker: Remote
) -> None:
    head.close()
    poll(lambda: not worker.alive, "the worker's connection ends with its gateway")
    again = connect(cluster, cluster.workers[0])
    assert again is not worker
    assert again.run(("echo", "back")).stdout == "back\n"


def test_a_frozen_node_is_lost_in_bounded_time(
    start: Start, only: LogIn, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel still acknowledges what we send, so that TCP alone would never tell."""
    monkeypatch.setattr(remote, "PATIENCE", 1)
    node = start()
    connection = only(node)
    result = in_background(lambda: connection.run(family.argv))
    poll(family.begun, "the command runs")
    with node.frozen():
        with pytest.raises(NodeUnreachable, match="no answer any more during: sh -c"):
            result.result(10)
        with pytest.raises(NodeUnreachable, match="no session"):
            connection.run(("true",))
        assert not connection.alive
    assert only(node).run(("echo", "thawed")).stdout == "thawed\n"


def test_a_silent_command_on_a_node_that_answers_is_left_alone(
    head: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PATIENCE", 0.3)
    assert head.run(("sh", "-c", "sleep 1.5; echo done")).stdout == "done\n"


def test_waiting_for_a_free_session_ends_on_cancel(head: Remote) -> None:
    """More commands than sessions: those in the queue end as well."""
    results = [
        in_background(lambda: head.run(("sleep", "300"))) for _ in range(remote.SESSIONS + 3)
    ]
    threading.Timer(0.5, remote.cancel).start()
    for result in results:
        with pytest.raises(Cancelled):
            result.result(15)
