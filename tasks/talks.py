"""A program on a node that talks with us in lines of JSON, until it ends or we hang up."""

import json
import time
from collections.abc import Mapping
from typing import Any

from tasks import remote
from tasks.errors import Cancelled, CommandFailed, NodeUnreachable
from tasks.programs import program
from tasks.remote import POLL, Remote

# The program comes by the standard input, and then what it is told.
LOADER = "import sys; exec(sys.stdin.buffer.read(int(sys.argv[1])))"
ENDING = 5.0


class Talk:
    """A relayed program that is told one document; it ends by itself when its input ends."""

    def __init__(self, node: Remote, name: str) -> None:
        self._node = node
        self._name = name
        self._rest = b""
        text = program(name)
        # Isolated: a json.py in the home folder, or PYTHON variables, must not change what it does.
        argv = ("python3", "-IS", "-c", LOADER, str(len(text)), name)
        self._channel = node.start(argv, shown=name)
        self._send(text)

    def tell(self, document: Mapping[str, Any]) -> None:
        """What it begins with; until then it only gets ready."""
        self._send(json.dumps(document).encode() + b"\n")

    def _send(self, data: bytes) -> None:
        try:
            self._channel.sendall(data)
        except (OSError, EOFError) as error:
            self.close()
            raise self._ended(str(error)) from error

    def hear(self, silence: float) -> dict[str, Any]:
        """The next thing that it says, within so many seconds."""
        deadline = time.monotonic() + silence
        while True:
            line, newline, rest = self._rest.partition(b"\n")
            if newline:
                self._rest = rest
                said: dict[str, Any] = json.loads(line)
                return said
            if remote.STOP.is_set():
                raise Cancelled(f"cancelled during: {self._name}", node=self._node.node.name)
            if time.monotonic() > deadline:
                raise NodeUnreachable(
                    f"no word from {self._name} for {silence:g} s",
                    node=self._node.node.name,
                    remedy=f"Is {self._node.node.address} up? Then run again.",
                )
            self._read()

    def _read(self) -> None:
        self._channel.settimeout(POLL)
        try:
            data = self._channel.recv(65536)
        except TimeoutError:
            return
        except (OSError, EOFError) as error:
            raise self._ended(str(error)) from error
        if not data:
            raise self._ended("")
        self._rest += data

    @property
    def over(self) -> bool:
        """Whether the program has ended, by whatever way."""
        return self._channel.closed or self._channel.exit_status_ready()

    def _ended(self, why: str) -> CommandFailed | NodeUnreachable:
        name = self._node.node.name
        told = self._channel.status_event.wait(ENDING)
        code = self._channel.recv_exit_status() if told else -1
        said = b""
        while self._channel.recv_stderr_ready() and (data := self._channel.recv_stderr(4096)):
            said += data
        details = "\n".join(said.decode(errors="replace").strip().splitlines()[-3:])
        if code < 0 and not self._node.alive:
            return NodeUnreachable(f"connection lost during: {self._name} {why}", node=name)
        how = f"exit code {code}" if code >= 0 else "killed, or its connection was lost"
        return CommandFailed(f"{self._name} ended ({how})", node=name, details=details)

    def close(self) -> None:
        """Hang up, which ends it."""
        self._channel.close()
