"""Connects stdin and stdout to HOST PORT: an ssh proxy command that runs in a lab's namespace."""

import contextlib
import os
import socket
import sys
import threading

CHUNK = 256 * 1024


def send(connection: socket.socket) -> None:
    """Hands on our stdin, then half-closes: the far side may still have much to say."""
    with contextlib.suppress(OSError):
        # A client that is killed with our words unread ends our stdin by an error.
        with contextlib.suppress(ConnectionResetError):
            while data := os.read(0, CHUNK):
                connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)


def receive(connection: socket.socket) -> None:
    """Hands what the far side says to our stdout until it closes, or nobody listens any more."""
    with contextlib.suppress(OSError):
        while data := connection.recv(CHUNK):
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(1, rest) :]


def main(host: str, port: str) -> None:
    try:
        connection = socket.create_connection((host, int(port)), timeout=30)
    except OSError as error:
        sys.exit(f"cannot dial {host} port {port}: {error}")
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A daemon: once the far side has closed, what is still typed has nowhere to go.
    threading.Thread(target=send, args=(connection,), daemon=True).start()
    receive(connection)


if __name__ == "__main__":
    main(*sys.argv[1:3])
