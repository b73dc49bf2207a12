"""Who holds GPU memory on a node, by owner: a container, a unit, a session, or a bare process."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from docker.errors import NotFound
from pydantic import BaseModel, ValidationError

from blocks import Cluster, Node
from tasks.containers import CLUSTER_LABEL, Container, parse_container
from tasks.engines import engine
from tasks.errors import CommandFailed
from tasks.programs import run_program
from tasks.remote import Remote

SMI_TIMEOUT = 10  # Seconds; nvidia-smi hangs when the driver does.
CONTAINER = re.compile(r"[0-9a-f]{64}")
FOREIGN = re.compile(r"(libpod|cri-containerd|crio|kubepods|lxc)[^/]*")
SYSTEM_UNIT = re.compile(r"^[^/\n]*/system\.slice/(?:[^/\n]+\.slice/)*([^/\n]+\.(?:service|scope))", re.M)
SESSION = re.compile(r"/user\.slice/.*?([^/\n]+\.(?:service|scope))(?:/[^/\n]*)?$", re.M)

Kind = Literal["container", "unit", "session", "process", "unknown"]


class Gpu(BaseModel, frozen=True):
    """A GPU's memory; unified memory has no numbers of its own."""

    index: int
    uuid: str
    total_mib: int | None = None
    used_mib: int | None = None
    free_mib: int | None = None
    mig: bool = False


class Row(BaseModel, frozen=True):
    """What nvidia-smi says of one process on one GPU."""

    gpu: str
    pid: int
    name: str
    used_mib: int | None = None


class Process(BaseModel, frozen=True):
    """A process as /proc tells it; pid and start time together name it for ever."""

    pid: int
    parent: int
    started: int  # Ticks since boot.
    state: str = "S"
    user: str
    command: str
    name: str = ""
    cgroup: str = ""
    rss_mib: int = 0

    @property
    def ended(self) -> bool:
        return self.state in ("Z", "X")

    def __str__(self) -> str:
        return f"pid {self.pid} ({(self.command or f'[{self.name}]')[:80]})"


class Memory(BaseModel, frozen=True):
    """Of the node; what is available but not free is page cache, which nobody holds."""

    total_mib: int
    free_mib: int
    available_mib: int


class Look(BaseModel, frozen=True):
    """What the relayed program told of a node at one time."""

    user: str
    uid: int
    own: tuple[int, ...] = ()
    own_cgroup: str = ""
    gpus: tuple[Gpu, ...] = ()
    gpus_error: str = ""
    rows: tuple[Row, ...] = ()
    rows_error: str = ""
    memory: Memory
    processes: tuple[Process, ...] = ()
    openers: tuple[int, ...] = ()
    largest: tuple[int, ...] = ()
    units: Mapping[str, str] = {}

    def process(self, pid: int) -> Process | None:
        return next((each for each in self.processes if each.pid == pid), None)

    def ancestors(self, process: Process) -> list[Process]:
        """Those that started it, the nearest first."""
        found, at = [], self.process(process.parent)
        while at is not None:
            found.append(at)
            at = self.process(at.parent)
        return found


class Docked(BaseModel, frozen=True):
    """A container that holds GPU memory, and what docker does when it ends."""

    container: Container
    restart: Mapping[str, Any] = {}
    removed_at_end: bool = False

    @property
    def policy(self) -> str:
        return str(self.restart.get("Name") or "no")


class Owner(BaseModel, frozen=True):
    """Who must be stopped for the memory to come back."""

    kind: Kind
    name: str
    user: str = ""
    docked: Docked | None = None
    process: Process | None = None
    restart: str = ""  # What its supervisor does when it ends.

    def __str__(self) -> str:
        again = f", restart {self.restart}" if self.restart not in ("", "no") else ""
        if self.kind == "container":
            id = self.docked.container.id if self.docked else self.name
            name = self.name if self.docked else "that docker does not know"
            return f"container {name} ({id[:12]}{again})"
        if self.kind == "unit":
            return f"unit {self.name}{again.replace(', ', ' (') + ')' if again else ''}"
        if self.kind == "unknown":
            return "an unknown holder"
        where = f" in {self.name}" if self.kind == "session" else ""
        return f"process of {self.user}{where}"


class Held(BaseModel, frozen=True):
    """All that one owner holds."""

    owner: Owner
    rows: tuple[Row, ...]
    processes: tuple[Process, ...] = ()

    @property
    def mib(self) -> int | None:
        """None where the driver does not tell of one of them."""
        sizes = [row.used_mib for row in self.rows]
        return None if None in sizes else sum(size or 0 for size in sizes)

    @property
    def size(self) -> str:
        return "an unknown amount" if self.mib is None else f"{self.mib} MiB"

    def __str__(self) -> str:
        named = {process.pid: str(process) for process in self.processes}
        pids = dict.fromkeys(row.pid for row in self.rows)
        names = {row.pid: row.name for row in self.rows}
        told = ", ".join(named.get(pid, f"pid {pid} ({names[pid]})") for pid in pids)
        return f"{self.owner}: {told} holds {self.size}"


