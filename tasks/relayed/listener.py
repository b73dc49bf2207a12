"""Who listens on a TCP port, printed as one JSON document. Argument: the port.

Standard library only; runs on a node, or in a container of it. A container sees the listeners of
its whole node, since it has the node's network, but only its own processes: there, a listener
without a process is somebody else's.
"""

import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterable, Iterator
from typing import Any

LISTEN = "0A"


def main(port: str) -> None:
    found = list(listeners(int(port)))
    held_by = holders({row["inode"] for row in found})
    for row in found:
        pid = held_by.get(row.pop("inode"))
        row.update(pid=pid, command=command(pid) if pid else "")
    print(json.dumps(found))


def listeners(port: int) -> "Iterator[dict[str, Any]]":
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/net/{table}") as file:
            for line in file.read().splitlines()[1:]:
                fields = line.split()
                address, _, number = fields[1].partition(":")
                if fields[3] == LISTEN and int(number, 16) == port:
                    yield {"address": ip_address(address), "inode": fields[9]}


def ip_address(text: str) -> str:
    """The kernel prints 32-bit words in the machine's byte order."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))


def holders(inodes: "Iterable[str]") -> "dict[str, int]":
    """The first process that holds each socket; only root sees those of other users."""
    found: dict[str, int] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"/proc/{pid}/fd/{name}")
                    if target[:8] == "socket:[" and target[8:-1] in inodes:
                        found.setdefault(target[8:-1], int(pid))
    return found


def command(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", errors="replace") as file:
        return file.read().replace("\0", " ").strip()[:120]
    return ""


if __name__ == "__main__":
    main(sys.argv[1])
