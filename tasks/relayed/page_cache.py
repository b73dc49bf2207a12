"""Releases the page cache of the files below a folder, and tells the effect as a JSON document.

Relayed to the node; standard library of Python 3.8 only. `look` only measures. Clean pages that no
process has mapped are given up (posix_fadvise), which needs no root; what else is cached stays.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import re
import sys
from collections.abc import Iterator

LIBC = ctypes.CDLL(None, use_errno=True)


def resident(handle: int, size: int) -> int | None:
    """Bytes of a file that are in the page cache; None where the kernel keeps it to the owner."""
    found = os.fstat(handle)
    if not size:
        return 0
    # Of other users' files mincore calls every page resident.
    if os.getuid() not in (0, found.st_uid):
        return None
    pages = (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE
    with mmap.mmap(handle, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        vector = (ctypes.c_ubyte * pages)()
        start = ctypes.c_char.from_buffer(mapped)
        failed = LIBC.mincore(
            ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), vector
        )
        del start
    return None if failed else bytes(vector).count(1) * mmap.PAGESIZE


def release(path: str, *, really: bool) -> tuple[int | None, int | None]:
    """(bytes cached before, bytes cached after), as far as it can be told."""
    with open(path, "rb", buffering=0) as file:
        handle, size = file.fileno(), os.fstat(file.fileno()).st_size
        before = resident(handle, size)
        if really:
            # Only clean pages are given up.
            with contextlib.suppress(OSError):
                os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        after = resident(handle, size)
    return before, after


def files(folder: str) -> Iterator[str]:
    """Every file once, links to files followed: a hub's cache keeps them elsewhere."""
    seen = set()
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.realpath(os.path.join(parent, name))
            if path not in seen and os.path.isfile(path):
                seen.add(path)
                yield path


def free() -> int:
    with open("/proc/meminfo") as file:
        found = re.search(r"^MemFree:\s+(\d+) kB", file.read(), re.M)
    return int(found.group(1)) * 1024 if found else 0


def main(_program: str, mode: str, folder: str) -> None:
    said = []
    free_before = free()
    for path in files(folder):
        with contextlib.suppress(OSError, ValueError):
            said.append(release(path, really=mode == "release"))
    answer = {
        "files": len(said),
        "unknown": sum(before is None for before, _ in said),
        "before": sum(before or 0 for before, _ in said),
        "after": sum(after or 0 for _, after in said),
        "free_before": free_before,
        "free_after": free(),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
