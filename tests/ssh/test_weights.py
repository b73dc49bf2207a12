"""The weights step over real SSH: three nodes of one machine, each with files of its own."""

import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from blocks import Cluster
from flows.runners import Result, Threads, call
from tasks import remote
from tasks.converge import Outcome, Run
from tasks.errors import Cancelled, CommandFailed, SparkrailError
from tasks.weight_streams import _transfers
from tasks.weights import ensure_weights
from tests.ssh.conftest import Start
from tests.ssh.sshd import poll, spec

RUN = Run(id="test", who="test")
DRY = Run(id="test", who="test", dry_run=True)
# Each node's login begins in a folder of its own: the same path is another file on each.
PATH = "/proc/self/cwd/model"
SIZE = 192 << 20


class Nodes:
    """A head with a model and two workers without."""

    def __init__(self, cluster: Cluster, homes: dict[str, Path]) -> None:
        self.cluster = cluster
        self.homes = homes

    def model(self, node: str) -> Path:
        return self.homes[node] / "model"

    def published(self, node: str) -> list[str]:
        return sorted(each.name for each in self.model(node).glob("[a-z]*"))

    def sync(self, run: Run = RUN) -> dict[str, Result]:
        """The step on both workers side by side, as a deploy runs it."""
        runner = Threads(0.1)
        futures = {
            runner.submit(call(ensure_weights, node=node), {"cluster": self.cluster, "run": run}): (
                node.name
            )
            for node in self.cluster.workers
        }
        return dict(
            sorted((futures[future], result) for future, result in runner.ended(list(futures)))
        )

    def syncing(self) -> tuple[threading.Thread, dict[str, Result]]:
        results: dict[str, Result] = {}
        thread = threading.Thread(target=lambda: results.update(self.sync()))
        thread.start()
        return thread, results

    def programs(self, node: str, name: str) -> list[int]:
        """The relayed programs of that name that run on a node."""
        found = []
        for each in Path("/proc").glob("[0-9]*"):
            try:
                words = (each / "cmdline").read_bytes().split(b"\0")
                home = (each / "cwd").readlink()
            except OSError:
                continue
            if name.encode() in words and home == self.homes[node]:
                found.append(int(each.name))
        return found

    def is_quiet(self, node: str, name: str) -> bool:
        return not self.programs(node, name)

    def stop_receiver(self, node: str) -> int:
        """Freeze it as soon as it has begun."""
        poll(lambda: (self.model(node) / ".sparkrail-part").exists(), "it has begun")
        [pid] = self.programs(node, "weights_receive")
        os.kill(pid, signal.SIGSTOP)
        assert self.published(node) == [], "it was too fast for this test"
        return pid


@pytest.fixture
def nodes(start: Start, tmp_path: Path, login_key: Path) -> Iterator[Nodes]:
    homes, places, known = {}, [], ""
    for number, name in enumerate(("head", "worker1", "worker2"), 1):
        home = homes[name] = tmp_path / name
        home.mkdir()
        forced = f'ForceCommand cd {home} && HOME={home} exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"'
        sshd = start(forced, address=f"127.0.0.{number}")
        known += sshd.known
        places.append(sshd.place(name, fabric_address=f"10.99.0.{number}"))
    known_hosts = tmp_path / "known_hosts_of_three"
    known_hosts.write_text(known)
    cluster = spec(places[0], places[1], known_hosts=known_hosts, key_file=login_key)
    third = cluster.workers[0].model_validate(places[2])
    # A spec takes no loopback address: nodes of different machines could not reach it.
    head, *workers = (
        node.model_copy(update={"fabric_address": f"127.0.0.{number}"})
        for number, node in enumerate((cluster.head, cluster.workers[0], third), 1)
    )
    model = cluster.model.model_copy(update={"path": PATH})
    cluster = cluster.model_copy(update={"head": head, "workers": tuple(workers), "model": model})
    folder = homes["head"] / "model"
    folder.mkdir()
    for small in ("config.json", "tokenizer.json"):
        (folder / small).write_text("{}")
    with (folder / "w.bin").open("wb") as file:
        file.truncate(SIZE)
    yield Nodes(cluster, homes)
    remote.disconnect()
    assert not _transfers


