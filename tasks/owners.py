"""Whose GPU memory is: a container, a systemd unit, a user's session, or a bare process."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel

from blocks import Cluster
from tasks.containers import CLUSTER_LABEL, Container
from tasks.gpu_looks import Look, Process, Row

CONTAINER = re.compile(r"[0-9a-f]{64}")
# As `systemd-cgls` shows them; those of a user's own systemd go with the user's session.
UNIT = re.compile(
    r"^[^/\n]*/(?!user\.slice/)(?:[^/\n]+\.slice/)+([^/\n]+\.(?:service|scope))", re.M
)
SESSION = re.compile(r"/user\.slice/.*?([^/\n]+\.(?:service|scope))(?:/[^/\n]*)?$", re.M)

Kind = Literal["container", "unit", "session", "process", "unknown"]


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
    unit = UNIT.search(process.cgroup)
    if unit and f"/{unit.group(1)}" not in look.own_cgroup:
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


def is_ours(cluster: Cluster, owner: Owner) -> bool:
    """Whether a container of this cluster holds it."""
    docked = owner.docked
    return docked is not None and docked.container.label(CLUSTER_LABEL) == cluster.name
