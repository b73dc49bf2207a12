"""The facts of a node as values, and the parsers that make them."""

from collections.abc import Mapping
from ipaddress import IPv4Interface
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from tasks.docker_facts import DockerFacts
from tasks.errors import CommandFailed
from tasks.manifests import Manifest
from tasks.peers import Peer
from tasks.topology import Fabric

WORKS = ("UP", "UNKNOWN")  # Interfaces that have no carrier, such as tunnels, say UNKNOWN.


class Memory(BaseModel, frozen=True):
    """Bytes, as /proc/meminfo tells; what is free but not available does not exist."""

    total: int
    free: int
    available: int


class Rdma(BaseModel, frozen=True):
    """A port of an RDMA device behind an interface."""

    device: str
    port: int
    state: str
    link_layer: str = ""
    rate: str = ""
    interfaces: tuple[str, ...] = ()
    roce_v2: Mapping[str, int] = {}  # GID index of each IPv4 address.

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"


class Address(BaseModel, frozen=True):
    """An IPv4 address of an interface."""

    address: str
    prefix: int


class Interface(BaseModel, frozen=True):
    """A network interface; `speed` in Mbit/s where the driver knows it."""

    name: str
    state: str
    mtu: int
    speed: int | None = None
    addresses: tuple[Address, ...] = ()
    rdma: tuple[Rdma, ...] = ()

    @property
    def works(self) -> bool:
        return self.state in WORKS

    def network_of(self, address: str) -> str:
        """The subnet that one of its addresses is in, such as 10.0.0.0/24."""
        prefix = next(own.prefix for own in self.addresses if own.address == address)
        return str(IPv4Interface(f"{address}/{prefix}").network)


class Disk(BaseModel, frozen=True):
    """The mount that holds `path`; two paths on one mount have the same `device`."""

    path: str
    nearest: str  # The path itself, or its first ancestor that exists.
    writable: bool
    device: int
    total: int
    free: int


class Process(BaseModel, frozen=True):
    """A process, and the docker container or systemd unit that it belongs to."""

    pid: int
    pgid: int
    user: str
    command: str
    started: float
    container: str = ""
    unit: str = ""
    run: str = ""  # The run of ours that started it.


class Port(BaseModel, frozen=True):
    """A listening TCP socket; without `owner` it belongs to a user whose files ours may not see."""

    port: int
    address: str
    uid: int
    owner: Process | None = None


class Gpu(BaseModel, frozen=True):
    """A GPU; unified memory has no size of its own."""

    index: int
    name: str
    uuid: str
    driver: str
    memory_mib: int | None = None
    free_mib: int | None = None


class GpuHolder(BaseModel, frozen=True):
    """A process that holds GPU memory; `process` is unknown in another PID namespace."""

    pid: int
    name: str
    used_mib: int | None = None
    process: Process | None = None


class ModelFacts(BaseModel, frozen=True):
    """What the configs in the model's folder say."""

    config: Mapping[str, Any] = {}
    own_code: tuple[str, ...] = ()  # The configs that name code of the model's own.


class NodeFacts(BaseModel, frozen=True):
    """Everything that was read from a node at one time."""

    hostname: str
    user: str
    uid: int
    home: str
    boot_id: str
    architecture: str
    kernel: str
    python: str
    time: float
    clock_offset: float = 0.0  # Seconds that the node's clock is ahead of ours.
    memory: Memory
    interfaces: tuple[Interface, ...]
    interfaces_error: str
    disks: tuple[Disk, ...]
    removes_ipc: bool = True
    rdma_devices: tuple[str, ...] = ()
    cuda: str = ""
    model: ModelFacts
    weights: Manifest = Manifest()  # The model's folder, without having read all of it.
    peers: tuple[Peer, ...] = ()
    programs: Mapping[str, str]
    ports: tuple[Port, ...]
    leftovers: tuple[Process, ...]
    gpus: tuple[Gpu, ...]
    gpus_error: str
    gpu_holders: tuple[GpuHolder, ...]
    gpu_holders_error: str
    docker_socket: Literal["absent", "denied", "open"]
    docker: DockerFacts | None = None
    docker_error: str = ""

    def interface_of(self, address: str) -> Interface | None:
        """The interface that owns an address."""
        for interface in self.interfaces:
            if any(own.address == address for own in interface.addresses):
                return interface
        return None

    def interface(self, name: str) -> Interface | None:
        return next((found for found in self.interfaces if found.name == name), None)

    def fabric(self, address: str) -> Fabric | None:
        """The interface that owns an address, and its RDMA ports that work."""
        interface = self.interface_of(address)
        if interface is None:
            return None
        ports = tuple(f"{rdma.device}:{rdma.port}" for rdma in interface.rdma if rdma.active)
        return Fabric(interface=interface.name, rdma=ports)

    def disk_of(self, path: str) -> Disk | None:
        return next((disk for disk in self.disks if disk.path == path), None)


def parse_facts(text: str) -> NodeFacts:
    """What the relayed script printed."""
    try:
        return NodeFacts.model_validate_json(text)
    except ValidationError as error:
        raise CommandFailed(
            "the facts script printed something else than facts",
            details=f"{text.strip()[-300:]}\n{error}",
        ) from error
