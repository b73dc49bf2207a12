"""Tells what a model folder holds, links followed: each file's size, sha256 and visible faults.

Relayed to the node; standard library only. Arguments: the folder, the state file, and a mode:
"keep", "look" (write nothing) or "glance" (nor read whole files: no sha256 of what is not known).
Tells its progress every ten seconds, and last the manifest, each in a line of JSON. A file is read
again only when its identity is not the one in the state file: any write changes its ctime, which no
program can set back.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import os
import stat
import struct
import sys
import threading
import time
from typing import Any

BLOCK = 4 << 20
EVERY = 10.0
VERSION = 1
# A write within a tick of the kernel's clock leaves the ctime as it was.
TICK = 100_000_000
LARGEST_HEADER = 100_000_000
UNFINISHED = (".incomplete", ".lock", ".part", ".aria2")
# Where huggingface_hub keeps what it is still loading; finished ones leave their .lock there.
HUB_FOLDERS = (".cache", ".huggingface")

Record = dict[str, Any]
Place = tuple[int, int]


class Walk:
    """Every file below a folder, links followed; what is wrong with some of them."""

    def __init__(self, folder: str) -> None:
        self.files: dict[str, os.stat_result] = {}
        self.faults: dict[str, str] = {}
        top = os.stat(folder)
        self.down(folder, "", ((top.st_dev, top.st_ino),))

    def down(self, path: str, prefix: str, chain: tuple[Place, ...]) -> None:
        for name in sorted(os.listdir(path)):
            full, relative = os.path.join(path, name), prefix + name
            hidden = relative.startswith(".") or "/." in relative
            try:
                found = os.stat(full)
            except OSError as error:
                if not hidden:
                    broken = os.path.islink(full) and isinstance(error, FileNotFoundError)
                    self.faults[shown(relative)] = "is a broken link" if broken else reason(error)
                continue
            if stat.S_ISDIR(found.st_mode):
                if not name.startswith(".") or name in HUB_FOLDERS:
                    self.folder(full, relative, (found.st_dev, found.st_ino), chain)
            elif stat.S_ISREG(found.st_mode):
                self.file(relative, found, hidden)

    def folder(self, path: str, relative: str, this: Place, chain: tuple[Place, ...]) -> None:
        if this in chain:  # A link to a folder around it.
            return
        try:
            self.down(path, relative + "/", (*chain, this))
        except OSError as error:
            self.faults[shown(relative)] = reason(error)

    def file(self, relative: str, found: os.stat_result, hidden: bool) -> None:
        # Hidden files are never loaded, but a download in progress shows there.
        if relative.endswith(UNFINISHED[:1] if hidden else UNFINISHED):
            self.faults[shown(relative)] = "is left by a download that has not finished"
        elif hidden:
            return
        elif shown(relative) != relative:
            self.faults[shown(relative)] = "has a name that is not UTF-8"
        else:
            self.files[relative] = found


def shown(name: str) -> str:
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def reason(error: OSError) -> str:
    return f"cannot be read: {error.strerror or error}"


def identity(found: os.stat_result) -> list[int]:
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]


class Reader:
    """Reads files that are new or changed, in several threads."""

    def __init__(self, total: int, *, whole: bool) -> None:
        self.total = total
        self.whole = whole
        self.done = 0
        self.told = time.monotonic()
        self.lock = threading.Lock()

    def record(self, path: str) -> Record:
        """What stays true of a file as long as its identity does."""
        try:
            with open(path, "rb", buffering=0) as file:
                began = time.time_ns()
                before = os.fstat(file.fileno())
                digest = self.digest(file) if self.whole else ""
                fault, names = inspect(path, file.fileno(), before.st_size)
                after = os.fstat(file.fileno())
        except OSError as error:
            return {"fault": reason(error)}
        if identity(before) != identity(after):
            return {"fault": "is being written"}
        settled = abs(began - before.st_ctime_ns) > TICK
        return {
            "identity": identity(before) if settled else None,
            "size": before.st_size,
            "sha256": digest,
            "fault": fault,
            "names": names,
        }

    def digest(self, file: Any) -> str:
        sha, block = hashlib.sha256(), memoryview(bytearray(BLOCK))
        while True:
            count = file.readinto(block)
            if not count:
                break
            sha.update(block[:count])
            self.tell(count)
        # On unified memory the page cache takes what the GPU needs. Only clean pages are given up.
        with contextlib.suppress(OSError):
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return sha.hexdigest()

    def tell(self, count: int) -> None:
        with self.lock:
            self.done += count
            if time.monotonic() - self.told >= EVERY:
                self.told = time.monotonic()
                say({"progress": {"bytes": self.done, "of": self.total}})


def inspect(path: str, handle: int, size: int) -> tuple[str, list[str]]:
    """(what is wrong with a file by its own words, the file names that it promises)."""
    if os.pread(handle, 40, 0).startswith(b"version https://git-lfs.github.com/"):
        return "is a Git-LFS pointer, not the file itself", []
    if path.endswith(".safetensors"):
        return safetensors_fault(handle, size), []
    if path.endswith(".safetensors.index.json"):
        return index(os.pread(handle, size, 0))
    return "", []


def safetensors_fault(handle: int, size: int) -> str:
    start = os.pread(handle, 8, 0)
    if len(start) < 8:
        return f"is cut off: {size} bytes"
    (length,) = struct.unpack("<Q", start)
    if length > LARGEST_HEADER:
        return "is no safetensors file"
    if 8 + length > size:
        return "is cut off within its header"
    try:
        header = json.loads(os.pread(handle, length, 8))
        ends = [part["data_offsets"][1] for name, part in header.items() if name != "__metadata__"]
        promised = 8 + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return "has no readable header"
    if promised != size:
        return f"has {size} bytes, its header promises {promised}"
    return ""


def index(content: bytes) -> tuple[str, list[str]]:
    try:
        return "", sorted(set(map(str, json.loads(content)["weight_map"].values())))
    except (ValueError, TypeError, KeyError, AttributeError):
        return "has no readable weight_map", []


def read_state(path: str) -> dict[str, dict[str, Record]]:
    try:
        with open(path, encoding="utf-8") as file:
            state = json.load(file)
        return dict(state["folders"]) if state["version"] == VERSION else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def write_state(path: str, folders: dict[str, dict[str, Record]]) -> None:
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    aside = f"{path}.{os.getpid()}.tmp"
    try:
        with open(aside, "w", encoding="utf-8") as file:
            json.dump({"version": VERSION, "folders": folders}, file)
        os.replace(aside, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise


def records(
    folder: str, files: dict[str, os.stat_result], known: dict[str, Record], *, whole: bool
) -> dict[str, Record]:
    """Each file's record: the known one where the identity is the same, else a new one."""
    current = {
        path: known[path]
        for path, found in files.items()
        if path in known and known[path]["identity"] == identity(found)
    }
    unknown = sorted(files.keys() - current.keys(), key=lambda path: -files[path].st_size)
    reader = Reader(sum(files[path].st_size for path in unknown), whole=whole)
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        made = {path: pool.submit(reader.record, os.path.join(folder, path)) for path in unknown}
    return {**current, **{path: future.result() for path, future in made.items()}}


def manifest(folder: str, state_file: str, mode: str) -> dict[str, Any]:
    answer: dict[str, Any] = {"folder": "", "files": {}, "faults": {}}
    try:
        walk = Walk(folder)
    except FileNotFoundError:
        return {**answer, "folder": "does not exist"}
    except OSError as error:
        return {**answer, "folder": reason(error)}
    state = read_state(state_file)
    current = records(folder, walk.files, state.get(folder, {}), whole=mode != "glance")
    answer["faults"] = walk.faults
    for path, record in sorted(current.items()):
        if record["fault"]:
            answer["faults"][path] = record["fault"]
        if "sha256" in record:
            answer["files"][path] = {key: record[key] for key in ("size", "sha256", "names")}
    kept = {path: record for path, record in current.items() if record.get("identity")}
    if mode == "keep" and kept != state.get(folder):
        others = {name: files for name, files in state.items() if os.path.isdir(name)}
        write_state(state_file, {**others, folder: kept})
    return answer


def say(value: Any) -> None:
    print(json.dumps(value), flush=True)


def main(_program: str, folder: str, state_file: str, mode: str) -> None:
    say(manifest(folder, os.path.expanduser(state_file), mode))


if __name__ == "__main__":
    main(*sys.argv[1:])
