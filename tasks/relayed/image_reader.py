"""Reads an image in docker's folder from within a container, for image_contained.py outside.

Relayed into the container; standard library of Python 3.8 only. Told by one JSON document: {"root",
"id", "name", "layers", "wanted"}. Writes the image's archive in frames, the last of them empty.
When its input ends, it ends too: so it learns that docker's client, or who held that, is gone. It
never ends before that by itself: of what an ended container has written, docker drops the last part
where it is not taken at once (moby #49655).
"""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
from typing import NoReturn

from tasks.relayed.image_store import archive, stored

FRAME = struct.Struct(">I")  # The length of what follows; 0: that was all.


def until_let_go() -> None:
    sys.stdin.buffer.read()
    os._exit(0)  # Also while the main thread writes what nobody takes.


def main(_length: str, orders: str) -> None:
    watch = threading.Thread(target=until_let_go)
    watch.start()
    asked = json.loads(orders)
    found = stored(asked["root"], asked["id"], asked["layers"], asked["wanted"])
    if not found:
        give_up("it is not to be read there either")
    try:
        for block in archive(asked["name"], found[0], asked["layers"], found[1]):
            if block:
                write(block)
    except (OSError, ValueError) as error:
        give_up(str(error))
    write(b"")
    watch.join()


def write(block: bytes) -> None:
    sys.stdout.buffer.write(FRAME.pack(len(block)) + block)
    sys.stdout.buffer.flush()


def give_up(why: str) -> NoReturn:
    print(why, file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
