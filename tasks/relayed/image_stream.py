"""One machine of a chain that passes an image on: from `docker save`, or from the machine before,
into its own `docker load` and to the machine behind, all at once.

Relayed to the node; standard library of Python 3.8 only. Told by one JSON document:
{"save": the command, "layers", "spare", "blobs", "legacy": for the filter} or {"listen": address,
"token", "wait": seconds}; and {"load": a command, or none, "next": {"address", "port", "token"}, or
none, "stall": the seconds without a byte after which a command is given up}.
Says where it listens and how far it is, and last how it all ended, each in a line of JSON.
"""

from __future__ import annotations

import collections
import contextlib
import hmac
import json
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tasks.relayed.image_archive import LayerFilter

BLOCK = 1 << 20
AHEAD = 8  # Blocks that one receiver may be behind the other.
EVERY = 1.0
GREETING = 10.0
FRAME = struct.Struct(">I")  # The length of what follows; 0: that was all.
ALIVE = 0xFFFFFFFF  # Instead of a length: nothing yet. The other way, a byte says the same.
ACCEPTED = b"+"
# Who is silent for so long is gone, or frozen: both ends say every second that they are not.
DEAD = 20.0


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

    def end(self) -> None:
        raise NotImplementedError


class Saved(Idle):
    """The image as `docker save` writes it, without the layers that no machine lacks."""

    def __init__(self, orders: dict[str, Any]) -> None:
        super().__init__(orders["stall"])
        self.side = Side(orders["save"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        self.filter = LayerFilter(
            orders["layers"],
            orders["spare"],
            blobs=orders["blobs"],
            legacy=orders["legacy"],
        )
        self.read = 0

    def blocks(self) -> Iterator[bytes]:
        process = self.side.process
        if process and process.stdout:
            while True:
                # Older engines gather the whole image before the first byte: that is no stall.
                if self.read:
                    self.begin()
                block = os.read(process.stdout.fileno(), BLOCK)
                self.over()
                if not block:
                    break
                self.read += len(block)
                for part in self.filter.feed(block):
                    yield bytes(part)
        if self.side.end() != 0 or not self.read:
            raise Broken("docker save failed")
        if not self.filter.whole:
            raise Broken("docker save ended in the midst of a file")

    def end(self) -> None:
        self.side.kill()

    def report(self) -> dict[str, Any]:
        self.side.kill()
        return {
            "source_code": self.side.end(),
            "source_said": self.side.said(),
            "source_stalled": self.passed,
            "read": self.read,
            "legacy": self.filter.is_legacy,
            "left_out": len(self.filter.left_out),
            "sent_anyway": self.filter.sent_anyway,
        }


class Received(Idle):
    """The image as the machine before sends it: frames, so that a cut is no end."""

    def __init__(self, orders: dict[str, Any]) -> None:
        super().__init__(DEAD)
        self.orders = orders
        self.peer: socket.socket | None = None

    def accept(self) -> socket.socket:
        """The first that knows the token; nobody else is listened to after it."""
        deadline = time.monotonic() + self.orders["wait"]
        with socket.socket() as listener:
            try:
                listener.bind((self.orders["listen"], 0))
            except OSError as error:
                why = f"cannot listen on {self.orders['listen']}: {error.strerror}"
                raise Broken(why) from None
            listener.listen(4)
            say({"progress": {"port": listener.getsockname()[1]}})
            while True:
                listener.settimeout(max(0.1, deadline - time.monotonic()))
                try:
                    peer, _ = listener.accept()
                except socket.timeout:  # noqa: UP041 - Python 3.8 has two
                    raise Broken("nobody with the token called") from None
                if self.knows_token(peer):
                    return peer
                peer.close()

    def knows_token(self, peer: socket.socket) -> bool:
        token = self.orders["token"].encode()
        peer.settimeout(GREETING)
        try:
            said = self.receive(peer, len(token))
            if not hmac.compare_digest(said, token):
                return False
            peer.sendall(ACCEPTED)
        except (OSError, Broken):
            return False
        peer.settimeout(None)
        return True

    def blocks(self) -> Iterator[bytes]:
        self.peer = peer = self.accept()
        try:
            while True:
                (length,) = FRAME.unpack(self.receive(peer, FRAME.size))
                if not length:
                    return
                if length != ALIVE:
                    yield self.receive(peer, length)
        except OSError as error:
            raise Broken(f"the machine before is gone: {error.strerror or error}") from None

    def receive(self, peer: socket.socket, size: int) -> bytes:
        """Exactly so many bytes."""
        data = bytearray(size)
        view = memoryview(data)
        while view:
            self.begin()
            taken = peer.recv_into(view)
            self.over()
            if not taken:
                why = f"was silent for {DEAD:.0f} s" if self.passed else "ended the connection"
                raise Broken(f"the machine before {why}")
            view = view[taken:]
        return bytes(data)

    def tell(self) -> None:
        # One who does not read what we say will not be told more.
        if self.peer:
            with contextlib.suppress(OSError):
                self.peer.send(ACCEPTED, socket.MSG_DONTWAIT)

    def end(self) -> None:
        if self.peer:
            shut(self.peer)

    def report(self) -> dict[str, Any]:
        if self.peer:
            self.peer.close()
        return {}


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


class Next(Outlet):
    """The machine behind this one."""

    def __init__(self, where: dict[str, Any]) -> None:
        self.where = where
        self.peer: socket.socket | None = None
        super().__init__(DEAD)

    def start(self) -> None:
        address = (self.where["address"], self.where["port"])
        self.peer = peer = socket.create_connection(address, DEAD)
        peer.sendall(self.where["token"].encode())
        if peer.recv(1) != ACCEPTED:
            raise OSError("it does not accept our token")
        peer.settimeout(None)
        threading.Thread(target=self.listen, args=(peer,), daemon=True).start()

    def listen(self, peer: socket.socket) -> None:
        """It says every second that it lives, also while it takes nothing."""
        self.begin()
        with contextlib.suppress(OSError):
            while peer.recv(64):
                self.begin()
        self.over()

    def write(self, block: bytes) -> None:
        assert self.peer is not None
        # In one go: the frame alone would be a packet of its own.
        self.peer.sendall(FRAME.pack(len(block)) + block)

    def idle(self) -> None:
        if self.peer:
            self.peer.sendall(FRAME.pack(ALIVE))

    def end(self) -> None:
        self.failed = self.failed or f"it was silent for {DEAD:.0f} s"
        if self.peer:
            shut(self.peer)

    def close(self, complete: bool) -> dict[str, Any]:
        if not complete and self.peer:
            shut(self.peer)
        self.finish()
        if complete and not self.failed and self.peer:
            try:
                self.peer.sendall(FRAME.pack(0))
            except OSError as error:
                self.failed = self.failed or str(error.strerror or error)
        if self.peer:
            self.peer.close()
        return {"next_failed": self.failed if complete else ""}


class Chain:
    """The part of a chain that is on this machine."""

    def __init__(self, orders: dict[str, Any]) -> None:
        self.source: Saved | Received = Saved(orders) if "save" in orders else Received(orders)
        load = Load(orders["load"], orders["stall"]) if orders.get("load") else None
        next_one = Next(orders["next"]) if orders.get("next") else None
        self.outlets = [outlet for outlet in (load, next_one) if outlet]
        self.bytes = 0
        self.over = threading.Event()

    def run(self) -> dict[str, Any]:
        threading.Thread(target=self.watch, daemon=True).start()
        broken = ""
        try:
            for block in self.source.blocks():
                for outlet in self.outlets:
                    outlet.put(block)
                self.bytes += len(block)
                if all(outlet.failed for outlet in self.outlets):
                    break
        except Broken as error:
            broken = str(error)
        report: dict[str, Any] = {"bytes": self.bytes, "broken": broken}
        # Both at once: an engine may take long to unpack what it has.
        closing = [
            threading.Thread(target=lambda each=outlet: report.update(each.close(not broken)))
            for outlet in self.outlets
        ]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        self.over.set()
        return {**report, **self.source.report()}

    def watch(self) -> None:
        """Tell the progress; give up what does not move any more."""
        told = 0.0
        while not self.over.wait(0.2):
            parts = (self.source, *self.outlets)
            for each in parts:
                each.check()
            if time.monotonic() - told >= EVERY:
                told = time.monotonic()
                say({"progress": {"bytes": self.bytes}})
                for each in parts:
                    each.tell()


def shut(peer: socket.socket) -> None:
    with contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)


say_lock = threading.Lock()


def say(value: Any) -> None:
    with say_lock:
        print(json.dumps(value), flush=True)


def main(_program: str, orders: str) -> None:
    began = time.monotonic()
    report = Chain(json.loads(orders)).run()
    say({**report, "seconds": time.monotonic() - began})


if __name__ == "__main__":
    main(*sys.argv[1:])
