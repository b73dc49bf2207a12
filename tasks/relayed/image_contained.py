"""An image in docker's folder, read by a container where the node's user may not read there.

Relayed to the node as a part of image_stream.py; standard library of Python 3.8 only.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

from tasks.relayed.image_reader import FRAME
from tasks.relayed.stream_ends import Broken, Idle, Side

START = 60.0  # An engine that takes longer to start a container had better save the image.
LEAVE = 10.0
NO_PYTHON = 127


class Contained(Idle):
    """The image as the engine keeps it, as image_reader.py writes it in a container."""

    def __init__(self, orders: dict[str, Any]) -> None:
        super().__init__(orders["stall"])
        self.orders = orders
        self.read = 0
        self.first = b""
        self.whole = False
        # The container ends when this pipe does: with us, or with docker's client.
        theirs, self.hold = os.pipe()
        self.side = Side(orders["reader"]["command"], stdin=theirs, stdout=subprocess.PIPE)
        os.close(theirs)

    def why_not(self) -> str:
        """Why the container does not read; nothing once it does."""
        watch = threading.Timer(START, self.side.kill)
        watch.start()
        try:
            with open(self.hold, "wb", closefd=False) as program:
                program.write(self.orders["reader"]["program"].encode())
            self.first = self.frame()
        except (OSError, Broken):
            self.let_go()
            self.side.kill()  # Perhaps it was too slow.
            code = self.side.end()
            why = (self.side.said() or f"exit code {code}").splitlines()[0]
            if code == NO_PYTHON and self.side.process:
                why = "the image has no python3"
            return f"no container can read docker's folder: {why}"
        finally:
            watch.cancel()
        return ""

    def blocks(self) -> Iterator[bytes]:
        block = self.first
        while block:
            self.read += len(block)
            yield block
            block = self.frame()
        self.whole = True
        self.let_go()

    def frame(self) -> bytes:
        out = self.side.process.stdout if self.side.process else None
        if out is None:
            raise Broken("there is no docker")
        self.begin()
        head = out.read(FRAME.size)
        length = FRAME.unpack(head)[0] if len(head) == FRAME.size else -1
        block = out.read(length) if length > 0 else b""
        self.over()
        if len(block) != length:
            # It has closed its output, and so is about to end, or has said nothing that we know.
            self.side.kill()
            code = self.side.end()
            why = "was silent" if self.passed else (self.side.said() or f"exit code {code}")
            raise Broken(f"the container that read docker's folder ended: {why}")
        return block

    def let_go(self) -> None:
        if self.hold >= 0:
            os.close(self.hold)
            self.hold = -1

    def end(self) -> None:
        self.side.kill()

    def report(self) -> dict[str, Any]:
        self.let_go()
        if self.whole and self.side.process:
            # Docker's client ends when the container is gone.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.side.process.wait(LEAVE)
        self.side.kill()
        self.side.end()
        return {
            "read": self.read,
            "legacy": True,
            "left_out": len(set(self.orders["layers"]) & set(self.orders["spare"])),
            "from_store": True,
        }
