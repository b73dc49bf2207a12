"""Who may be stopped for the sake of GPU memory, and whether there is too little of it at all."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from blocks import Cluster, Holder, Node
from tasks.checks.estimates import UTILIZATION, option
from tasks.containers import CLUSTER_LABEL
from tasks.gpu_holders import Holders
from tasks.gpu_looks import Look, Process
from tasks.owners import Held, is_ours

DISPLAY = (
    *("Xorg", "X", "Xwayland", "gnome-shell", "gnome-session*", "gdm*", "sddm*", "lightdm*"),
    *("kwin_*", "plasmashell", "mutter*", "weston", "sway", "cinnamon*", "xfwm4", "Hyprland"),
    *("xdg-desktop-por*", "gnome-remote-de*", "nxnode.bin", "Xtigervnc", "Xvnc"),
)
DRIVER = (
    *("nvidia-persiste*", "nv-fabricmanage*", "nvidia-fabricma*", "nvidia-powerd", "nvidia-imex*"),
    *("nv-hostengine", "dcgm*", "nvidia-cuda-mps*", "nvidia-dcgm*"),
)
SYSTEM = ("sshd*", "ssh", "dockerd", "docker", "containerd*", "systemd*", "init", "dbus*", "user@*")
PROTECTED = {"a display server": DISPLAY, "a daemon of the driver": DRIVER, "the system's": SYSTEM}


@dataclass(frozen=True)
class Verdict:
    """Whether an owner is stopped, and why."""

    stop: bool
    why: str


@dataclass(frozen=True)
class Room:
    """Memory that is wanted and that there is, of the GPU that has least; in MiB.

    On unified memory what is available but not free is page cache.
    """

    wanted: int
    available: int
    free: int
    unified: bool

    @property
    def enough(self) -> bool:
        return self.available >= self.wanted

    @property
    def cached(self) -> int:
        """How much of the page cache stands in the way."""
        return max(0, min(self.available, self.wanted) - self.free) if self.unified else 0

    def __str__(self) -> str:
        return f"{self.available} of {self.wanted} MiB are to be had"


def room(cluster: Cluster, node: Node, holders: Holders) -> Room | None:
    """None where nothing tells how much there is. What we hold ourselves will be free again."""
    look = holders.look
    gpus = look.gpus[: node.gpus]
    wanted, own = cluster.residue.free_mib, _ours(cluster, holders)
    if wanted is None and cluster.image.gpu_access == "none":
        return Room(0, look.memory.available_mib, look.memory.free_mib, unified=True)
    if not gpus:
        return None
    if any(gpu.total_mib is None or gpu.free_mib is None for gpu in gpus):
        memory, held = look.memory, sum(own.values())
        need = wanted if wanted is not None else int(_share(cluster) * memory.total_mib)
        return Room(need, memory.available_mib + held, memory.free_mib + held, unified=True)
    rooms = []
    for gpu in gpus:
        free = (gpu.free_mib or 0) + own.get(gpu.uuid, 0)
        need = wanted if wanted is not None else int(_share(cluster) * (gpu.total_mib or 0))
        rooms.append(Room(need, free, free, unified=False))
    return min(rooms, key=lambda each: each.available - each.wanted)


def _ours(cluster: Cluster, holders: Holders) -> dict[str, int]:
    found: dict[str, int] = {}
    for held in holders.held:
        if is_ours(cluster, held.owner):
            for row in held.rows:
                found[row.gpu] = found.get(row.gpu, 0) + (row.used_mib or 0)
    return found


def _share(cluster: Cluster) -> float:
    said = option(cluster.serve.arguments, "--gpu-memory-utilization")
    try:
        return float(said) if said else UTILIZATION
    except ValueError:  # The engine's parser will refuse it.
        return UTILIZATION


def verdict(cluster: Cluster, look: Look, held: Held) -> Verdict:
    """By the policy alone; whether there is enough memory anyway is another question."""
    residue, owner = cluster.residue, held.owner
    guarded = protected(held)
    if owner.kind == "unknown":
        return Verdict(False, "its process cannot be seen")
    if guarded:
        return Verdict(False, guarded)
    if set(look.own) & {process.pid for process in held.processes}:
        return Verdict(False, "it is sparkrail itself")
    if any(matches(each, look, held) for each in residue.excepted):
        return Verdict(False, "excepted")
    if residue.policy == "report":
        return Verdict(False, "the policy is to report")
    if owner.kind == "container" and owner.docked is None:
        return Verdict(False, "docker does not know its container")
    if any(matches(each, look, held) for each in residue.listed):
        return Verdict(True, "listed")
    if residue.policy == "stop-listed":
        return Verdict(False, "not listed")
    if owner.docked and owner.docked.container.label(CLUSTER_LABEL):
        serves = owner.docked.container.label(CLUSTER_LABEL)
        return Verdict(False, f"it serves the cluster {serves}, and is not listed")
    if _of_another(look, held):
        return Verdict(False, f"of another user ({owner.user}), and not listed")
    return Verdict(True, "not excepted")


def _of_another(look: Look, held: Held) -> bool:
    """A container or a unit of root's is the machine's; a number is no user of the node."""
    if held.owner.kind in ("container", "unit"):
        mine = {look.user, "root", ""}
        return any(p.user not in mine and not p.user.isdigit() for p in held.processes)
    return any(process.user != look.user for process in held.processes)


def protected(held: Held) -> str:
    """What it is that is never stopped, or nothing."""
    names = {_base(row.name) for row in held.rows}
    for process in held.processes:
        names |= {process.name, _base(process.command)}
    if held.owner.kind == "unit":
        names.add(held.owner.name)
    for what, patterns in PROTECTED.items():
        if any(fnmatchcase(name, pattern) for name in names for pattern in _units(patterns)):
            return what
    return ""


def _units(patterns: Sequence[str]) -> tuple[str, ...]:
    return tuple(found for pattern in patterns for found in (pattern, f"{pattern}.service"))


def _base(command: str) -> str:
    return PurePosixPath(command.split(" ", 1)[0].rstrip(":") or "-").name


def matches(said: Holder, look: Look, held: Held) -> bool:
    """Whether an entry of the spec means this owner."""
    owner = held.owner
    if said.container:
        return owner.kind == "container" and owner.name == said.container
    if said.unit:
        return owner.kind == "unit" and owner.name == said.unit
    return owner.kind in ("process", "session") and _started_by(said, look, held) is not None


def _started_by(said: Holder, look: Look, held: Held) -> Process | None:
    """The first of its family that the entry means: what an engine is started by, not its core."""
    found = None
    for process in held.processes:
        for each in (process, *look.ancestors(process)):
            if each.user != said.user:
                break
            if each.pid not in look.own and fnmatchcase(each.command, said.command or ""):
                found = each
    return found


def family(cluster: Cluster, look: Look, held: Held) -> tuple[Process, ...]:
    """The processes to end: the one that was listed, with those that hold the memory."""
    found = (_started_by(said, look, held) for said in cluster.residue.listed if said.command)
    first = [process for process in found if process is not None]
    every = {process.pid: process for process in (*first, *held.processes)}
    return tuple(every.values())
