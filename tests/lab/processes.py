"""The processes of a lab: found by the namespaces and control groups they are in, never by name."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.lab.errors import LabError

END_SECONDS = 20


@dataclass(frozen=True)
class Process:
    """A process that cannot be mistaken for a later one with the same pid."""

    pid: int
    started: int

    @property
    def alive(self) -> bool:
        return started(self.pid) == self.started


def started(pid: int) -> int | None:
    """The start time in clock ticks since boot; None when it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name stands in parentheses and may itself hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def remember(file: Path, process: Process) -> None:
    file.write_text(json.dumps(asdict(process)))


def recall(file: Path) -> Process | None:
    """The process written down there, if it is still alive."""
    try:
        process = Process(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return process if process.alive else None


def in_namespaces(kind: str, inodes: set[int]) -> set[int]:
    """Every process whose namespace of that kind (net, pid, ..) is one of these."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (entry / "ns" / kind).stat().st_ino in inodes:
                    found.add(int(entry.name))
    return found


def end_all(find: Callable[[], set[int]]) -> None:
    """Ends what `find` finds until it finds nothing, sparing the caller's own ancestry."""
    deadline = time.monotonic() + END_SECONDS
    while targets := find() - _ancestry():
        for pid in targets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise LabError(f"processes that do not end: {', '.join(map(str, sorted(targets)))}")
        time.sleep(0.02)


def _ancestry() -> set[int]:
    found, pid = set(), os.getpid()
    while pid > 0:
        found.add(pid)
        stat = Path(f"/proc/{pid}/stat").read_text()
        pid = int(stat.rpartition(")")[2].split()[1])
    return found
