"""Nothing of this tier leaves the machine: the addresses in its specs are a lab's."""

import socket
from typing import Any

import pytest

LOOPBACK = ("127.", "::1", "localhost")


@pytest.fixture(autouse=True)
def only_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection to anywhere else fails at once, and says where to."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple) and not str(address[0]).startswith(LOOPBACK):
            raise PermissionError(f"a unit test dials {address[0]}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)
