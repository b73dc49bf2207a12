"""The image transfer: of an image whose last, small layer has changed, to one and to four workers.

Against `docker save | ssh docker load` from the same state of the same nodes.
"""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

import yaml

from blocks import Cluster, Node
from tasks import remote
from tasks.converge import Outcome, Run
from tasks.images import ensure_image
from tests.bench.rows import Row, compared
from tests.lab import lab, network
from tests.lab.command import say
from tests.lab.docker_archive import (
    Image,
    Layer,
    Member,
    file_members,
    write_archive,
    write_layer,
)
from tests.lab.layout import Lab, Shape
from tests.lab.python_layer import python_members

LAB = Lab("lab-bench-images")
SHAPE = Shape(workers=4, engine=False)
# Of random bytes, which nothing on the way can make smaller.
BASE = (220_000_000, 150_000_000)
CHANGED = 25_000_000
# For the head: a docker that starts no container.
NO_CONTAINER = """\
#!/bin/sh
[ "$1" != run ] || exit 125
exec /usr/bin/docker "$@"
"""
STUB = "/usr/local/bin/docker"


def measure(repetitions: int) -> list[Row]:
    """Brings a lab up, measures, and takes it down."""
    with tempfile.TemporaryDirectory() as folder, _cluster() as cluster:
        bench = Bench(cluster, Path(folder))
        bench.prepare()
        found = [bench.repetition(number) for number in range(1, repetitions + 1)]
    return rows(found)


@dataclass(frozen=True)
class Figures:
    """Of one repetition: seconds, and bytes that left the head's fabric port."""

    missing: int
    by_hand: float
    to_one: float
    to_one_bytes: int
    by_container: float
    by_docker_save: float
    to_four: float
    to_four_bytes: int


def rows(found: Sequence[Figures]) -> list[Row]:
    """What the repetitions come to."""
    megabytes = [each.missing / 1e6 for each in found]
    return [
        compared(
            "image with one small layer changed, to one worker",
            [each.to_one for each in found],
            "s",
            other="docker save \\| ssh docker load",
            others=[each.by_hand for each in found],
            at_most=0.4,
        ),
        compared(
            "... bytes on the wire",
            [each.to_one_bytes / 1e6 for each in found],
            "MB",
            other="the missing layer",
            others=megabytes,
            at_most=1.05,
        ),
        compared(
            "... where only root may read docker's folder",
            [each.by_container for each in found],
            "s",
            other="docker save \\| ssh docker load",
            others=[each.by_hand for each in found],
            at_most=0.4,
        ),
        compared(
            "... and where no container may either",
            [each.by_docker_save for each in found],
            "s",
            other="docker save \\| ssh docker load",
            others=[each.by_hand for each in found],
        ),
        compared(
            "... to four workers",
            [each.to_four for each in found],
            "s",
            other="to one worker",
            others=[each.to_one for each in found],
        ),
        compared(
            "... bytes that the head sends to four",
            [each.to_four_bytes / 1e6 for each in found],
            "MB",
            other="the missing layer",
            others=megabytes,
            at_most=1.05,
        ),
    ]


@contextmanager
def _cluster() -> Iterator[Cluster]:
    lab.down(LAB)
    try:
        lab.up(LAB, SHAPE)
        yield Cluster.model_validate(yaml.safe_load(LAB.spec.read_text()))
    finally:
        remote.disconnect()
        lab.down(LAB)


