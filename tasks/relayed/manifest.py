"""Tells what a model folder holds, links followed: each file's size, digest and visible faults.

Relayed to the node; standard library only. Arguments: the folder, the state file, and a mode:
"keep", "look" (write nothing) or "glance" (nor read whole files: no digest of what is not known).
Tells its progress every ten seconds, and last the manifest, each in a line of JSON. A file is read
again only when its identity is not the one in the state file.
"""

from __future__ import annotations

import base64
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

from tasks.relayed.pieces import (
    PIECE,
    Record,
    count,
    file_digest,
    identity,
    length,
    packed,
    read_state,
    settle,
    write_state,
)

STRETCH = 16  # Pieces that one thread reads in a row.
EVERY = 10.0
LARGEST_HEADER = 100_000_000
INCOMPLETE = ".incomplete"
UNFINISHED = (".lock", ".part", ".aria2")
# Where huggingface_hub keeps what it is still loading; finished ones leave their .lock there.
HUB_FOLDERS = (".cache", ".huggingface")
HUB_DOWNLOADS = (".cache/huggingface/download/", ".huggingface/download/")

Place = tuple[int, int]


class Walk:
    """Every file below a folder, links followed; what is wrong with some of them."""

    def __init__(self, folder: str) -> None:
        self.files: dict[str, os.stat_result] = {}
        self.faults: dict[str, str] = {}
        self.unfinished: list[str] = []
        top = os.stat(folder)
        self.down(folder, "", ((top.st_dev, top.st_ino),))
        whole = {name for path in self.files for name in names_while_loading(path)}
        for path in self.unfinished:
            # One that was interrupted and done again leaves its remains beside the whole file.
            if loading_name(path) not in whole:
                self.faults[shown(path)] = "is left by a download that has not finished"

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
        if relative.endswith(INCOMPLETE):
            self.unfinished.append(relative)
        elif hidden:
            return
        elif relative.endswith(UNFINISHED):
            self.faults[shown(relative)] = "is left by a download that has not finished"
        elif shown(relative) != relative:
            self.faults[shown(relative)] = "has a name that is not UTF-8"
        else:
            self.files[relative] = found


def names_while_loading(path: str) -> tuple[str, str]:
    """What huggingface_hub calls a file while it loads it: older versions, and newer ones."""
    folder, _, name = path.rpartition("/")
    hashed = base64.urlsafe_b64encode(hashlib.sha1(f"{name}.metadata".encode()).digest())
    return path, f"{folder}/{hashed.decode()}".lstrip("/")


def loading_name(path: str) -> str:
    """The same of what it has left: FOLDER/download/NAME.ETAG.incomplete, or NAME.incomplete."""
    name = path[: -len(INCOMPLETE)]
    for folder in HUB_DOWNLOADS:
        if name.startswith(folder):
            return name[len(folder) :].rpartition(".")[0]
    return name


def shown(name: str) -> str:
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def reason(error: OSError) -> str:
    return f"cannot be read: {error.strerror or error}"


class Reader:
    """Reads files that are new or changed, in several threads, also one large file."""

    def __init__(self, total: int, *, whole: bool) -> None:
        threads = min(8, os.cpu_count() or 1)
        self.total = total
        self.whole = whole
        self.done = 0
        self.told = time.monotonic()
        self.lock = threading.Lock()
        self.files = concurrent.futures.ThreadPoolExecutor(threads)
        self.stretches = concurrent.futures.ThreadPoolExecutor(threads)

    def record(self, path: str) -> Record:
        """What stays true of a file as long as its identity does."""
        try:
            with open(path, "rb", buffering=0) as file:
                before = os.fstat(file.fileno())
                settle(before)
                pieces = self.pieces(file.fileno(), before.st_size) if self.whole else b""
                fault, names = inspect(path, file.fileno(), before.st_size)
                after = os.fstat(file.fileno())
        except OSError as error:
            return {"fault": reason(error)}
        if identity(before) != identity(after):
            return {"fault": "is being written"}
        return {
            "identity": identity(before),
            "size": before.st_size,
            "sha256": file_digest(pieces) if self.whole else "",
            "pieces": packed(pieces),
            "fault": fault,
            "names": names,
        }

    def pieces(self, handle: int, size: int) -> bytes:
        """The digests of a file's pieces, one after the other."""
        starts = range(0, count(size), STRETCH)
        said = b"".join(self.stretches.map(lambda at: self.stretch(handle, size, at), starts))
        # On unified memory the page cache takes what the GPU needs. Only clean pages are given up.
        with contextlib.suppress(OSError):
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        return said

    def stretch(self, handle: int, size: int, first: int) -> bytes:
        said, block = b"", memoryview(bytearray(PIECE))
        for piece in range(first, min(first + STRETCH, count(size))):
            wanted = length(size, piece)
            got = os.preadv(handle, [block[:wanted]], piece * PIECE)
            while 0 < got < wanted:
                more = os.preadv(handle, [block[got:wanted]], piece * PIECE + got)
                got = got + more if more else wanted  # Cut off meanwhile: its identity tells.
            said += hashlib.sha256(block[:wanted]).digest()
            self.tell(wanted)
        return said

    def tell(self, read: int) -> None:
        with self.lock:
            self.done += read
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
    made = {p: reader.files.submit(reader.record, os.path.join(folder, p)) for p in unknown}
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
            told = {key: record[key] for key in ("size", "sha256", "names")}
            answer["files"][path] = {**told, "mtime": record["identity"][1]}
    kept = {path: record for path, record in current.items() if record.get("sha256")}
    if mode == "keep" and kept != state.get(folder):
        write_state(state_file, folder, kept)
    return answer


def say(value: Any) -> None:
    print(json.dumps(value), flush=True)


def main(_program: str, folder: str, state_file: str, mode: str) -> None:
    say(manifest(folder, os.path.expanduser(state_file), mode))


if __name__ == "__main__":
    main(*sys.argv[1:])
