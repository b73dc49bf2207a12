"""Serves the files of a model folder to other nodes until its standard input ends.

Relayed to the head; standard library only. The first line of its input is a JSON document: address,
token, folder, state, paths. Says {"listening": port}. A file is given only while its identity is
the one that it was read with, so that nothing is sent that has changed since.
"""

from __future__ import annotations

import os
from typing import Any

from tasks.relayed.pieces import PIECE, Record, identity, length, read_state, unpacked
from tasks.relayed.talking import configuration, say, wait_for_the_end
from tasks.relayed.wire import Server, Told


class Shelf:
    """The files of the model, as they are remembered."""

    def __init__(self, folder: str, paths: list[str], known: dict[str, Record]) -> None:
        self.folder = folder
        self.paths = paths
        self.known = known

    def digests(self, number: int) -> bytes:
        path = self.paths[number]
        os.close(self.opened(path))
        return unpacked(self.known[path]["pieces"])

    def wait(self, _number: int, _piece: int, _seconds: float) -> bool:
        return True

    def piece(self, number: int, piece: int) -> tuple[int, int, int]:
        path = self.paths[number]
        handle = self.opened(path)
        return handle, piece * PIECE, length(self.known[path]["size"], piece)

    def opened(self, path: str) -> int:
        try:
            handle = os.open(os.path.join(self.folder, path), os.O_RDONLY)
        except OSError as error:
            raise Told("changed", f"{path}: {error.strerror}") from error
        if path in self.known and identity(os.fstat(handle)) == self.known[path]["identity"]:
            return handle
        os.close(handle)
        raise Told("changed", path)


def main(config: Any) -> None:
    known = read_state(os.path.expanduser(config["state"])).get(config["folder"], {})
    shelf = Shelf(config["folder"], config["paths"], known)
    try:
        server = Server(config["address"], bytes.fromhex(config["token"]), shelf)
    except Told as error:
        say({"failed": {"kind": error.kind, "text": str(error)}})
        return
    say({"listening": server.port})
    wait_for_the_end()


if __name__ == "__main__":
    main(configuration())
