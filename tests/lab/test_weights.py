"""Weights to several workers over a slow fabric: once from the head, whatever breaks meanwhile."""

import hashlib
import json
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
import yaml

from blocks import Cluster
from flows.runners import Result, Threads, call
from tasks import remote
from tasks.converge import Outcome, Run
from tasks.errors import Cancelled, CommandFailed, NodeUnreachable, SparkrailError
from tasks.relayed.pieces import PIECE, VERSION, count, file_digest, packed
from tasks.weight_streams import _transfers
from tasks.weights import ensure_weights
from tests.lab import lab
from tests.lab.layout import Lab
from tests.lab.product import lab_command, poll

pytestmark = pytest.mark.lab

LAB = Lab("lab-weights")
RUN = Run(id="test", who="test")
SHARDS, SHARD = 6, 32 << 20
SIZE = SHARDS * SHARD
PATH = "/models/model"
PARTS = f"{PATH}/.sparkrail-part"
MARKS = f"cat {PARTS}/*.marks 2>/dev/null | tr -d '\\0' | wc -c"
COUNTERS = "cat /sys/class/net/{}/statistics/tx_bytes"
HEAD_PORT = "enp1s0f1np1"


def on(node: str, script: str, stdin: bytes = b"") -> str:
    argv = lab.command_line(LAB, node, ["sh", "-ec", script])
    done = subprocess.run(argv, input=stdin, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


@pytest.fixture(scope="module")
def _cluster() -> Iterator[Cluster]:
    lab_command(LAB, "down")
    lab_command(LAB, "up", "--no-docker", "--workers=4", "--fabric-rate=400mbit")
    spec = yaml.safe_load(LAB.spec.read_text())
    spec["model"]["path"] = PATH
    yield Cluster.model_validate(spec)
    remote.disconnect()
    lab_command(LAB, "down")


@pytest.fixture
def cluster(_cluster: Cluster) -> Iterator[Cluster]:
    """A model on the head only."""
    header = {"w": {"dtype": "U8", "shape": [SHARD - 128], "data_offsets": [0, SHARD - 128]}}
    text = json.dumps(header).ljust(120).encode()
    on("head", f"mkdir -p {PATH}; echo '{{}}' | tee {PATH}/config.json {PATH}/tokenizer.json")
    for at in range(SHARDS):
        place = f"{PATH}/model-{at}.safetensors"
        start = struct.pack("<Q", len(text)) + text
        on("head", f"{{ cat; head -c {SHARD - 128} /dev/urandom; }} > {place}", start)
    yield _cluster
    remote.STOP.clear()
    for node in _cluster.nodes:
        on(node.name, "rm -rf /models/model /models/other ~/.sparkrail")


def sync(cluster: Cluster) -> dict[str, Result]:
    """The step on all workers side by side, as a deploy runs it."""
    runner = Threads(1.0)
    futures = {
        runner.submit(call(ensure_weights, node=node), {"cluster": cluster, "run": RUN}): node
        for node in cluster.workers
    }
    return {futures[future].name: result for future, result in runner.ended(list(futures))}


class Syncing:
    """The same in the background, so that something can happen meanwhile."""

    def __init__(self, cluster: Cluster) -> None:
        self.results: dict[str, Result] = {}
        self._thread = threading.Thread(target=self._run, args=(cluster,))
        self._thread.start()

    def _run(self, cluster: Cluster) -> None:
        self.results = sync(cluster)

    def wait(self) -> dict[str, Result]:
        self._thread.join(240)
        assert not self._thread.is_alive()
        return self.results

    def once(self, node: str, pieces: int) -> None:
        """When so many pieces have come to a node."""
        poll(lambda: int(on(node, MARKS)) >= pieces, 60)


def chain_so_far() -> list[str]:
    """The nodes of the transfer that is under way, the head first."""
    return [name for each in list(_transfers.values()) for name in list(each._sources)]


def statuses(results: dict[str, Result]) -> list[str]:
    return [
        result.status if isinstance(result, Outcome) else repr(result)
        for _, result in sorted(results.items())
    ]


def detail(result: Result) -> str:
    assert isinstance(result, Outcome), result
    return result.detail


def kill(node: str, program: str) -> None:
    on(node, f"pkill -KILL -f 'python3.* {program}$'")


def is_quiet(node: str) -> bool:
    """Whether no program of a transfer runs there."""
    return not on(node, "pgrep -f 'python3.* weights_[a-z]*$' || true")


def files(node: str) -> list[str]:
    return on(node, f"ls {PATH} 2>/dev/null || true").split()


def test_the_head_sends_once_to_any_number_of_workers(cluster: Cluster) -> None:
    before = int(on("head", COUNTERS.format(HEAD_PORT)))
    assert statuses(sync(cluster)) == ["changed"] * 4
    assert int(on("head", COUNTERS.format(HEAD_PORT))) - before < 1.1 * SIZE
    digests = {on(node.name, f"cd {PATH}; sha256sum *") for node in cluster.nodes}
    assert len(digests) == 1
    assert statuses(sync(cluster)) == ["unchanged"] * 4
    for node in cluster.nodes:
        assert is_quiet(node.name)


def test_a_chain_with_a_dead_middle(cluster: Cluster) -> None:
    syncing = Syncing(cluster)
    poll(lambda: chain_so_far()[4:], 60)
    chain = chain_so_far()[1:]
    syncing.once(chain[-1], 2)
    kill(chain[1], "weights_receive")
    results = syncing.wait()
    dead = results.pop(chain[1])
    assert isinstance(dead, CommandFailed)
    assert str(dead).startswith(f"{chain[1]}: weights_receive ended (killed")
    assert statuses(results) == ["changed"] * 3
    assert f"went on without {chain[1]}: " in detail(results[chain[2]])
    assert files(chain[1]) == []
    results = sync(cluster)
    assert sorted(statuses(results)) == ["changed", "unchanged", "unchanged", "unchanged"]
    assert "were there from an interrupted transfer" in detail(results[chain[1]])


def test_a_link_that_goes_down(cluster: Cluster) -> None:
    pair = cluster.model_copy(update={"workers": cluster.workers[:1]})
    syncing = Syncing(pair)
    syncing.once("worker1", 4)
    lab_command(LAB, "break", "worker1", "link-down")
    try:
        [failed] = syncing.wait().values()
    finally:
        lab_command(LAB, "break", "worker1", "link-up")
    assert isinstance(failed, NodeUnreachable), failed
    assert files("worker1") == []
    [again] = sync(pair).values()
    assert "were there from an interrupted transfer" in detail(again)


def test_a_sender_that_is_killed_is_started_again(cluster: Cluster) -> None:
    """The step itself tries again where a connection failed, and goes on where it stopped."""
    syncing = Syncing(cluster)
    syncing.once("worker1", 4)
    kill("head", "weights_send")
    results = syncing.wait()
    assert statuses(results) == ["changed"] * 4
    assert any("from an interrupted transfer" in detail(each) for each in results.values())


def test_a_model_that_changes_meanwhile(cluster: Cluster) -> None:
    syncing = Syncing(cluster)
    syncing.once("worker1", 2)
    on("head", f"cd {PATH}; printf X | dd of=model-5.safetensors bs=1 seek=900 conv=notrunc")
    for result in syncing.wait().values():
        assert isinstance(result, SparkrailError)
        assert str(result).startswith("head: the model changed while it was sent to worker")
    assert files("worker1") == []
    assert statuses(sync(cluster)) == ["changed"] * 4


def test_cancel_ends_it_on_all_nodes(cluster: Cluster) -> None:
    syncing = Syncing(cluster)
    syncing.once("worker1", 2)
    remote.cancel()
    for result in syncing.wait().values():
        assert isinstance(result, Cancelled)
    remote.STOP.clear()
    for node in cluster.nodes:
        poll(partial(is_quiet, node.name), 10)
        assert node.name == "head" or files(node.name) == []


def test_what_the_head_does_not_have_goes_when_asked(cluster: Cluster) -> None:
    assert statuses(sync(cluster)) == ["changed"] * 4
    on("worker1", f"cd {PATH}; mkdir sub outside; echo x | tee sub/old.bin old.safetensors")
    on("worker2", f"mkdir /models/other; echo x >/models/other/a; ln -s ../other {PATH}/link")
    assert detail(sync(cluster)["worker1"]) == "only here: old.safetensors"
    weights = cluster.weights.model_copy(update={"remove_extra": True})
    results = sync(cluster.model_copy(update={"weights": weights}))
    assert detail(results["worker1"]) == "removed 2: old.safetensors, sub/old.bin"
    assert "sub" not in files("worker1")
    assert isinstance(results["worker2"], CommandFailed)
    assert "link/a: lies in /models/other" in str(results["worker2"])
    assert on("worker2", "cat /models/other/a") == "x\n"


def test_rsync_does_the_same(cluster: Cluster) -> None:
    weights = cluster.weights.model_copy(update={"transport": "rsync"})
    cluster = cluster.model_copy(update={"weights": weights, "workers": cluster.workers[:2]})
    assert statuses(sync(cluster)) == ["changed"] * 2
    assert statuses(sync(cluster)) == ["unchanged"] * 2


def test_nothing_to_do_costs_next_to_nothing(cluster: Cluster) -> None:
    """200 files of 600 GB in all, remembered from when they were read."""
    size, number = 3_000_000_000, 200
    text = json.dumps({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, size - 4104]}})
    start = struct.pack("<Q", 4096) + text.ljust(4096).encode()
    zeros = hashlib.sha256(bytes(PIECE)).digest()
    last = hashlib.sha256(bytes(size % PIECE)).digest()
    # What is remembered need only be equal on all nodes: the files are not read.
    pieces = zeros * (count(size) - 1) + last
    record = {
        "size": size,
        "sha256": file_digest(pieces),
        "pieces": packed(pieces),
        "fault": "",
        "names": [],
    }
    script = REMEMBER.format(folder=PATH, number=number, version=VERSION)
    for node in cluster.nodes:
        on(node.name, f"mkdir -p {PATH} ~/.sparkrail/{cluster.name}; rm -f {PATH}/*.safetensors")
        on(node.name, f"echo '{{}}' | tee {PATH}/config.json {PATH}/tokenizer.json")
        on(node.name, f"cat > {PATH}/.start", start)
        on(
            node.name,
            f"cd {PATH}; for at in $(seq {number}); do cp .start big-$at.safetensors; "
            f"truncate -s {size} big-$at.safetensors; done; rm .start",
        )
        state = f"/root/.sparkrail/{cluster.name}/weights.json"
        on(
            node.name,
            f"cat > /tmp/record; python3 -c '{script}' {state}",
            json.dumps(record).encode(),
        )
    sync(cluster)  # Reads the small files, and logs in.
    began = time.monotonic()
    assert statuses(sync(cluster)) == ["unchanged"] * 4
    assert time.monotonic() - began < 3


REMEMBER = """
import json, os, sys
folder, files = "{folder}", {{}}
record = json.load(open("/tmp/record"))
for at in range(1, {number} + 1):
    name = f"big-{{at}}.safetensors"
    found = os.stat(f"{{folder}}/{{name}}")
    identity = [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]
    files[name] = dict(record, identity=identity)
with open(sys.argv[1], "w") as file:
    json.dump(dict(version={version}, folders={{folder: files}}), file)
"""
