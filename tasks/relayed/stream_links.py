"""The way from machine to machine: frames on a TCP connection, opened by a one-time token.

Relayed to the node as a part of image_stream.py; standard library of Python 3.8 only.
"""

from __future__ import annotations

import contextlib
import hmac
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

from tasks.relayed.stream_ends import Broken, Idle, Outlet, say

GREETING = 10.0
FRAME = struct.Struct(">I")  # The length of what follows; 0: that was all.
ALIVE = 0xFFFFFFFF  # Instead of a length: nothing yet. The other way, a byte says the same.
ACCEPTED = b"+"
# Who is silent for so long is gone, or frozen: both ends say every second that they are not.
DEAD = 20.0


class Received(Idle):
    """The image as the machine before sends it: frames, so that a cut is no end."""

    def __init__(self, orders: dict[str, Any]) -> None:
        super().__init__(DEAD)
        self.orders = orders
        self.peer: socket.socket | None = None
        self.complete = False

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
                    self.complete = True
                    peer.close()  # The machine before waits for that.
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

    def lost(self) -> bool:
        """The machine before hangs up only after us: seen also while nothing is read."""
        if self.peer is None or self.complete:
            return False
        look = select.poll()
        try:
            look.register(self.peer, select.POLLRDHUP)
            return bool(look.poll(0))
        except (OSError, ValueError):  # Just closed.
            return False

    def end(self) -> None:
        if self.peer:
            shut(self.peer)

    def report(self) -> dict[str, Any]:
        if self.peer:
            self.peer.close()
        return {}


class Next(Outlet):
    """The machine behind this one."""

    def __init__(self, where: dict[str, Any]) -> None:
        self.where = where
        self.peer: socket.socket | None = None
        self.listener: threading.Thread | None = None
        super().__init__(DEAD)

    def start(self) -> None:
        address = (self.where["address"], self.where["port"])
        self.peer = peer = socket.create_connection(address, DEAD)
        peer.sendall(self.where["token"].encode())
        if peer.recv(1) != ACCEPTED:
            raise OSError("it does not accept our token")
        peer.settimeout(None)
        self.listener = threading.Thread(target=self.listen, args=(peer,), daemon=True)
        self.listener.start()

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

    def abandon(self) -> None:
        if self.peer:
            shut(self.peer)

    def close(self, complete: bool) -> dict[str, Any]:
        if not complete:
            self.abandon()
        self.finish()
        if complete and not self.failed and self.peer:
            try:
                self.peer.sendall(FRAME.pack(0))
                # Closed with a word of it unread, the connection would drop what is on its way.
                if self.listener:
                    self.listener.join()
            except OSError as error:
                self.failed = self.failed or str(error.strerror or error)
        if self.peer:
            self.peer.close()
        return {"next_failed": self.failed if complete else ""}


def shut(peer: socket.socket) -> None:
    with contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)
