"""Who listens on a port: the relayed program, on sockets of this very machine."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tasks.errors import CommandFailed
from tasks.listeners import PROGRAM, Listener, parse_listeners, strangers


def look(port: int) -> list[Listener]:
    argv = (sys.executable, "-IS", "-", str(port))
    done = subprocess.run(argv, input=PROGRAM, capture_output=True, check=True, timeout=30)
    return parse_listeners(done.stdout.decode())


def test_a_listener_with_its_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        [found] = look(server.getsockname()[1])
    assert (found.address, found.pid) == ("127.0.0.1", os.getpid())
    assert "python" in found.command
    assert str(found) == f"pid {os.getpid()} ({found.command})"


def test_a_listener_on_all_addresses_of_both_kinds() -> None:
    try:
        server = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    except OSError:
        pytest.skip("no IPv6 on this machine")
    with server:
        [found] = look(server.getsockname()[1])
    assert found.address == "::"


def test_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert look(port) == []


def test_a_connection_is_no_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        with client, server.accept()[0]:
            assert look(client.getsockname()[1]) == []


OURS = Listener(address="0.0.0.0", pid=7)


@pytest.mark.parametrize(
    ("seen", "count"),
    [
        pytest.param([OURS], 0, id="ours"),
        pytest.param([Listener(address="0.0.0.0")], 1, id="on all addresses"),
        pytest.param([Listener(address="::")], 1, id="on all addresses of both kinds"),
        pytest.param([OURS, Listener(address="127.0.0.1")], 1, id="where we ask"),
        pytest.param([Listener(address="::ffff:127.0.0.1")], 1, id="where we ask, as IPv6 has it"),
        pytest.param([OURS, Listener(address="10.88.0.1")], 0, id="where nobody of ours asks"),
    ],
)
def test_strangers(seen: Sequence[Listener], count: int) -> None:
    assert len(strangers(seen, "127.0.0.1")) == count


@pytest.mark.parametrize("text", ["", "{}", "null", '[{"pid": 1}]'])
def test_other_words_are_an_error(text: str) -> None:
    with pytest.raises(CommandFailed, match="something else than who listens"):
        parse_listeners(text)
