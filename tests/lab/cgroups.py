"""Control groups: one per node, so that all of a node can be found, frozen and cleared away."""

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.lab.errors import LabError

FREEZE_SECONDS = 20


@dataclass(frozen=True)
class Hierarchy:
    """A mounted cgroup tree of the host; on cgroup v2 machines there is only one."""

    mountpoint: Path
    kind: str
    options: str

    @property
    def is_v2(self) -> bool:
        return self.kind == "cgroup2"


def hierarchies() -> list[Hierarchy]:
    """As `/proc/self/mountinfo` lists them."""
    found = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ")[:3]
        mountpoint = Path(before.split(" ")[4])
        if kind in ("cgroup", "cgroup2"):
            wanted = [option for option in options.split(",") if option != "rw"]
            if kind == "cgroup" and any(option.startswith("name=") for option in wanted):
                wanted.insert(0, "none")
            found[mountpoint] = Hierarchy(mountpoint, kind, ",".join(wanted))
    return list(found.values())


def prepare(group: str) -> None:
    """Makes the group in every hierarchy."""
    for hierarchy in hierarchies():
        _prepare(hierarchy, group)


def _prepare(hierarchy: Hierarchy, group: str) -> None:
    folder = hierarchy.mountpoint
    for part in Path(group).parts:
        folder /= part
        folder.mkdir(exist_ok=True)
        if hierarchy.is_v2:
            _delegate(folder.parent)
        elif "cpuset" in hierarchy.options.split(","):
            # A v1 cpuset takes no process before it has CPUs and memory nodes.
            for name in ("cpuset.cpus", "cpuset.mems"):
                (folder / name).write_text((folder.parent / name).read_text())


def _delegate(folder: Path) -> None:
    for controller in (folder / "cgroup.controllers").read_text().split():
        with contextlib.suppress(OSError):
            (folder / "cgroup.subtree_control").write_text(f"+{controller}")


def joining(group: str) -> list[str]:
    """The prefix that runs a command in the group."""
    # 0 is the writer itself, whatever it is called in its pid namespace.
    script = 'while [ "$1" != -- ]; do echo 0 > "$1"; shift; done; shift; exec "$@"'
    return ["sh", "-ec", script, "join", *map(str, _entrances(group)), "--"]


def _entrances(group: str) -> Iterator[Path]:
    for folder in _folders(group):
        # On v2 a node's init has moved everything down, so that its group may have children.
        leaf = folder / "init"
        is_v2 = (folder / "cgroup.controllers").exists()
        yield (leaf if is_v2 and leaf.is_dir() else folder) / "cgroup.procs"


def pids(group: str) -> set[int]:
    """Every process in the group or below it."""
    found: set[int] = set()
    for folder in _tree(group):
        with contextlib.suppress(OSError):
            found.update(map(int, (folder / "cgroup.procs").read_text().split()))
    return found


def frozen(group: str) -> bool:
    words = ("FROZEN", "FREEZING", "1")
    return any(file.read_text().strip() in words for file in _switches(_folders(group)))


def freeze(group: str) -> None:
    files = _switches(_folders(group))
    if not files:
        raise LabError("this kernel has no freezer for control groups")
    _turn(files, frozen=True)
    deadline = time.monotonic() + FREEZE_SECONDS
    while any(file.read_text().strip() == "FREEZING" for file in files):
        if time.monotonic() > deadline:
            raise LabError(f"{group} did not freeze within {FREEZE_SECONDS} s")
        time.sleep(0.01)


def thaw(group: str) -> None:
    _turn(_switches(_folders(group)), frozen=False)


def thaw_all(group: str) -> None:
    """Thaws the groups below it too (a paused container): a frozen process cannot even end."""
    _turn(_switches(_tree(group)), frozen=False)


def remove(group: str) -> None:
    """Removes the empty group and all below it."""
    deadline = time.monotonic() + 10
    while left := sorted(_tree(group), key=lambda folder: -len(folder.parts)):
        for folder in left:
            # Busy for a moment after its last process has ended.
            with contextlib.suppress(OSError):
                folder.rmdir()
        if left and time.monotonic() > deadline:
            raise LabError(f"control groups that cannot be removed: {', '.join(map(str, left))}")
        time.sleep(0.01)


def _folders(group: str) -> list[Path]:
    folders = (hierarchy.mountpoint / group for hierarchy in hierarchies())
    return [folder for folder in folders if folder.is_dir()]


def _tree(group: str) -> Iterator[Path]:
    for folder in _folders(group):
        for path, _, _ in os.walk(folder):
            yield Path(path)


def _switches(folders: Iterable[Path]) -> list[Path]:
    names = ("freezer.state", "cgroup.freeze")
    files = (folder / name for folder in folders for name in names)
    return [file for file in files if file.exists()]


def _turn(files: list[Path], *, frozen: bool) -> None:
    for file in files:
        on, off = ("FROZEN", "THAWED") if file.name == "freezer.state" else ("1", "0")
        file.write_text(on if frozen else off)


def lab_names() -> set[str]:
    """The labs that have a control group on this machine."""
    folders = (path for hierarchy in hierarchies() for path in hierarchy.mountpoint.iterdir())
    found = (re.fullmatch(r"sparkrail-(lab(-[a-z0-9]+)*)", folder.name) for folder in folders)
    return {match[1] for match in found if match}
