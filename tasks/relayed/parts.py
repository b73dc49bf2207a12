"""Files on their way: pieces under names of our own beside the model, published when all are whole.

Relayed with the program that receives; standard library only. A file of marks beside each part
tells which pieces came; after an interruption the marked ones are read and checked again, so that
neither a crash nor a full disk can make a piece count that is not there.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import hashlib
import itertools
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

from tasks.relayed.pieces import DIGEST, PIECE, count, file_digest, identity, length
from tasks.relayed.wire import Told

STAGE = ".sparkrail-part"
MARKS = ".marks"
BUSY = 20.0


class Part:
    """A file that is lacking, and how much of it has come."""

    def __init__(self, stage: str, file: dict[str, Any]) -> None:
        self.path: str = file["path"]
        self.size: int = file["size"]
        self.sha256: str = file["sha256"]
        self.mtime: int = file["mtime"]
        self.names: list[str] = file["names"]
        # By name and content: what belongs to an older version of the file is not taken for it.
        key = hashlib.sha256(f"{self.path}\0{self.sha256}".encode()).hexdigest()[:40]
        self.name = key
        self.place = os.path.join(stage, key)
        self.digests = b""
        self.have = bytearray(count(self.size))
        self.left = len(self.have)
        self.marked = self.read_marks()

    def read_marks(self) -> bytes:
        try:
            with open(self.place + MARKS, "rb") as file:
                marks = file.read()
            whole = os.path.getsize(self.place) == self.size and len(marks) == len(self.have)
        except OSError:
            whole = False
        return marks if whole else b""

    def prepare(self) -> None:
        """An empty file of the right size, unless one is there to go on with."""
        if self.marked:
            return
        for place, size in (self.place, self.size), (self.place + MARKS, len(self.have)):
            with open(place, "wb") as file:
                file.truncate(size)

    def digest(self, piece: int) -> bytes:
        return self.digests[piece * DIGEST : (piece + 1) * DIGEST]

    def holds(self, piece: int, buffer: memoryview) -> bool:
        """Whether a marked piece is really there."""
        if not self.marked or not self.marked[piece]:
            return False
        hashed, at = hashlib.sha256(), piece * PIECE
        end = at + length(self.size, piece)
        with open(self.place, "rb", buffering=0) as file:
            while at < end:
                got = os.preadv(file.fileno(), [buffer[: end - at]], at)
                if not got:
                    return False
                hashed.update(buffer[:got])
                at += got
        return hashed.digest() == self.digest(piece)

    def mark(self, piece: int) -> None:
        with open(self.place + MARKS, "r+b", buffering=0) as file:
            os.pwrite(file.fileno(), b"\1", piece)

    def allocated(self) -> int:
        try:
            return os.stat(self.place).st_blocks * 512
        except OSError:
            return 0


class Parts:
    """All files that a node lacks; also the shelf from which it serves the nodes behind it."""

    def __init__(self, folder: str, files: list[dict[str, Any]], lacking: list[int]) -> None:
        self.folder = folder
        self.stage = os.path.join(folder, STAGE)
        self.files = files
        self.guard = claim(self.stage)
        self.parts = {number: Part(self.stage, files[number]) for number in lacking}
        self.total = sum(part.size for part in self.parts.values())
        self.bytes = 0
        self.changed = threading.Condition()
        self.sealer = concurrent.futures.ThreadPoolExecutor(1)
        self.sealed: list[concurrent.futures.Future[None]] = []
        self.remembered = threading.Event()

    def prepare(self) -> None:
        """What belongs to no file that is lacking goes; then there must be room for the rest."""
        names = {part.name for part in self.parts.values()}
        for name in os.listdir(self.stage):
            if name.partition(".")[0] not in names:
                os.unlink(os.path.join(self.stage, name))
        found = os.statvfs(self.stage)
        free = found.f_bavail * found.f_frsize
        needed = sum(max(0, part.size - part.allocated()) for part in self.parts.values())
        if needed > free:
            raise Told("disk", f"{needed} bytes are needed, {free} are free")
        for part in self.parts.values():
            part.prepare()

    def jobs(self, side_by_side: int) -> Iterator[tuple[int, int]]:
        """All pieces, of some files by turns: who writes to a file keeps others from writing."""
        numbers = iter(self.parts)
        while group := list(itertools.islice(numbers, side_by_side)):
            for piece in range(max(self.parts[number].left for number in group)):
                yield from ((each, piece) for each in group if piece < self.parts[each].left)

    def got(self, number: int, piece: int) -> None:
        """A piece is there, and checked."""
        part = self.parts[number]
        part.mark(piece)
        with self.changed:
            part.have[piece] = 1
            part.left -= 1
            self.bytes += length(part.size, piece)
            if not part.left:
                self.sealed.append(self.sealer.submit(_seal, part.place))
            self.changed.notify_all()

    def publish(self) -> None:
        """Every file under its own name, at once: nobody sees some of a new model's for long."""
        for each in self.sealed:
            each.result()
        for part in self.parts.values():
            if not part.size:
                _seal(part.place)
        folders = set()
        # What names the others comes last.
        for part in sorted(self.parts.values(), key=lambda each: each.path.endswith(".json")):
            target = os.path.join(self.folder, part.path)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.utime(part.place, ns=(part.mtime, part.mtime))
            os.replace(part.place, target)
            folders.add(os.path.dirname(target))
        for folder in folders:
            _seal(folder)
        for part in self.parts.values():
            os.unlink(part.place + MARKS)
        with contextlib.suppress(OSError):
            os.rmdir(self.stage)

    def records(self) -> dict[str, Any]:
        """What is to be remembered of the published files, as the program `manifest` does it."""
        return {
            part.path: {
                "identity": identity(os.stat(os.path.join(self.folder, part.path))),
                "size": part.size,
                "sha256": part.sha256,
                "pieces": part.digests,
                "fault": "",
                "names": part.names,
            }
            for part in self.parts.values()
        }

    # As a shelf.

    def digests(self, _number: int) -> bytes:
        raise Told("gone", "only the head tells digests")

    def wait(self, number: int, piece: int, seconds: float) -> bool:
        part = self.parts.get(number)
        if part is None:
            return True
        with self.changed:
            return bool(
                part.have[piece] or self.changed.wait_for(lambda: part.have[piece], seconds)
            )

    def piece(self, number: int, piece: int) -> tuple[int, int, int]:
        file = self.files[number]
        final = os.path.join(self.folder, file["path"])
        part = self.parts.get(number)
        # Published between the two, it is found by the third.
        for place in ([part.place] if part else []) + [final]:
            with contextlib.suppress(OSError):
                return os.open(place, os.O_RDONLY), piece * PIECE, length(file["size"], piece)
        raise Told("gone", f"{file['path']} is not there")


def claim(stage: str) -> int:
    """The stage, opened, and ours for as long as this process lives.

    A program of an earlier run that was cut off may still be there for some seconds.
    """
    deadline = time.monotonic() + BUSY
    while True:
        os.makedirs(stage, exist_ok=True)
        guard = os.open(stage, os.O_RDONLY)
        # It may be removed by whom we wait for: then it is not the one that others will find.
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(guard), os.stat(stage)):
                return guard
        os.close(guard)
        if time.monotonic() > deadline:
            raise Told("busy", "another transfer still writes there")
        time.sleep(0.1)


def check(part: Part, digests: bytes) -> bool:
    """Take the digests of a part's pieces, if they are what its own digest stands for."""
    if len(digests) != DIGEST * count(part.size) or file_digest(digests) != part.sha256:
        return False
    part.digests = digests
    return True


def _seal(place: str) -> None:
    """On the disk, whatever happens to the node next."""
    handle = os.open(place, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
