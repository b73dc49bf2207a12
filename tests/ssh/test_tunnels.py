"""TCP connections that a node makes for us."""

import http.client
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer

import pytest

from tasks.errors import LoginRefused, NodeUnreachable
from tasks.remote import Remote
from tests.ssh.conftest import LogIn, Start
from tests.ssh.sshd import free_port


class Hello(BaseHTTPRequestHandler):
    # Kept open: a paramiko channel, closed by http.client before it read all, loses the rest.
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = f"hello at {self.path} ".encode() * 10_000
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hello) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("node", ["head", "worker"])
def test_http_goes_through_a_tunnel(
    node: str, server: HTTPServer, request: pytest.FixtureRequest
) -> None:
    connection: Remote = request.getfixturevalue(node)
    client = http.client.HTTPConnection("node")
    tunnel = connection.open_tunnel("127.0.0.1", server.server_port)
    client.sock = tunnel
    client.request("GET", "/health")
    assert client.getresponse().read() == b"hello at /health " * 10_000
    tunnel.close()


def test_a_port_where_nothing_listens_is_named(head: Remote) -> None:
    port = free_port()
    with pytest.raises(NodeUnreachable) as caught:
        head.open_tunnel("127.0.0.1", port)
    assert str(caught.value) == (
        f"head: no connection to 127.0.0.1:{port}: Connect failed\n"
        f"Is the address right, and does something listen on 127.0.0.1:{port}?"
    )
    assert head.alive


def test_a_server_that_says_nothing_times_out(head: Remote) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tunnel = head.open_tunnel("127.0.0.1", silent.getsockname()[1], timeout=0.3)
        with pytest.raises(TimeoutError):
            tunnel.recv(1)
        tunnel.close()


def test_a_node_that_forbids_tunnels_is_named(start: Start, only: LogIn) -> None:
    node = only(start("AllowTcpForwarding no"))
    with pytest.raises(LoginRefused) as caught:
        node.open_tunnel("127.0.0.1", 8000)
    assert str(caught.value) == (
        "head: sshd forbids the tunnel to 127.0.0.1:8000\n"
        "Set AllowTcpForwarding yes in sshd_config on head and reload sshd."
    )
