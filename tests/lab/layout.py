"""Names, addresses and places of one lab: everything that follows from its name and shape."""

import os
import re
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from tests.lab.errors import LabError

CONTROL_ADDRESS = "10.88.0.2"
HEAD_ADDRESS = "10.88.0.1"
MANAGEMENT_GATEWAY = "10.88.0.254"
FABRIC_GATEWAY = "10.77.0.254"

CONTROL_INTERFACE = "enp0s1"
MANAGEMENT_INTERFACE = "enP7s7"
# As on real nodes of one cluster: the name depends on the port that the cable is in.
FABRIC_INTERFACES = ("enp1s0f1np1", "enP2p1s0f0np0", "enp1s0f0np0", "enP2p1s0f1np1")

BASES = ("bookworm", "trixie")
MOST_WORKERS = 7
NAME = re.compile(r"lab(-[a-z0-9]+)*")
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Shape:
    """What `up` was asked for; a running lab keeps it until `down`."""

    workers: int = 1
    base: str = "bookworm"
    fabric_rate: str | None = None
    docker: bool = True
    engine: bool = True
    containerd_store: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.workers <= MOST_WORKERS:
            raise LabError(f"--workers {self.workers}: allowed are 0 to {MOST_WORKERS}")
        if self.base not in BASES:
            raise LabError(f"--base {self.base}: allowed are {', '.join(BASES)}")
        if self.containerd_store and self.base == "bookworm":
            raise LabError("--containerd-store needs --base trixie: older engines have none")
        if self.fabric_rate is not None and not re.fullmatch(r"\d+[kmg]bit", self.fabric_rate):
            raise LabError(f"--fabric-rate {self.fabric_rate}: allowed is e.g. 400mbit or 2gbit")

    def __str__(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in asdict(self).items())


@dataclass(frozen=True)
class Node:
    """One machine of the lab: the head (number 0) or a worker."""

    number: int

    @property
    def name(self) -> str:
        return f"worker{self.number}" if self.number else "head"

    @property
    def is_head(self) -> bool:
        return self.number == 0

    @property
    def fabric_address(self) -> str:
        return f"10.77.0.{self.number + 1}"

    @property
    def fabric_interface(self) -> str:
        return FABRIC_INTERFACES[self.number % len(FABRIC_INTERFACES)]


@dataclass(frozen=True)
class NodePlaces:
    """A node's folder on the host."""

    folder: Path

    @property
    def upper(self) -> Path:
        return self.folder / "upper"

    @property
    def work(self) -> Path:
        return self.folder / "work"

    @property
    def root(self) -> Path:
        """Where the root is mounted, in the node's own mount namespace only."""
        return self.folder / "root"

    @property
    def docker(self) -> Path:
        """/var/lib/docker: a plain folder, since overlay2 refuses to sit on an overlay."""
        return self.folder / "docker"

    @property
    def models(self) -> Path:
        """The disk image behind /models: a full disk is full at its size, not at the host's."""
        return self.folder / "models.ext4"

    @property
    def boot_id(self) -> Path:
        return self.folder / "boot_id"

    @property
    def init(self) -> Path:
        """Which process is the node's init: pid and start time."""
        return self.folder / "init.json"

    @property
    def boot_log(self) -> Path:
        return self.folder / "boot.log"

    def log(self, service: str) -> Path:
        return self.upper / "var/log" / f"{service}.log"


@dataclass(frozen=True)
class Lab:
    """A lab by its name; whether it is up is another question."""

    name: str

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise LabError(
                f"{self.name!r} is not the name of a lab: allowed are lab and lab-..., "
                "lower-case letters, digits and dashes"
            )

    @cached_property
    def folder(self) -> Path:
        return lab_home() / self.name

    @property
    def state(self) -> Path:
        return self.folder / "lab.json"

    @property
    def ssh(self) -> Path:
        return self.folder / "ssh"

    @property
    def key_file(self) -> Path:
        return self.ssh / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        return self.ssh / "known_hosts"

    @property
    def spec(self) -> Path:
        return REPOSITORY / "deployments/clusters" / f"{self.name}.yaml"

    @property
    def cgroup(self) -> str:
        return f"sparkrail-{self.name}"

    def places(self, node: Node) -> NodePlaces:
        return NodePlaces(self.folder / "nodes" / node.name)

    def namespace(self, who: str) -> str:
        return f"sparkrail-{self.name}-{who}"


def nodes(shape: Shape) -> list[Node]:
    return [Node(number) for number in range(shape.workers + 1)]


def lab_home() -> Path:
    home = Path(os.environ.get("SPARKRAIL_LAB_HOME", "/var/lib/sparkrail-lab")).absolute()
    if re.search(r"[\s,:\\]", str(home)):
        raise LabError(f"SPARKRAIL_LAB_HOME={home}: overlay mounts want it without space , : \\")
    return home


def cache_home() -> Path:
    fallback = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparkrail"
    cache = Path(os.environ.get("SPARKRAIL_CACHE", fallback)).absolute()
    if re.search(r"[\s,:\\]", str(cache)):
        raise LabError(f"SPARKRAIL_CACHE={cache}: overlay mounts want it without space , : \\")
    return cache
