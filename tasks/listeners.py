"""Who listens on a TCP port of a node, and whether it is a process of ours."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, TypeAdapter, ValidationError

from blocks import Cluster, Node
from tasks.errors import CommandFailed
from tasks.remote import connect

PROGRAM = (Path(__file__).parent / "relayed" / "listener.py").read_bytes()


class Listener(BaseModel, frozen=True):
    """A listening socket; its process is known where it could be looked at."""

    address: str
    pid: int | None = None
    command: str = ""

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.command})" if self.pid else "a process that we may not see"


def parse_listeners(text: str) -> list[Listener]:
    """What the relayed program printed."""
    try:
        return TypeAdapter(list[Listener]).validate_json(text)
    except ValidationError as error:
        raise CommandFailed("it said something else than who listens", details=text) from error


def listeners(cluster: Cluster, node: Node, port: int) -> list[Listener]:
    """As the node itself sees them."""
    argv = ("python3", "-IS", "-", str(port))
    return parse_listeners(connect(cluster, node).run(argv, stdin=PROGRAM).stdout)


def listeners_of(cluster: Cluster, node: Node, container: str, port: int) -> list[Listener]:
    """As a container of ours sees them: one without a process is not its own."""
    argv = ("docker", "exec", "-i", container, "python3", "-IS", "-", str(port))
    return parse_listeners(connect(cluster, node).run(argv, stdin=PROGRAM).stdout)


def strangers(seen: Sequence[Listener], host: str) -> list[Listener]:
    """Of what a container of ours sees, those that answer at that address and are not its own."""
    return [
        each
        for each in seen
        if each.pid is None and each.address.removeprefix("::ffff:") in (host, "0.0.0.0", "::")
    ]
