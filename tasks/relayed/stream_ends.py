"""The ends of a stream: commands that are read and written, and what is given up when it stands.

Relayed to the node as a part of image_stream.py; standard library of Python 3.8 only.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

AHEAD = 8  # Blocks that one receiver may be behind the other.
EVERY = 1.0
_say_lock = threading.Lock()


class Broken(Exception):
    """The stream ended before its end; what it says is no fault of this machine."""


class Side:
    """A command at one end of the stream, and the last lines it says."""

    def __init__(self, argv: list[str], **streams: Any) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.lines: collections.deque[str] = collections.deque(maxlen=20)
        self.readers: list[threading.Thread] = []
        try:
            self.process = subprocess.Popen(argv, stderr=subprocess.PIPE, **streams)
        except OSError as error:
            self.lines.append(f"{argv[0]}: {error.strerror}")
            return
        listened = [self.process.stderr]
        if "stdin" in streams and streams["stdin"] == subprocess.PIPE:
            listened.append(self.process.stdout)
        for stream in listened:
            reader = threading.Thread(target=self.read, args=(stream,), daemon=True)
            reader.start()
            self.readers.append(reader)

    def read(self, stream: Any) -> None:
        for line in stream:
            self.lines.append(line.decode(errors="replace").rstrip())

    def kill(self) -> None:
        if self.process:
            self.process.kill()

    def end(self) -> int:
        """Its exit code; 127 when there is no such command."""
        if not self.process:
            return 127
        code = self.process.wait()
        for reader in self.readers:
            reader.join(5)
        return code

    def said(self) -> str:
        return "\n".join(self.lines)


class Idle:
    """How long something has been waited for; after `limit` seconds `end` ends it."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.since: float | None = None
        self.passed = False

    def begin(self) -> None:
        self.since = time.monotonic()

    def over(self) -> None:
        self.since = None

    def check(self) -> None:
        since = self.since
        if since is not None and not self.passed and time.monotonic() - since > self.limit:
            self.passed = True
            self.end()

    def tell(self) -> None:
        """Called every second."""

    def lost(self) -> bool:
        """Whether nothing can come of it any more, however long one waits."""
        return False

    def end(self) -> None:
        raise NotImplementedError


class Outlet(Idle):
    """Takes block after block in a thread of its own; one that fails takes no further ones."""

    def __init__(self, limit: float) -> None:
        super().__init__(limit)
        self.failed = ""
        self.queue: queue.Queue[bytes | None] = queue.Queue(AHEAD)
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def put(self, block: bytes) -> None:
        self.queue.put(block)

    def finish(self) -> None:
        """All that it was given is written, or it has failed."""
        self.queue.put(None)
        self.thread.join()

    def work(self) -> None:
        """Goes on taking when it has failed: the other outlet is not to wait for this one."""
        self.attempt(self.start)
        while True:
            try:
                block = self.queue.get(timeout=EVERY)
            except queue.Empty:
                self.attempt(self.idle)
                continue
            if block is None:
                return
            self.attempt(self.write, block)

    def attempt(self, action: Callable[..., None], *arguments: bytes) -> None:
        if self.failed:
            return
        try:
            action(*arguments)
        except OSError as error:
            self.failed = self.failed or str(error.strerror or error)

    def start(self) -> None:
        """Before the first block."""

    def write(self, block: bytes) -> None:
        raise NotImplementedError

    def idle(self) -> None:
        """There was no block for a second."""

    def abandon(self) -> None:
        """What it has taken so far is for nothing."""
        self.end()


class Load(Outlet):
    """The `docker load` of this machine."""

    def __init__(self, argv: list[str], limit: float) -> None:
        self.side = Side(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pipe = self.side.process.stdin if self.side.process else None
        super().__init__(limit)

    def start(self) -> None:
        if self.pipe is None:
            raise OSError("no such command")

    def write(self, block: bytes) -> None:
        assert self.pipe is not None
        view = memoryview(block)
        try:
            while view:
                self.begin()
                view = view[os.write(self.pipe.fileno(), view) :]
        finally:
            self.over()

    def end(self) -> None:
        self.side.kill()

    def close(self, complete: bool) -> dict[str, Any]:
        if not complete:
            self.side.kill()  # What was cut off is not to be taken for an image.
        self.finish()
        if self.pipe:
            with contextlib.suppress(OSError):
                self.pipe.close()
        return {
            "load_code": self.side.end(),
            "load_said": self.side.said(),
            "load_stalled": self.passed,
            "refused": bool(self.failed),
        }


def say(value: Any) -> None:
    with _say_lock:
        print(json.dumps(value), flush=True)