def test_it_converges(nodes: Nodes) -> None:
    planned = nodes.sync(DRY)
    assert [outcome(each).status for each in planned.values()] == ["planned"] * 2
    assert nodes.published("worker1") == []
    for status in ("changed", "unchanged"):
        assert [outcome(each).status for each in nodes.sync().values()] == [status] * 2
    for name in ("worker1", "worker2"):
        assert nodes.published(name) == ["config.json", "tokenizer.json", "w.bin"]
        assert (nodes.model(name) / "w.bin").stat().st_size == SIZE
        assert nodes.programs(name, "weights_receive") == []
    assert nodes.programs("head", "weights_send") == []


def test_who_dies_is_left_out_and_named(nodes: Nodes) -> None:
    thread, results = nodes.syncing()
    workers = ("worker1", "worker2")
    poll(lambda: any(nodes.programs(name, "weights_receive") for name in workers), "it has begun")
    first, other = sorted(workers, key=lambda name: not nodes.programs(name, "weights_receive"))
    pid = nodes.stop_receiver(first)
    poll(lambda: nodes.programs(other, "weights_receive"), "the other one has begun too")
    os.kill(pid, signal.SIGKILL)
    thread.join(60)
    dead = results[first]
    assert isinstance(dead, CommandFailed)
    assert str(dead).startswith(f"{first}: weights_receive ended (")
    assert outcome(results[other]).status == "changed"
    assert f"went on without {first}: " in outcome(results[other]).detail
    assert nodes.published(first) == []
    again = nodes.sync()
    assert outcome(again[first]).status == "changed"
    assert outcome(again[other]).status == "unchanged"


def test_a_sender_that_is_killed_is_started_again(nodes: Nodes) -> None:
    thread, results = nodes.syncing()
    poll(lambda: (nodes.model("worker1") / ".sparkrail-part").exists(), "it has begun")
    [pid] = nodes.programs("head", "weights_send")
    os.kill(pid, signal.SIGKILL)
    thread.join(60)
    assert [outcome(each).status for each in results.values()] == ["changed"] * 2


def test_a_source_that_changes_is_named_and_nothing_is_published(nodes: Nodes) -> None:
    thread, results = nodes.syncing()
    pid = nodes.stop_receiver("worker1")
    (nodes.model("head") / "w.bin").write_bytes(b"other")
    os.kill(pid, signal.SIGCONT)
    thread.join(60)
    error = results["worker1"]
    assert isinstance(error, SparkrailError)
    assert str(error).startswith("head: the model changed while it was sent to worker1: w.bin")
    assert nodes.published("worker1") == []


def test_cancel_ends_it_on_all_nodes(nodes: Nodes) -> None:
    thread, results = nodes.syncing()
    nodes.stop_receiver("worker1")
    remote.cancel()
    thread.join(60)
    assert {type(each) for each in results.values()} == {Cancelled}
    # The frozen one, too, once it runs again.
    for pid in nodes.programs("worker1", "weights_receive"):
        os.kill(pid, signal.SIGCONT)
    for name in nodes.homes:
        for program in ("weights_send", "weights_receive"):
            poll(partial(nodes.is_quiet, name, program), "it has ended")
    assert nodes.published("worker1") == []


def test_a_folder_that_cannot_be_written_is_named(nodes: Nodes) -> None:
    nodes.model("worker1").mkdir()
    (nodes.model("worker1") / ".sparkrail-part").write_text("")
    results = nodes.sync()
    error = results["worker1"]
    assert isinstance(error, CommandFailed)
    assert str(error).startswith("worker1: the model's files did not arrive from head: cannot be ")
    assert "sudo chown" in str(error)
    assert outcome(results["worker2"]).status == "changed"


def outcome(result: Result) -> Outcome:
    assert isinstance(result, Outcome), result
    return result
