"""The image, from the control machine to the head and through the workers, by real engines."""

import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import yaml

from blocks import Cluster, Node
from tasks import remote
from tasks.converge import Outcome, Run
from tasks.errors import Cancelled, NodeUnreachable, SparkrailError
from tasks.images import ensure_image
from tests.lab import lab, network
from tests.lab.docker_archive import (
    Image,
    Layer,
    Member,
    file_member,
    file_members,
    write_archive,
    write_layer,
)
from tests.lab.layout import Lab
from tests.lab.product import lab_command, poll
from tests.lab.python_layer import python_members

pytestmark = pytest.mark.lab

LAB = Lab("lab-images")
DRY = Run(id="test", who="test", dry_run=True)
ONE, TWO, THREE = "worker1", "worker2", "worker3"
DOCKER = "/usr/local/bin/docker"
# More than all that waits on the way: pipes, sockets, and what the program holds.
PADDING = 80_000_000


def on(node: str, script: str, stdin: bytes = b"") -> str:
    argv = lab.command_line(LAB, node, ["sh", "-ec", script])
    done = subprocess.run(argv, input=stdin, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def brought_up(*options: str) -> Iterator[Cluster]:
    lab_command(LAB, "down")
    try:
        lab_command(LAB, "up", "--no-engine", "--workers=3", *options)
        yield Cluster.model_validate(yaml.safe_load(LAB.spec.read_text()))
    finally:
        remote.disconnect()
        lab_command(LAB, "down")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Legacy archives, and the classic store on all nodes."""
    yield from brought_up()


@pytest.fixture
def clean(cluster: Cluster) -> Iterator[None]:
    yield
    remote.STOP.clear()
    empty(cluster)


def empty(cluster: Cluster) -> None:
    for node in cluster.nodes:
        on(node.name, f"rm -f {DOCKER}; docker container prune -f; docker image prune --all -f")


# --- images ---------------------------------------------------------------------------------------


class Versions:
    """Images of one name: a base, and above it a layer for each version."""

    def __init__(
        self, tag: str, folder: Path, padding: int = 3_000_000, more: Iterable[Member] = ()
    ) -> None:
        self.tag = tag
        self.folder = folder
        self.base = self.layer("base", os.urandom(padding), more)

    def layer(self, name: str, content: bytes, more: Iterable[Member] = ()) -> Layer:
        file = self.folder / f"{name}.tar"
        return Layer(file, write_layer((*file_members({name: content}), *more), file))

    def image(self, version: str) -> Image:
        top = self.layer(version, version.encode() + bytes(100_000))
        return Image(self.tag, (self.base, top), "amd64", {}, ["/engine"])

    def archive(self, version: str) -> Path:
        file = self.folder / "image.tar"
        write_archive(self.image(version), file)
        return file

    def load(self, version: str, *nodes: str) -> None:
        archive = self.archive(version).read_bytes()
        for node in nodes:
            on(node, "docker load", stdin=archive)


@pytest.fixture
def versions(cluster: Cluster, tmp_path: Path, clean: None) -> Versions:
    """The first version on the head only."""
    del clean
    found = Versions(cluster.image.name, tmp_path)
    found.load("one", "head")
    return found


def images(node: str) -> set[str]:
    listed = on(node, "docker image ls --all --format '{{.Repository}}:{{.Tag}}'")
    return set(listed.split())


def fresh() -> Run:
    return Run(id=os.urandom(6).hex(), who="test")


def ensure(cluster: Cluster, node: Node, run: Run | None = None) -> Outcome:
    outcome = ensure_image.fn(cluster, node, run or fresh())
    assert isinstance(outcome, Outcome)
    return outcome


def ensure_all(cluster: Cluster) -> dict[str, Outcome | SparkrailError]:
    """The steps of all workers side by side, as a deploy has them."""
    run = fresh()

    def attempt(node: Node) -> Outcome | SparkrailError:
        try:
            return ensure(cluster, node, run)
        except SparkrailError as error:
            return error

    with ThreadPoolExecutor(len(cluster.workers)) as pool:
        found = pool.map(attempt, cluster.workers)
        return {node.name: end for node, end in zip(cluster.workers, found, strict=True)}


def statuses(ended: Mapping[str, Outcome | SparkrailError]) -> dict[str, str]:
    return {
        name: end.status if isinstance(end, Outcome) else type(end).__name__
        for name, end in ended.items()
    }


def details(ended: Mapping[str, Outcome | SparkrailError]) -> list[str]:
    return [end.detail if isinstance(end, Outcome) else str(end) for end in ended.values()]


NO_PYTHON = "; by docker save: no container can read docker's folder: the image has no python3"
CHANGED = dict.fromkeys((ONE, TWO, THREE), "changed")
UNCHANGED = dict.fromkeys((ONE, TWO, THREE), "unchanged")


def sent_bytes(node: str) -> int:
    """What has left the node's fabric port, headers included."""
    interface = lab.node_named(LAB, node).fabric_interface
    argv = [*network.inside(LAB, node), "ip", "-json", "-stats", "link", "show", interface]
    said = subprocess.run(argv, capture_output=True, timeout=30, check=True).stdout
    return int(json.loads(said)[0]["stats64"]["tx"]["bytes"])


def logged_in_as(cluster: Cluster, user: str) -> Cluster:
    """Only root may read the folder of its engine; op may use docker."""
    head = cluster.head.model_copy(update={"user": user})
    return cluster.model_copy(update={"head": head})


# The images of most trials have no python3 that could read the folder in a container.
by_docker_save = partial(logged_in_as, user="op")


# --- what is sent ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("clean")
def test_no_image_anywhere(cluster: Cluster) -> None:
    for node in cluster.nodes:
        with pytest.raises(SparkrailError, match=r"^head: there is no image sparkrail/engine:lab"):
            ensure(cluster, node)


def test_all_workers_get_it_at_once(cluster: Cluster, versions: Versions) -> None:
    assert ensure(cluster, cluster.head).status == "unchanged"
    assert ensure(cluster, cluster.workers[0], DRY).status == "planned"
    assert images(ONE) == set()
    before = sent_bytes("head")
    ended = ensure_all(cluster)
    assert sent_bytes("head") - before < 1.2 * 3_100_000
    assert statuses(ended) == CHANGED
    assert all(text.startswith(f"sent {versions.tag}, 3.1 MB at ") for text in details(ended))
    again = ensure_all(cluster)
    assert statuses(again) == UNCHANGED
    at_head = ensure(cluster, cluster.head).data
    assert at_head["entrypoint"] == ["/engine"]
    assert [end.data for end in again.values() if isinstance(end, Outcome)] == [at_head] * 3


@pytest.mark.parametrize("user", ["root", "op"])
def test_only_the_missing_layer_is_sent(cluster: Cluster, versions: Versions, user: str) -> None:
    cluster = logged_in_as(cluster, user)
    versions.load("one", ONE, TWO, THREE)
    versions.load("two", "head")
    before = {node.name: sent_bytes(node.name) for node in cluster.nodes}
    ended = ensure_all(cluster)
    assert statuses(ended) == CHANGED
    for text in details(ended):
        assert re.match(rf"sent {versions.tag}, 1\d\d\.\d kB, 1 of 2 layers", text), text
        assert (NO_PYTHON in text) is (user == "op")
    assert nothing_is_left("head")
    for name, count in before.items():
        assert sent_bytes(name) - count < 700_000, name
    assert statuses(ensure_all(cluster)) == UNCHANGED


def test_a_tag_that_moved_is_set_right(cluster: Cluster, versions: Versions) -> None:
    ensure_all(cluster)
    other = Versions("another:1", versions.folder)
    other.load("other", TWO)
    on(TWO, f"docker tag another:1 {versions.tag}")
    ended = ensure_all(cluster)
    assert statuses(ended) == {**UNCHANGED, TWO: "changed"}
    assert images(TWO) == {versions.tag, "another:1"}
    # All its layers are there under another name: hardly a byte is needed.
    on(TWO, f"docker tag {versions.tag} kept:1; docker tag another:1 {versions.tag}")
    assert ", 0 of 2 layers" in ensure(cluster, cluster.workers[1]).detail


def test_nights_leave_nothing_behind(cluster: Cluster, versions: Versions) -> None:
    for night in range(4):
        versions.load(f"night {night}", "head")
        assert statuses(ensure_all(cluster)) == CHANGED
    for node in cluster.workers:
        assert images(node.name) == {versions.tag}


def test_replaced_images_go_when_nothing_uses_them(cluster: Cluster, versions: Versions) -> None:
    versions.load("old", ONE)
    on(ONE, f"docker create --name=user {versions.tag}")
    used = on(ONE, f"docker image inspect --format '{{{{.Id}}}}' {versions.tag}").strip()
    worker = cluster.workers[0]
    assert "removed" not in ensure(cluster, worker).detail
    assert images(ONE) == {
        versions.tag,
        f"sparkrail/{cluster.name}-replaced:{used.removeprefix('sha256:')[:12]}",
    }
    on(ONE, "docker rm user")
    versions.load("newer", "head")
    assert ensure(cluster, worker).detail.count("removed") == 2
    assert images(ONE) == {versions.tag}


def test_an_archive_on_the_control_machine(cluster: Cluster, versions: Versions) -> None:
    def with_archive(version: str) -> Cluster:
        image = {"source": "control", "archive": str(versions.archive(version))}
        return cluster.model_copy(update={"image": cluster.image.model_copy(update=image)})

    two = with_archive("two")
    outcomes = [ensure(two, two.head, run) for run in (DRY, None, None)]
    assert [outcome.status for outcome in outcomes] == ["planned", "changed", "unchanged"]
    assert ", 1 of 2 layers" in outcomes[1].detail
    assert images("head") == {versions.tag}
    assert statuses(ensure_all(two)) == CHANGED
    empty(cluster)
    assert ", 1 of 2" not in ensure(with_archive("three"), two.head).detail


# --- what can go wrong ----------------------------------------------------------------------------


def fake_docker(node: str, script: str) -> None:
    text = f'#!/bin/sh\ncase "$1" in {script};; esac\nexec /usr/bin/docker "$@"\n'
    on(node, f"cat >{DOCKER}; chmod +x {DOCKER}", text.encode())


def test_save_fails(cluster: Cluster, versions: Versions) -> None:
    del versions
    cluster = by_docker_save(cluster)
    fake_docker("head", "save) head -c 99999 /dev/zero; echo cannot read layer >&2; exit 1")
    ended = ensure_all(cluster)
    for text in details(ended):
        assert text.startswith("head: docker save ended with exit code 1 after 99999 bytes\n")
    assert statuses(ended) == dict.fromkeys(CHANGED, "CommandFailed")
    assert [images(node.name) for node in cluster.workers] == [set()] * 3


@pytest.mark.parametrize(
    ("fake", "said"),
    [
        pytest.param(
            "load) head -c 99999 >/dev/null; echo no space left on device >&2; exit 1",
            "worker2: docker load of the image from head ended with exit code 1\n"
            "no space left on device\nMake room on worker2: docker system df",
            id="disk full",
        ),
        pytest.param(
            'load) cat >/dev/null; echo \'{"errorDetail":{"message":"boom"}}\'; exit 0',
            "worker2: docker load of the image from head ended with exit code 0\n",
            id="an error in its answer",
        ),
        pytest.param(
            "load) cat >/dev/null; exit 0",
            "worker2: docker load ended well, but sparkrail/engine:lab is not the image that was "
            "sent",
            id="it lied",
        ),
    ],
)
def test_one_load_fails(cluster: Cluster, versions: Versions, fake: str, said: str) -> None:
    fake_docker(TWO, fake)
    ended = ensure_all(cluster)
    assert statuses(ended) == {**CHANGED, TWO: "CommandFailed"}
    assert str(ended[TWO]).startswith(said)
    assert versions.tag not in images(TWO)
    on(TWO, f"rm {DOCKER}")
    assert statuses(ensure_all(cluster)) == {**UNCHANGED, TWO: "changed"}


class Midway:
    """A transfer of an image too large to wait on the way, whose second worker has stopped."""

    def __init__(self, cluster: Cluster, folder: Path, more: Iterable[Member] = ()) -> None:
        self.cluster = by_docker_save(cluster)
        Versions(cluster.image.name, folder, PADDING, more).load("large", "head")
        on(TWO, "rm -f /tmp/begun")
        fake_docker(TWO, "load) head -c 1000000 >/dev/null; touch /tmp/begun; exec sleep 500")
        self.ended: dict[str, Outcome | SparkrailError] = {}
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        self.ended = ensure_all(self.cluster)

    def begin(self) -> None:
        self.thread.start()
        poll(lambda: on(TWO, "ls /tmp").count("begun"), 60)

    def end(self) -> dict[str, Outcome | SparkrailError]:
        self.thread.join(150)
        assert not self.thread.is_alive()
        return self.ended


@pytest.fixture
def midway(cluster: Cluster, tmp_path: Path, clean: None) -> Midway:
    del clean
    found = Midway(cluster, tmp_path)
    found.begin()
    return found


KILL_PROGRAM = "kill -9 $(pgrep -f '^python3 - image_stream')"


def next_run_completes(cluster: Cluster) -> None:
    on(TWO, f"rm -f {DOCKER}")
    assert statuses(ensure_all(cluster)) == {**UNCHANGED, TWO: "changed"}


def test_a_killed_receiver(cluster: Cluster, midway: Midway) -> None:
    on(TWO, KILL_PROGRAM)
    ended = midway.end()
    assert statuses(ended) == {**CHANGED, TWO: "CommandFailed"}
    next_run_completes(cluster)


@pytest.mark.parametrize(
    ("fault", "mend"),
    [
        pytest.param("kill", "boot", id="the power of the middle one fails"),
        pytest.param("link-down", "link-up", id="the link of the middle one goes down"),
        pytest.param("freeze", "thaw", id="the middle one freezes"),
    ],
)
@pytest.mark.extended
def test_a_dead_node_in_the_middle(cluster: Cluster, midway: Midway, fault: str, mend: str) -> None:
    lab_command(LAB, "break", TWO, fault)
    try:
        ended = midway.end()
        assert isinstance(ended[TWO], NodeUnreachable)
        assert statuses(ended) == {**CHANGED, TWO: "NodeUnreachable"}
    finally:
        lab_command(LAB, "break", TWO, mend)
    next_run_completes(cluster)


def test_a_killed_sender(cluster: Cluster, midway: Midway) -> None:
    on("head", KILL_PROGRAM)
    ended = midway.end()
    assert statuses(ended) == dict.fromkeys(CHANGED, "CommandFailed")
    assert [images(node.name) for node in cluster.workers] == [set()] * 3
    on(TWO, f"rm -f {DOCKER}")
    assert statuses(ensure_all(cluster)) == CHANGED


def test_cancel_ends_the_stream_everywhere(cluster: Cluster, midway: Midway) -> None:
    remote.cancel()
    assert all(isinstance(end, Cancelled) for end in midway.end().values())
    remote.STOP.clear()
    for node in cluster.nodes:
        poll(partial(nothing_is_left, node.name))
    assert [images(node.name) for node in cluster.workers] == [set()] * 3


def nothing_is_left(node: str) -> bool:
    """No process and no container of a transfer, in whatever state."""
    ours = ("docker save", "docker load", "docker run", "image_stream", "exec(sys.stdin")
    running = on(node, "ps -e -o args")
    return not any(name in running for name in ours) and not on(node, "docker ps --all --quiet")


# --- where only docker may read its folder --------------------------------------------------------

CLIENT = "$(pgrep -f '^docker run --rm --interactive')"
KILL_CLIENT = f"kill -9 {CLIENT}"
LABELS = "--label=sparkrail.cluster={} --label=sparkrail.role=image"
# Without what the engine makes for itself when a container starts from an image for the first time.
STORE = """\
cd /var/lib/docker
find overlay2 image volumes ! -name '*.json' ! -name '*.db' ! -name committed \
    ! -path '*/layerdb/mounts' | sort"""
RUN_ALONE = """\
import sys
from blocks import Cluster
from tests.lab.test_image_transfers import ensure_all
ensure_all(Cluster.model_validate_json(sys.argv[1]))"""


class TestContained:
    """The head's user may use docker, and not read its folder; the image has python3."""

    def test_only_the_missing_layer_is_sent(self, cluster: Cluster, versions: Versions) -> None:
        versions = Versions(versions.tag, versions.folder, more=python_members(LAB, "head"))
        versions.load("one", "head", ONE, TWO, THREE)
        versions.load("two", "head")
        fake_docker("head", "save) echo docker save is not to be used >&2; exit 1")
        kept = on("head", STORE)
        # As a run leaves it that is killed between two words with docker.
        on("head", f"docker create {LABELS.format(cluster.name)} {versions.tag} true")
        before = {node.name: sent_bytes(node.name) for node in cluster.nodes}
        ended = ensure_all(logged_in_as(cluster, "op"))
        assert statuses(ended) == CHANGED, details(ended)
        for text in details(ended):
            assert re.match(rf"sent {versions.tag}, 1\d\d\.\d kB, 1 of 2 layers", text), text
            assert "docker save" not in text
        for name, count in before.items():
            assert sent_bytes(name) - count < 700_000, name
        assert nothing_is_left("head")
        assert on("head", STORE) == kept
        assert statuses(ensure_all(cluster)) == UNCHANGED

    def test_a_container_that_is_refused(self, cluster: Cluster, versions: Versions) -> None:
        versions = Versions(versions.tag, versions.folder, more=python_members(LAB, "head"))
        versions.load("one", "head")
        fake_docker("head", "run) echo docker: no such right >&2; exit 125")
        ended = ensure_all(logged_in_as(cluster, "op"))
        assert statuses(ended) == CHANGED, details(ended)
        for text in details(ended):
            assert text.endswith(
                "; by docker save: no container can read docker's folder: docker: no such right"
            )

    @pytest.fixture
    @staticmethod
    def midway(cluster: Cluster, tmp_path: Path, clean: None) -> Midway:
        del clean
        return Midway(cluster, tmp_path, python_members(LAB, "head"))

    @pytest.mark.parametrize(
        "kill",
        [
            pytest.param(KILL_CLIENT, id="the client of docker"),
            pytest.param(f"{KILL_PROGRAM} {CLIENT}", id="our program too, at once"),
        ],
    )
    def test_a_killed_sender(self, cluster: Cluster, midway: Midway, kill: str) -> None:
        midway.begin()
        assert on("head", "docker ps --quiet")
        on("head", kill)
        poll(lambda: not on("head", "docker ps --all --quiet"))
        remote.cancel()
        midway.end()
        self.all_is_well(cluster)

    def test_cancel(self, cluster: Cluster, midway: Midway) -> None:
        midway.begin()
        assert on("head", "docker ps --quiet")
        remote.cancel()
        assert all(isinstance(end, Cancelled) for end in midway.end().values())
        self.all_is_well(cluster)

    @pytest.mark.extended  # It has failed once of many times, on a machine at its limit.
    def test_a_killed_run(self, cluster: Cluster, midway: Midway) -> None:
        spec = midway.cluster.model_dump_json()
        with subprocess.Popen([sys.executable, "-c", RUN_ALONE, spec]) as run:
            try:
                poll(lambda: on(TWO, "ls /tmp").count("begun"), 60)
                assert on("head", "docker ps --quiet")
            finally:
                run.kill()
        self.all_is_well(cluster)

    @staticmethod
    def all_is_well(cluster: Cluster) -> None:
        """Nothing is left, and the next run completes."""
        remote.STOP.clear()
        for node in cluster.nodes:
            poll(partial(nothing_is_left, node.name))
        on(TWO, f"rm -f {DOCKER}")
        ended = ensure_all(by_docker_save(cluster))
        assert statuses(ended) == CHANGED, details(ended)
        assert nothing_is_left("head")


# --- other engines --------------------------------------------------------------------------------


def compressed(image: Image, file: Path) -> None:
    """The image as an engine with the containerd store has it after a pull."""
    blobs: dict[str, bytes] = {}

    def add(kind: str, content: bytes) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        blobs[digest] = content
        media = f"application/vnd.oci.image.{kind}"
        return {"mediaType": media, "digest": f"sha256:{digest}", "size": len(content)}

    layers = [
        add("layer.v1.tar+gzip", gzip.compress(layer.path.read_bytes(), 1, mtime=0))
        for layer in image.layers
    ]
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": add("config.v1+json", image.config()),
        "layers": layers,
    }
    names = {
        "io.containerd.image.name": f"docker.io/{image.tag}",
        "org.opencontainers.image.ref.name": image.tag.rpartition(":")[2],
    }
    found = {**add("manifest.v1+json", json.dumps(manifest).encode()), "annotations": names}
    index = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [found],
    }
    files = {f"blobs/sha256/{digest}": content for digest, content in blobs.items()}
    files["index.json"] = json.dumps(index).encode()
    files["oci-layout"] = b'{"imageLayoutVersion":"1.0.0"}'
    with tarfile.open(file, "w") as tar:
        for name, content in sorted(files.items()):
            tar.addfile(*file_member(name, content))


