"""What the programs that read, send and receive a model share: pieces, digests, what is known.

Relayed together with them; standard library only. A file is cut into pieces of 4 MiB, each with its
sha256. The digest of a file of one piece is that piece's, of a larger one the sha256 over those of
its pieces: so that a file is read by all cores at once, and a piece is checked as it arrives.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import time
from typing import Any

PIECE = 4 << 20
DIGEST = 32  # Bytes of a sha256.
# By which the kernel stamps files, CLOCK_REALTIME_COARSE: it stands still for 1 to 10 ms at a time,
# and a write within one such tick leaves the ctime as it was.
CLOCK = 5
TICK = 0.02  # Twice the longest: a file server has a clock of its own.
VERSION = 2

Record = dict[str, Any]  # Of a file: identity, size, sha256, pieces, fault, names.


def count(size: int) -> int:
    """How many pieces a file of that size has."""
    return (size + PIECE - 1) // PIECE


def length(size: int, piece: int) -> int:
    """How long a piece of a file of that size is."""
    return min(PIECE, size - piece * PIECE)


def file_digest(pieces: bytes) -> str:
    """The digest of a file by those of its pieces."""
    if len(pieces) == DIGEST:
        return pieces.hex()
    return hashlib.sha256(pieces).hexdigest()


def packed(pieces: bytes) -> str:
    return base64.b64encode(pieces).decode()


def unpacked(text: str) -> bytes:
    return base64.b64decode(text)


def identity(found: os.stat_result) -> list[int]:
    """What changes with every write: no program can set a ctime back."""
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]


def settle(found: os.stat_result) -> None:
    """Wait until a later write to a file would show in its ctime: some hundredths of a second."""
    while -TICK <= time.clock_gettime(CLOCK) - found.st_ctime <= TICK:
        time.sleep(TICK / 5)


def read_state(path: str) -> dict[str, dict[str, Any]]:
    """What is remembered of each folder's files; nothing where that cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            state = json.load(file)
        return dict(state["folders"]) if state["version"] == VERSION else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def write_state(path: str, folder: str, files: dict[str, Any]) -> None:
    """Remember the files of a folder, beside those of the other folders that still exist."""
    folders = {name: kept for name, kept in read_state(path).items() if os.path.isdir(name)}
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    aside = f"{path}.{os.getpid()}.tmp"
    try:
        with open(aside, "w", encoding="utf-8") as file:
            json.dump({"version": VERSION, "folders": {**folders, folder: files}}, file)
        os.replace(aside, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise
