"""The weights, from node to node, by real sshd and rsync."""

import json
import shlex
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest
import yaml

from blocks import Cluster, Node
from tasks import remote
from tasks.converge import Outcome, Run
from tasks.errors import CommandFailed, HostKeyRefused, LoginRefused, SparkrailError
from tasks.weights import ensure_weights
from tests.lab import lab
from tests.lab.layout import REPOSITORY, Lab

pytestmark = pytest.mark.lab

LAB = Lab("lab-transfers")
RUN = Run(id="test", who="test")
DRY = Run(id="test", who="test", dry_run=True)
SHARDS = ("model-1.safetensors", "model-2.safetensors")
INDEX = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}


def lab_command(*arguments: str) -> None:
    action, *rest = arguments
    argv = [sys.executable, "-m", "tests.lab", action, f"--name={LAB.name}", *rest]
    subprocess.run(argv, cwd=REPOSITORY, stdin=subprocess.DEVNULL, timeout=300, check=True)


def on(node: str, script: str, stdin: bytes = b"") -> str:
    argv = lab.command_line(LAB, node, ["sh", "-ec", script])
    done = subprocess.run(argv, input=stdin, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    lab_command("down")
    lab_command("up", "--no-engine")
    yield Cluster.model_validate(yaml.safe_load(LAB.spec.read_text()))
    remote.disconnect()
    lab_command("down")


@pytest.fixture
def worker(cluster: Cluster) -> Node:
    return cluster.workers[0]


# --- weights ------------------------------------------------------------------------------------


def safetensors(size: int) -> bytes:
    text = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(size)


def ensure_weights_on(cluster: Cluster, node: Node, run: Run = RUN) -> Outcome:
    outcome = ensure_weights.fn(cluster, node, run)
    assert isinstance(outcome, Outcome)
    return outcome


@pytest.fixture
def model(cluster: Cluster) -> Iterator[Cluster]:
    """A model on the head only, laid out as the hub's cache does, under a name that bites."""
    path = "/models/My Model's $(touch /tmp/bitten) v1"
    content = {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "model.safetensors.index.json": json.dumps(INDEX).encode(),
        "sub/odd name's.txt": b"x",
        **{name: safetensors(1_000_000 + at) for at, name in enumerate(SHARDS)},
    }
    for at, (name, data) in enumerate(content.items()):
        blob, file = f"/models/blobs/{at}", shlex.quote(f"{path}/{name}")
        on(
            "head",
            f'mkdir -p /models/blobs "$(dirname -- {file})"; cat >{blob}; ln -s {blob} {file}',
            data,
        )
    yield cluster.model_copy(update={"model": cluster.model.model_copy(update={"path": path})})
    for node in cluster.nodes:
        on(node.name, "rm -rf /models/blobs /models/My* ~/.sparkrail /tmp/bitten")


def inside(cluster: Cluster, node: str, script: str) -> str:
    return on(node, f"cd {shlex.quote(cluster.model.path)}; {script}")


def by(cluster: Cluster, transport: str) -> Cluster:
    weights = cluster.weights.model_copy(update={"transport": transport})
    return cluster.model_copy(update={"weights": weights})


@pytest.mark.parametrize("transport", ["streams", "rsync"])
def test_weights_converge(model: Cluster, worker: Node, transport: str) -> None:
    model = by(model, transport)
    assert ensure_weights_on(model, model.head).status == "unchanged"
    assert ensure_weights_on(model, worker, DRY).status == "planned"
    assert on(worker.name, "ls /models").split() == ["lost+found"]
    outcomes = [ensure_weights_on(model, worker) for _ in range(2)]
    assert [outcome.status for outcome in outcomes] == ["changed", "unchanged"]
    assert outcomes[0].detail.startswith("sent 6 of 6 files, 2.0 MB at ")
    assert outcomes[0].data == ensure_weights_on(model, model.head).data
    assert inside(model, worker.name, "find . -type l") == ""
    for node in model.nodes:
        assert on(node.name, "ls -d /tmp/bitten || true") == ""


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(
            "touch -r {0} /tmp/time; printf X | dd of={0} bs=1 seek=500 conv=notrunc; "
            "touch -r /tmp/time {0}",
            id="other content of the same size and time",
        ),
        pytest.param("truncate -s -1 {0}", id="cut off"),
        pytest.param("rm {0}", id="removed"),
        pytest.param("rm {0}; ln -s gone {0}", id="a broken link"),
    ],
)
def test_only_the_damaged_file_is_sent(model: Cluster, worker: Node, damage: str) -> None:
    ensure_weights_on(model, worker)
    inside(model, worker.name, damage.format(SHARDS[1]))
    outcomes = [ensure_weights_on(model, worker) for _ in range(2)]
    assert [outcome.status for outcome in outcomes] == ["changed", "unchanged"]
    assert outcomes[0].detail.startswith("sent 1 of 6 files, 1.0 MB at ")
    assert outcomes[0].detail.endswith(SHARDS[1])


def test_files_of_the_worker_alone_stay(model: Cluster, worker: Node) -> None:
    ensure_weights_on(model, worker)
    inside(model, worker.name, f"cp {SHARDS[0]} extra.safetensors; touch notes.txt")
    outcome = ensure_weights_on(model, worker)
    assert (outcome.status, outcome.detail) == ("unchanged", "only here: extra.safetensors")


def test_an_incomplete_model_is_not_sent(model: Cluster, worker: Node) -> None:
    inside(model, "head", f"truncate -s -1 /models/blobs/4; rm {SHARDS[1]} config.json")
    with pytest.raises(SparkrailError) as error:
        ensure_weights_on(model, worker)
    size = len(safetensors(1_000_000))
    assert error.value.details == (
        f"model-1.safetensors has {size - 1} bytes, its header promises {size}\n"
        "config.json is missing\n"
        "model-2.safetensors is missing (model.safetensors.index.json names it)"
    )
    assert on(worker.name, "ls /models").split() == ["lost+found"]


@pytest.mark.parametrize(
    ("transport", "said"),
    [
        pytest.param("streams", r"(?s)the disk is full\n.*df -h", id="streams"),
        pytest.param("rsync", r"(?s)\(rsync exit code 11\)\n.*df -h", id="rsync"),
    ],
)
def test_a_full_disk_is_named(model: Cluster, worker: Node, transport: str, said: str) -> None:
    model = by(model, transport)
    ensure_weights_on(model, worker)
    inside(model, worker.name, f"rm {SHARDS[0]}")
    lab_command("break", worker.name, "fill-disk")
    try:
        with pytest.raises(CommandFailed, match=said):
            ensure_weights_on(model, worker)
    finally:
        lab_command("break", worker.name, "free-disk")
    assert ensure_weights_on(model, worker).status == "changed"


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        pytest.param("mv known_hosts known_hosts.kept", HostKeyRefused, id="unknown host key"),
        pytest.param("mv id_ed25519 id_ed25519.kept", LoginRefused, id="no key"),
    ],
)
def test_the_heads_own_ssh(
    model: Cluster, worker: Node, spoil: str, kind: type[SparkrailError]
) -> None:
    model = by(model, "rsync")
    on("head", f"cd ~/.ssh; {spoil}")
    try:
        with pytest.raises(kind, match=r"^worker1: head -> root@10\.77\.0\.2:22: "):
            ensure_weights_on(model, worker)
    finally:
        on("head", 'cd ~/.ssh; for f in *.kept; do mv "$f" "${f%.kept}"; done')
