"""What is still there of our containers that were stopped.

Relayed to the node; standard library of Python 3.8 only. Arguments: what to do, the record, and ids
of containers. `keep` writes down the processes in these containers, and what of the node's shared
memory they have open. `look` tells what of that still exists; `remove` takes away the shared memory
that nobody else has open. Never by a name: only what was written down, and is still the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from typing import Any

CONTAINER = re.compile(r"[0-9a-f]{64}")
SHM = "/dev/shm/"
PROC = "/proc"

Held = dict[str, Any]


def read(*parts: str) -> str:
    try:
        with open(os.path.join(PROC, *parts), errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def names(*parts: str) -> list[str]:
    try:
        return os.listdir(os.path.join(PROC, *parts))
    except OSError:
        return []


def pids() -> list[int]:
    return sorted(int(name) for name in names() if name.isdigit())


def started(pid: int) -> int:
    """In ticks since boot; 0 when it is gone, also when only its parent has not noticed yet."""
    fields = read(str(pid), "stat").rpartition(")")[2].split()
    return int(fields[19]) if fields and fields[0] not in "ZX" else 0


def opened(pid: int) -> set[str]:
    """The shared memory that a process has open or mapped."""
    found = set()
    for name in names(str(pid), "fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(os.path.join(PROC, str(pid), "fd", name)))
    maps = read(str(pid), "maps").splitlines()
    found |= {line.split(None, 5)[5] for line in maps if SHM in line}
    return {path for path in found if path.startswith(SHM)}


def held_by(ours: set[str]) -> Held:
    """What the processes in these containers are and have open."""
    processes, files = [], {}
    for pid in pids():
        if not ours & set(CONTAINER.findall(read(str(pid), "cgroup"))):
            continue
        processes.append([pid, started(pid)])
        for path in opened(pid):
            with contextlib.suppress(OSError):
                # In a container with shared memory of its own the same path is another file.
                there = os.stat(os.path.join(PROC, str(pid), "root") + path)
                here = os.stat(path)
                if (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino):
                    files[path] = here.st_ino
    return {"processes": processes, "shm": files}


def boot() -> str:
    return read("sys/kernel/random/boot_id")


def recorded(record: str) -> Held:
    """What was written down since this boot, as far as it still exists."""
    try:
        with open(record) as file:
            said = json.load(file)
        now = said["boot"] == boot()
        return {
            "processes": [
                pair for pair in said["processes"] if now and started(pair[0]) == pair[1]
            ],
            "shm": {path: node for path, node in said["shm"].items() if now and same(path, node)},
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {"processes": [], "shm": {}}


def same(path: str, inode: int) -> bool:
    try:
        return os.stat(path).st_ino == inode
    except OSError:
        return False


def keep(record: str, ours: set[str]) -> None:
    """Beside what an earlier run wrote down and did not come to clear away."""
    held, known = held_by(ours), recorded(record)
    earlier = [pair for pair in known["processes"] if pair not in held["processes"]]
    document = {
        "boot": boot(),
        "processes": held["processes"] + earlier,
        "shm": {**known["shm"], **held["shm"]},
    }
    os.makedirs(os.path.dirname(record), mode=0o700, exist_ok=True)
    aside = f"{record}.{os.getpid()}.tmp"
    with open(aside, "w") as file:
        json.dump(document, file)
    os.replace(aside, record)


def orphaned(held: Held) -> list[str]:
    """The files that nobody has open but what is itself left over."""
    own = {pid for pid, _ in held["processes"]}
    others = [pid for pid in pids() if pid not in own] if held["shm"] else []
    busy = {path for pid in others for path in opened(pid)}
    return sorted(path for path in held["shm"] if path not in busy)


def main(_program: str, mode: str, record: str, *ours: str) -> None:
    path = os.path.expanduser(record)
    if mode == "keep":
        keep(path, set(ours))
    found = recorded(path)
    shm = orphaned(found)
    if mode == "remove":
        for name in shm:
            os.unlink(name)
    print(json.dumps({"processes": found["processes"], "shm": shm}))


if __name__ == "__main__":
    main(*sys.argv[1:])
