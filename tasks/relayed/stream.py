"""Pipes one command's output into another, and tells how both ended.

Relayed to the node; standard library only. Arguments: both commands as JSON lists, and the seconds
without a byte after which both are ended. Tells its progress every second, and last how it went,
each in a line of JSON. A shell's pipe would tell the second exit code only.
"""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

BLOCK = 1 << 20
EVERY = 1.0


class Side:
    """A command of the pipe, and the last lines it says."""

    def __init__(self, argv: list[str], **streams: Any) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.lines: collections.deque[str] = collections.deque(maxlen=20)
        try:
            self.process = subprocess.Popen(argv, stderr=subprocess.PIPE, **streams)
        except OSError as error:
            self.lines.append(f"{argv[0]}: {error.strerror}")
            return
        self.reader = threading.Thread(target=self.read, args=(self.process.stderr,), daemon=True)
        self.reader.start()

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
        self.reader.join(5)
        return code

    def said(self) -> str:
        return "\n".join(self.lines)


class Pipe:
    """Both commands, and what moves between them."""

    def __init__(self, source: list[str], sink: list[str], stall: float) -> None:
        self.source = Side(source, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        self.sink = Side(sink, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        self.stall = stall
        self.bytes = 0
        self.refused = False
        self.stalled = False
        self.over = threading.Event()

    def move(self) -> None:
        """Everything the source says goes to the sink, which may stop listening."""
        threading.Thread(target=self.watch, daemon=True).start()
        out = self.source.process and self.source.process.stdout
        into = self.sink.process and self.sink.process.stdin
        try:
            if out and into:
                self.copy(out.fileno(), into.fileno())
        except BrokenPipeError:
            self.refused = True
        finally:
            self.over.set()
            for stream in (out, into):
                if stream:
                    stream.close()

    def copy(self, out: int, into: int) -> None:
        while True:
            block = memoryview(os.read(out, BLOCK))
            if not block:
                return
            while block:
                sent = os.write(into, block)
                self.bytes += sent
                block = block[sent:]

    def watch(self) -> None:
        """Tell the progress; end both sides when nothing moves any more."""
        seen, moved, told = 0, time.monotonic(), time.monotonic()
        while not self.over.wait(0.5):
            now = time.monotonic()
            if self.bytes != seen:
                seen, moved = self.bytes, now
            if now - told >= EVERY:
                told = now
                say({"progress": {"bytes": seen}})
            # Older engines gather the whole image before the first byte: that is no stall.
            if seen and now - moved > self.stall:
                self.stalled = True
                self.source.kill()
                self.sink.kill()
                return


def say(value: Any) -> None:
    print(json.dumps(value), flush=True)


def main(_program: str, source: str, sink: str, stall: str) -> None:
    began = time.monotonic()
    pipe = Pipe(json.loads(source), json.loads(sink), float(stall))
    pipe.move()
    report = {
        "sink_code": pipe.sink.end(),
        "source_code": pipe.source.end(),
        "bytes": pipe.bytes,
        "refused": pipe.refused,
        "stalled": pipe.stalled,
        "sink_said": pipe.sink.said(),
        "source_said": pipe.source.said(),
    }
    say({**report, "seconds": time.monotonic() - began})


if __name__ == "__main__":
    main(*sys.argv[1:])
