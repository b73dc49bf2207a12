"""How weights go from node to node: pieces of files, asked for over TCP and answered by sendfile.

Relayed with the programs that send and receive; standard library only. Both ends prove that they
know the one-time token, which itself never travels. Then one side asks, for the digests of a file's
pieces or for a piece, and the other answers with data, with an error or, each second for as long as
it waits for that piece itself, with "wait": silence only ever means that it is gone.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
from typing import Any

GREETING = b"sparkrail weights 1\n"
NONCE = 32
REQUEST = struct.Struct("!cII")  # What, which file, which piece.
ANSWER = struct.Struct("!cI")  # What, and how many bytes of it follow.
DIGESTS, PIECE = b"L", b"P"
DATA, WAIT, ERROR = b"D", b"W", b"E"
REFUSED = bytes(32)
SHAKING = 10.0
CONNECTING = 5.0
SILENCE = 10.0  # After which the other side counts as gone.
STUCK = 60.0
MOST = 256  # Connections at once.


class Told(Exception):
    """What the other side cannot give, in its own words; `kind` says what that means."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Broken(Exception):
    """The other side is not there, or not any more."""


def proof(token: bytes, who: bytes, *nonces: bytes) -> bytes:
    return hmac.new(token, who + b"".join(nonces), "sha256").digest()


def set_timeouts(link: socket.socket, receiving: float, sending: float) -> None:
    """By the kernel, 0 for none: a socket with Python's own timeouts knows no MSG_WAITALL."""
    link.settimeout(None)
    for option, seconds in (socket.SO_RCVTIMEO, receiving), (socket.SO_SNDTIMEO, sending):
        value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        link.setsockopt(socket.SOL_SOCKET, option, value)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def read_into(link: socket.socket, view: memoryview) -> None:
    """Fill the view, or find the other side gone."""
    while view:
        try:
            got = link.recv_into(view, len(view), socket.MSG_WAITALL)
        except BlockingIOError:
            raise Broken(f"nothing came for {SILENCE:g} s") from None
        except OSError as error:
            raise Broken(error.strerror or str(error)) from error
        if not got:
            raise Broken("it closed the connection")
        view = view[got:]


def read(link: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    read_into(link, memoryview(data))
    return bytes(data)


class Link:
    """A connection to a shelf of another node."""

    def __init__(self, address: str, port: int, token: bytes) -> None:
        try:
            self.socket = socket.create_connection((address, port), CONNECTING)
        except OSError as error:
            raise Broken(error.strerror or str(error)) from error
        try:
            set_timeouts(self.socket, SILENCE, SILENCE)
            self.shake_hands(token)
        except BaseException:
            self.close()
            raise

    def shake_hands(self, token: bytes) -> None:
        greeting = read(self.socket, len(GREETING) + NONCE)
        if not greeting.startswith(GREETING):
            raise Told("refused", "something else listens there")
        theirs, ours = greeting[len(GREETING) :], secrets.token_bytes(NONCE)
        self.send(ours + proof(token, b"reader", theirs, ours))
        answer = read(self.socket, len(REFUSED))
        if not hmac.compare_digest(answer, proof(token, b"shelf", ours, theirs)):
            raise Told("refused", "it does not know our token")

    def send(self, data: bytes) -> None:
        try:
            self.socket.sendall(data)
        except OSError as error:
            raise Broken(error.strerror or str(error)) from error

    def ask(self, what: bytes, number: int, piece: int = 0) -> int:
        """How many bytes follow; waits for as long as the other side says that it waits."""
        self.send(REQUEST.pack(what, number, piece))
        while True:
            kind, size = ANSWER.unpack(read(self.socket, ANSWER.size))
            if kind == DATA:
                return int(size)
            if kind == ERROR:
                raise Told(**json.loads(read(self.socket, size)))
            if kind != WAIT:
                raise Broken("it speaks another language")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()


class Server:
    """Answers out of a shelf, on one address, those who know the token.

    A shelf has `digests(number)`, `wait(number, piece, seconds)`, which tells whether the piece is
    there by then, and `piece(number, piece)`, which opens it: handle, offset, size. All may raise
    Told.
    """

    def __init__(self, address: str, token: bytes, shelf: Any) -> None:
        self.token = token
        self.shelf = shelf
        self.room = threading.BoundedSemaphore(MOST)
        try:
            self.listener = socket.create_server((address, 0), backlog=MOST)
        except OSError as error:
            raise Told("listen", error.strerror or str(error)) from error
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            try:
                link, _ = self.listener.accept()
            except ConnectionError:  # It was gone before we had it.
                continue
            if self.room.acquire(blocking=False):
                threading.Thread(target=self.serve, args=(link,), daemon=True).start()
            else:
                link.close()

    def serve(self, link: socket.socket) -> None:
        try:
            # Whoever breaks it off finds out by itself.
            with link, contextlib.suppress(OSError, Broken):
                set_timeouts(link, SHAKING, SHAKING)
                if self.knows_token(link):
                    set_timeouts(link, 0, STUCK)  # It may take its time to ask.
                    while True:
                        self.answer(link, *REQUEST.unpack(read(link, REQUEST.size)))
        finally:
            self.room.release()

    def knows_token(self, link: socket.socket) -> bool:
        ours = secrets.token_bytes(NONCE)
        link.sendall(GREETING + ours)
        said = read(link, NONCE + len(REFUSED))
        theirs, shown = said[:NONCE], said[NONCE:]
        known = hmac.compare_digest(shown, proof(self.token, b"reader", ours, theirs))
        link.sendall(proof(self.token, b"shelf", theirs, ours) if known else REFUSED)
        return known

    def answer(self, link: socket.socket, what: bytes, number: int, piece: int) -> None:
        try:
            if what == DIGESTS:
                found = self.shelf.digests(number)
                link.sendall(ANSWER.pack(DATA, len(found)) + found)
                return
            while not self.shelf.wait(number, piece, 1.0):
                link.sendall(ANSWER.pack(WAIT, 0))
            handle, offset, size = self.shelf.piece(number, piece)
        except Told as error:
            text = json.dumps({"kind": error.kind, "text": str(error)}).encode()
            link.sendall(ANSWER.pack(ERROR, len(text)) + text)
            return
        try:
            link.sendall(ANSWER.pack(DATA, size), socket.MSG_MORE)
            end = offset + size
            while offset < end:
                sent = os.sendfile(link.fileno(), handle, offset, end - offset)
                if not sent:
                    raise Broken("the file is shorter than it was")
                offset += sent
        finally:
            os.close(handle)
