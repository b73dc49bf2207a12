"""The least that a copy over TCP costs: sendfile at one end, recv and write at the other.

Run on the nodes by the measurements. Arguments: send|receive, address, folder, and the files as a
JSON list of names and sizes. One connection, nothing is checked.
"""

import json
import os
import socket
import sys

PORT = 9191
BLOCK = 1 << 20


def send(address: str, folder: str, files: list[tuple[str, int]]) -> None:
    with socket.create_connection((address, PORT), 20) as link:
        for name, _ in files:
            with open(os.path.join(folder, name), "rb") as file:  # noqa: PTH118, PTH123
                link.sendfile(file)


def receive(address: str, folder: str, files: list[tuple[str, int]]) -> None:
    os.makedirs(folder, exist_ok=True)  # noqa: PTH103
    server = socket.create_server((address, PORT))
    print("ready", flush=True)
    link, _ = server.accept()
    buffer = memoryview(bytearray(BLOCK))
    for name, size in files:
        with open(os.path.join(folder, name), "wb", buffering=0) as file:  # noqa: PTH118, PTH123
            left = size
            while left:
                got = link.recv_into(buffer, min(left, BLOCK))
                assert got, "cut off"
                file.write(buffer[:got])
                left -= got


if __name__ == "__main__":
    action = {"send": send, "receive": receive}[sys.argv[1]]
    action(sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
