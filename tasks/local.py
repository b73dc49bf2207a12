"""The head as this very machine: the same commands and files, without a connection.

It is reached through a channel that behaves as one of SSH does, so that all of `tasks.remote` holds
here too: quoting, deadlines, the end of a whole process group, files written whole or not at all.
"""

import contextlib
import io
import os
import select
import socket
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from blocks import Node
from tasks.errors import NodeUnreachable
from tasks.remote import Remote

# What a login has too; whatever else stands in our environment is none of the node's business.
KEPT = ("HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "SSH_AUTH_SOCK", "DOCKER_HOST")


class Channel:
    """A command of this machine, with the manners of a channel of paramiko."""

    def __init__(self) -> None:
        # Three of them: what still holds its input open must not keep its output from ending.
        self._input, self._stdin = socket.socketpair()
        self._output, self._stdout = socket.socketpair()
        self._errors, self._stderr = socket.socketpair()
        self._code = -1
        self.closed = False
        self.eof_received = False
        self._errors_ended = False
        self.status_event = threading.Event()

    def exec_command(self, text: str) -> None:
        process = subprocess.Popen(
            ("/bin/sh", "-c", text),
            stdin=self._stdin.fileno(),
            stdout=self._stdout.fileno(),
            stderr=self._stderr.fileno(),
            cwd=Path.home(),
            env={name: os.environ[name] for name in KEPT if name in os.environ},
            # As sshd does it: a group of its own, which its guard ends as a whole.
            start_new_session=True,
        )
        for each in (self._stdin, self._stdout, self._stderr):
            each.close()
        threading.Thread(target=self._await, args=(process,), daemon=True).start()

    def _await(self, process: "subprocess.Popen[bytes]") -> None:
        self._code = process.wait()
        self.status_event.set()

    def settimeout(self, seconds: float | None) -> None:
        for each in (self._input, self._output):
            each.settimeout(seconds)

    def gettimeout(self) -> float | None:
        return self._output.gettimeout()

    def fileno(self) -> int:
        return self._output.fileno()

    def recv(self, size: int) -> bytes:
        data = _received(self._output, size)
        self.eof_received = self.eof_received or not data
        return data

    def recv_ready(self) -> bool:
        return not self.closed and not self.eof_received and _readable(self._output)

    def recv_stderr(self, size: int) -> bytes:
        data = _received(self._errors, size)
        self._errors_ended = self._errors_ended or not data
        return data

    def recv_stderr_ready(self) -> bool:
        return not self.closed and not self._errors_ended and _readable(self._errors)

    def send(self, data: bytes) -> int:
        try:
            return self._input.send(data)
        except (BrokenPipeError, ConnectionResetError):
            return len(data)  # It has ended, or reads no more: its exit code tells why.

    def sendall(self, data: bytes) -> None:
        self._input.sendall(data)

    def shutdown_write(self) -> None:
        with contextlib.suppress(OSError):
            self._input.shutdown(socket.SHUT_WR)

    def exit_status_ready(self) -> bool:
        return self.status_event.is_set()

    def recv_exit_status(self) -> int:
        self.status_event.wait()
        return self._code

    def makefile(self, _mode: str, _buffering: int = -1) -> io.BufferedReader:
        return _File(self)

    def close(self) -> None:
        """What runs reads the end of its input, and its guard then ends it."""
        if self.closed:
            return
        self.closed = True
        for ours in (self._input, self._output, self._errors):
            with contextlib.suppress(OSError):
                ours.shutdown(socket.SHUT_RDWR)
            ours.close()
        for theirs in (self._stdin, self._stdout, self._stderr):
            theirs.close()


class _File(io.BufferedReader):
    """What docker-py reads answers from; it looks for the channel of a stream there."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(socket.SocketIO(channel._output, "r"))
        self.channel = channel


def _received(source: socket.socket, size: int) -> bytes:
    try:
        return source.recv(size)
    except ConnectionResetError:  # It ended without reading all of its input.
        return b""


def _readable(source: socket.socket) -> bool:
    return bool(select.select([source], [], [], 0)[0])


class LocalRemote(Remote):
    """This machine, in the place of a node that we are logged in on."""

    def __init__(self, node: Node) -> None:
        super().__init__(node, None)

    @property
    def transport(self) -> Any:
        return SimpleNamespace(open_session=_open_session, is_active=lambda: True)

    @property
    def _connected(self) -> bool:
        return True

    def close(self) -> None:
        """There is no connection; commands end by their own channels."""

    def open_tunnel(self, host: str, port: int, timeout: float = 10) -> Any:
        try:
            return socket.create_connection((host, port), timeout=timeout)
        except OSError as error:
            raise NodeUnreachable(
                f"no connection to {host}:{port}: {error.strerror or error}",
                node=self.node.name,
                remedy=f"Is the address right, and does something listen on {host}:{port}?",
            ) from error


def _open_session(**_options: Any) -> Channel:
    return Channel()