DAEMON = '{"features": {"containerd-snapshotter": %s}}'


class TestNewerEngine:
    """Engine 26 with both stores."""

    @pytest.fixture(scope="class")
    @classmethod
    def cluster(cls) -> Iterator[Cluster]:
        yield from brought_up("--base=trixie")

    @pytest.fixture
    @staticmethod
    def mixed(cluster: Cluster) -> Cluster:
        """The second worker has the containerd store."""
        use_store(TWO, containerd=True)
        return cluster

    @pytest.mark.usefixtures("mixed")
    def test_both_stores_take_the_missing_layer_alone(
        self, cluster: Cluster, versions: Versions
    ) -> None:
        assert statuses(ensure_all(cluster)) == CHANGED
        versions.load("two", "head")
        ended = ensure_all(cluster)
        assert statuses(ended) == CHANGED
        for text in details(ended):
            assert re.match(rf"sent {versions.tag}, 1\d\d\.\d kB, 1 of 2 layers", text), text
        assert statuses(ensure_all(cluster)) == UNCHANGED

    def test_a_store_that_refuses_the_layer_alone_gets_all(
        self, cluster: Cluster, versions: Versions
    ) -> None:
        """A stub refuses once; the stores of these engines do not."""
        versions.load("one", ONE, TWO, THREE)
        versions.load("two", "head")
        refuses = "cat >/dev/null; touch /tmp/refused; echo failed to resolve layers >&2; exit 1"
        fake_docker(TWO, f"load) [ -e /tmp/refused ] || {{ {refuses}; }}")
        ended = ensure_all(cluster)
        assert statuses(ended) == CHANGED
        one, two, three = details(ended)
        assert (
            f"sent {versions.tag}, 3.1 MB at " in two
            and "; all of it, since docker load on worker2 refused the missing layers alone "
            "(failed to resolve layers)"
            in two
        )
        assert ", 1 of 2 layers" in one
        assert ", 1 of 2 layers" in three

    def test_layers_as_they_were_pulled(self, cluster: Cluster, versions: Versions) -> None:
        use_store("head", containerd=True)
        try:
            self.send_pulled(cluster, versions)
        finally:
            empty(cluster)
            use_store("head", containerd=False)

    def send_pulled(self, cluster: Cluster, versions: Versions) -> None:
        file = versions.folder / "compressed.tar"
        for version, layers in (("one", "2 of 2"), ("two", "1 of 2")):
            compressed(versions.image(version), file)
            on("head", "docker load", stdin=file.read_bytes())
            ended = ensure_all(cluster)
            assert statuses(ended) == CHANGED
            said = ", 1 of 2 layers" if layers == "1 of 2" else "MB at"
            assert all(said in text for text in details(ended)), details(ended)


def use_store(node: str, *, containerd: bool) -> None:
    """The node's engine comes up anew with this store, after a power cut."""
    text = DAEMON % json.dumps(containerd)
    if on(node, "cat /etc/docker/daemon.json 2>/dev/null || true") == text:
        return
    on(node, "mkdir -p /etc/docker; cat >/etc/docker/daemon.json", text.encode())
    remote.disconnect()
    lab_command(LAB, "break", node, "kill")
    lab_command(LAB, "break", node, "boot")
