"""The image and the weights, from node to node, by real sshd, dockerd and rsync."""

import json
import shlex
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from blocks import Cluster, Node
from tasks import remote
from tasks.converge import Outcome, Run
from tasks.errors import Cancelled, CommandFailed, HostKeyRefused, LoginRefused, SparkrailError
from tasks.images import ensure_image
from tasks.weights import ensure_weights
from tests.lab import lab
from tests.lab.docker_archive import Image, Layer, file_members, write_archive, write_layer
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


# --- image --------------------------------------------------------------------------------------


def load(node: str, folder: Path, tag: str, text: bytes, padding: int = 0) -> None:
    file = folder / "layer.tar"
    digest = write_layer(file_members({"note": text, "padding": bytes(padding)}), file)
    archive = folder / "image.tar"
    write_archive(Image(tag, (Layer(file, digest),), "amd64", {}, ["/engine"]), archive)
    on(node, "docker load", stdin=archive.read_bytes())


def images(node: str) -> set[str]:
    listed = on(node, "docker image ls --all --format '{{.Repository}}:{{.Tag}}'")
    return set(listed.split())


def ensure_image_on(cluster: Cluster, node: Node, run: Run = RUN) -> Outcome:
    outcome = ensure_image.fn(cluster, node, run)
    assert isinstance(outcome, Outcome)
    return outcome


@pytest.fixture
def image(cluster: Cluster, tmp_path: Path) -> Iterator[str]:
    """The wanted image on the head only."""
    load("head", tmp_path, cluster.image.name, b"one", padding=5_000_000)
    yield cluster.image.name
    for node in cluster.nodes:
        on(node.name, "docker container prune -f; docker image prune --all -f")


def test_no_image_anywhere(cluster: Cluster) -> None:
    for node in cluster.nodes:
        with pytest.raises(SparkrailError, match=r"^head: there is no image sparkrail/engine:lab"):
            ensure_image_on(cluster, node)


def test_image_converges(cluster: Cluster, worker: Node, image: str, tmp_path: Path) -> None:
    assert ensure_image_on(cluster, cluster.head).status == "unchanged"
    assert ensure_image_on(cluster, worker, DRY).status == "planned"
    assert images(worker.name) == set()
    outcomes = [ensure_image_on(cluster, worker) for _ in range(2)]
    assert [outcome.status for outcome in outcomes] == ["changed", "unchanged"]
    assert outcomes[0].detail.startswith(f"sent {image}, 5.0 MB at ")
    assert outcomes[0].data == outcomes[1].data == ensure_image_on(cluster, cluster.head).data
    assert outcomes[0].data["entrypoint"] == ["/engine"]

    load(worker.name, tmp_path, "another:1", b"two")
    on(worker.name, f"docker tag another:1 {image}")
    outcomes = [ensure_image_on(cluster, worker) for _ in range(2)]
    assert [outcome.status for outcome in outcomes] == ["changed", "unchanged"]
    assert images(worker.name) == {image, "another:1"}


def test_replaced_images_go_when_nothing_uses_them(
    cluster: Cluster, worker: Node, image: str, tmp_path: Path
) -> None:
    load(worker.name, tmp_path, image, b"old")
    on(worker.name, f"docker create --name=user {image}")
    used = on(worker.name, f"docker image inspect --format '{{{{.Id}}}}' {image}").strip()
    assert "removed" not in ensure_image_on(cluster, worker).detail
    assert images(worker.name) == {
        image,
        f"sparkrail/{cluster.name}-replaced:{used.removeprefix('sha256:')[:12]}",
    }
    on(worker.name, "docker rm user")
    load("head", tmp_path, image, b"newer")
    assert ensure_image_on(cluster, worker).detail.count("removed") == 2
    assert images(worker.name) == {image}


@pytest.mark.parametrize(
    ("node", "fake", "said"),
    [
        pytest.param(
            "head",
            "save) head -c 99999 /dev/zero; echo cannot read layer >&2; exit 1",
            "head: docker save for worker1 ended with exit code 1 after 99999 bytes",
            id="save fails",
        ),
        pytest.param(
            "worker1",
            "load) head -c 99999 >/dev/null; echo no space left on device >&2; exit 1",
            "worker1: docker load of the image from head ended with exit code 1",
            id="load fails",
        ),
    ],
)
def test_both_ends_of_the_stream_count(
    cluster: Cluster, worker: Node, image: str, node: str, fake: str, said: str
) -> None:
    script = f'#!/bin/sh\ncase "$1" in {fake};; esac\nexec /usr/bin/docker "$@"\n'
    on(node, "cat >/usr/local/bin/docker; chmod +x /usr/local/bin/docker", script.encode())
    try:
        with pytest.raises(CommandFailed) as error:
            ensure_image_on(cluster, worker)
    finally:
        on(node, "rm /usr/local/bin/docker")
    assert str(error.value).startswith(said)
    assert image not in images(worker.name)


def test_cancel_ends_the_stream_on_both_nodes(cluster: Cluster, worker: Node, image: str) -> None:
    # The listener tells when the stream has begun, and would never end by itself.
    on(worker.name, "mkfifo /tmp/begun /tmp/never")
    script = '#!/bin/sh\n[ "$1" = load ] || exec /usr/bin/docker "$@"\n'
    script += "echo >/tmp/begun; exec cat /tmp/never\n"
    place = "/usr/local/bin/docker"
    on(worker.name, f"cat >{place}; chmod +x {place}", script.encode())

    def cancel() -> None:
        on(worker.name, "cat /tmp/begun")
        remote.cancel()

    watch = threading.Thread(target=cancel)
    watch.start()
    try:
        with pytest.raises(Cancelled):
            ensure_image_on(cluster, worker)
    finally:
        watch.join()
        remote.STOP.clear()
        on(
            worker.name,
            f"rm {place}; timeout 20 sh -c 'echo >/tmp/never'; rm /tmp/begun /tmp/never",
        )
    assert on("head", "ps -e -o args").count("docker save") == 0
    assert image not in images(worker.name)


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
        pytest.param(
            "streams", r"(?s)the disk is full\n.* bytes are needed, .*df -h", id="streams"
        ),
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