class Holders(BaseModel, frozen=True):
    """Who holds what on a node, largest first, and what else is known of its memory."""

    look: Look
    held: tuple[Held, ...]
    docker_error: str = ""


def parse_look(said: Any) -> Look:
    try:
        return Look.model_validate(said)
    except ValidationError as error:
        raise CommandFailed(
            "the program that looks for GPU holders printed something else", details=str(error)
        ) from error


def container_of(process: Process, own_cgroup: str) -> str:
    """The id of the innermost container, unless we are in it ourselves."""
    found = [id for id in CONTAINER.findall(process.cgroup) if id not in own_cgroup]
    return found[-1] if found else ""


def owner_of(look: Look, row: Row, docked: Mapping[str, Docked]) -> Owner:
    """Whose a row is, by the control group of its process."""
    process = look.process(row.pid)
    if process is None:
        return Owner(kind="unknown", name=row.name)
    id = container_of(process, look.own_cgroup)
    if id:
        known = docked.get(id)
        name = known.container.name if known else id
        restart = known.policy if known else ""
        return Owner(
            kind="container",
            name=name,
            user=process.user,
            docked=known,
            process=process,
            restart=restart,
        )
    found = {"process": process, "user": process.user}
    session = SESSION.search(process.cgroup)
    if session:
        return Owner(kind="session", name=session.group(1), **found)
    unit = SYSTEM_UNIT.search(process.cgroup)
    if unit and unit.group(1) not in look.own_cgroup:
        name = unit.group(1)
        return Owner(kind="unit", name=name, restart=look.units.get(name, ""), **found)
    return Owner(kind="process", name=process.name, **found)


def group(look: Look, docked: Mapping[str, Docked]) -> tuple[Held, ...]:
    """The rows by owner; a bare process is an owner of its own. An ended process holds nothing."""
    groups: dict[tuple[str, str], list[Row]] = {}
    owners: dict[tuple[str, str], Owner] = {}
    for row in look.rows:
        process = look.process(row.pid)
        if process is not None and process.ended:
            continue
        owner = owner_of(look, row, docked)
        single = owner.kind in ("session", "process", "unknown")
        key = (owner.kind, str(row.pid) if single else owner.name)
        groups.setdefault(key, []).append(row)
        owners.setdefault(key, owner)
    held = [
        Held(owner=owners[key], rows=tuple(rows), processes=tuple(_processes(look, rows)))
        for key, rows in groups.items()
    ]
    return tuple(sorted(held, key=lambda each: -(each.mib or 0)))


def _processes(look: Look, rows: Sequence[Row]) -> list[Process]:
    found = (look.process(pid) for pid in dict.fromkeys(row.pid for row in rows))
    return [process for process in found if process is not None]


def observe_look(remote: Remote, also: Sequence[int] = ()) -> Look:
    wanted = json.dumps({"timeout": SMI_TIMEOUT, "also": list(also)})
    return parse_look(run_program(remote, "gpu_holders", wanted, timeout=6 * SMI_TIMEOUT))


def observe_holders(
    cluster: Cluster, node: Node, remote: Remote, also: Sequence[int] = ()
) -> Holders:
    """Who holds GPU memory; docker is asked only where a container is among them."""
    look = observe_look(remote, also)
    docked, error = {}, ""
    ids = {container_of(process, look.own_cgroup) for process in look.processes} - {""}
    if ids:
        try:
            docked = observe_docked(cluster, node, ids)
        except CommandFailed as failure:
            error = "\n".join(part for part in (failure.brief, failure.details) if part)
    return Holders(look=look, held=group(look, docked), docker_error=error)


def observe_docked(cluster: Cluster, node: Node, ids: set[str]) -> dict[str, Docked]:
    """What docker knows of these containers; one that it has removed meanwhile is left out."""
    found = {}
    with engine(cluster, node) as client:
        api: Any = client.api
        rows = {row["Id"]: row for row in api.containers(all=True) if row.get("Names")}
        for id in ids & set(rows):
            try:
                host = api.inspect_container(id)["HostConfig"]
            except NotFound:
                continue
            found[id] = Docked(
                container=parse_container(rows[id]),
                restart=host.get("RestartPolicy") or {},
                removed_at_end=bool(host.get("AutoRemove")),
            )
    return found


def is_ours(cluster: Cluster, owner: Owner) -> bool:
    """Whether a container of this cluster holds it."""
    docked = owner.docked
    return docked is not None and docked.container.label(CLUSTER_LABEL) == cluster.name