class Bench:
    """The nodes, and the images that are sent between them."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.base: tuple[Layer, ...] = ()

    def prepare(self) -> None:
        """All nodes have the old image."""
        say("composing an image and giving it to all nodes ...")
        self.base = (
            *(self._layer(f"base{at}", size) for at, size in enumerate(BASE)),
            self._layer("python", 0, python_members(LAB, "head")),
        )
        archive = self._archive((*self.base, self._layer("old", CHANGED)), ())
        with ThreadPoolExecutor(2) as pool:
            for _ in pool.map(lambda node: self._load(node.name, archive), self.cluster.nodes):
                pass

    def repetition(self, number: int) -> Figures:
        """By hand and by us, in turns first; the new image is taken back in between."""
        layer = self._layer("new", CHANGED)
        self._load("head", self._archive((*self.base, layer), self.base))
        one, four = self.cluster.workers[:1], self.cluster.workers
        by_hand, by_us, by_container, by_docker_save = 0.0, (0.0, 0), 0.0, 0.0
        for ours in (number % 2 == 0, number % 2 == 1):
            if ours:
                by_us = self._sent(one)
                self._take_back(one)
                by_container, _ = self._sent(one, user="op")
                self._take_back(one)
                with _no_container():
                    by_docker_save, _ = self._sent(one, user="op")
            else:
                by_hand = _timed(lambda: self._by_hand(one[0]))
            self._take_back(one)
        to_four = self._sent(four)
        self._take_back(four)
        missing = layer.path.stat().st_size
        figures = Figures(missing, by_hand, *by_us, by_container, by_docker_save, *to_four)
        say(f"repetition {number}: {figures}")
        return figures

    def _sent(self, workers: Sequence[Node], user: str = "root") -> tuple[float, int]:
        """How long our step takes, logins included, and what the head sends meanwhile."""
        head = self.cluster.head.model_copy(update={"user": user})
        cluster = self.cluster.model_copy(update={"head": head, "workers": tuple(workers)})
        run = Run(id=os.urandom(4).hex(), who="bench")
        remote.disconnect()
        before = _sent_bytes()
        seconds = _timed(lambda: _ensure(cluster, run))
        return seconds, _sent_bytes() - before

    def _by_hand(self, worker: Node) -> None:
        pipe = f"docker save {self.cluster.image.name} | ssh {worker.fabric_address} docker load"
        _on("head", pipe)

    def _take_back(self, workers: Sequence[Node]) -> None:
        """The name goes back to the old image, whose layers are there all the time."""
        for worker in workers:
            _on(
                worker.name,
                f"docker image rm -f {self.cluster.image.name}; docker tag old:1 "
                f"{self.cluster.image.name}",
            )

    def _layer(self, name: str, size: int, more: Iterable[Member] = ()) -> Layer:
        file = self.folder / f"{name}.tar"
        members = (*file_members({name: os.urandom(size)}), *more)
        return Layer(file, write_layer(members, file))

    def _archive(self, layers: tuple[Layer, ...], left_out: Sequence[Layer]) -> Path:
        file = self.folder / "image.tar"
        write_archive(Image(self.cluster.image.name, layers, "amd64", {}), file, left_out)
        return file

    def _load(self, node: str, archive: Path) -> None:
        with archive.open("rb") as stdin:
            subprocess.run(
                lab.command_line(LAB, node, ["docker", "load", "--quiet"]),
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                timeout=300,
                check=True,
            )
        _on(
            node,
            f"docker image inspect old:1 >/dev/null 2>&1 || docker tag "
            f"{self.cluster.image.name} old:1",
        )


@contextmanager
def _no_container() -> Iterator[None]:
    _on("head", f"echo {quote(NO_CONTAINER)} >{STUB}; chmod +x {STUB}")
    try:
        yield
    finally:
        _on("head", f"rm {STUB}")


def _ensure(cluster: Cluster, run: Run) -> None:
    """The steps of all workers side by side, as a deploy has them."""
    with ThreadPoolExecutor(len(cluster.workers)) as pool:
        outcomes = list(
            pool.map(lambda worker: ensure_image.fn(cluster, worker, run), cluster.workers)
        )
    assert all(isinstance(each, Outcome) and each.status == "changed" for each in outcomes)


def _timed(action: Callable[[], object]) -> float:
    began = time.monotonic()
    action()
    return time.monotonic() - began


def _sent_bytes() -> int:
    """What has left the head's fabric port, headers included."""
    interface = lab.HEAD.fabric_interface
    argv = [*network.inside(LAB, "head"), "ip", "-json", "-stats", "link", "show", interface]
    said = subprocess.run(argv, capture_output=True, timeout=30, check=True).stdout
    link: Mapping[str, Mapping[str, Mapping[str, int]]] = json.loads(said)[0]
    return link["stats64"]["tx"]["bytes"]


def _on(node: str, script: str) -> None:
    subprocess.run(
        lab.command_line(LAB, node, ["sh", "-ec", script]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        timeout=300,
        check=True,
    )
