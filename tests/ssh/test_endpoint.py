"""Questions to a server through the tunnel of a real SSH connection."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from blocks import Cluster
from tasks import endpoint
from tasks.endpoint import Ask, Silent, check_answers
from tasks.errors import LoginRefused, NodeUnreachable
from tests.ssh.conftest import Start
from tests.ssh.sshd import Sshd, free_port, spec
from tests.unit.http_server import COMPLETION, HANG, HEALTHY, Raw, Server, serving

BODY = json.dumps(COMPLETION).encode()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(HEALTHY) as found:
        yield found


def asker(cluster: Cluster, port: int) -> Ask:
    serve = cluster.serve.model_copy(update={"port": port})
    return endpoint.asker(cluster.model_copy(update={"serve": serve}), "sk-1")


def test_a_real_answer_through_the_head(cluster: Cluster, server: Server) -> None:
    answer = check_answers(asker(cluster, server.port), "tiny")
    assert (answer.text, answer.tokens) == (" jumps over", 4)
    assert [path for path, _, _ in server.asked] == [
        "/health",
        "/v1/models",
        "/metrics",
        "/v1/completions",
    ]
    assert {headers["Authorization"] for _, _, headers in server.asked} == {"Bearer sk-1"}


def test_an_answer_longer_than_a_packet(cluster: Cluster) -> None:
    page = b"x" * 3_000_000
    with serving({"/health": (500, page)}) as big:
        assert asker(cluster, big.port)("GET", "/health", None, 10) == (500, page)


@pytest.mark.parametrize(
    "length", [b"Content-Length: %d\r\n" % len(BODY), b""], ids=["of known length", "until its end"]
)
def test_a_body_that_comes_after_its_headers_is_read_whole(cluster: Cluster, length: bytes) -> None:
    """Of a server that hangs up after its answer, as HTTP/1.0 and some proxies do."""
    headers = b"HTTP/1.1 200 OK\r\nConnection: close\r\n%s\r\n" % length
    with serving(HEALTHY | {"/v1/completions": Raw(headers, BODY)}) as server:
        assert check_answers(asker(cluster, server.port), "tiny").tokens == 4


def test_a_body_that_is_cut_short_is_no_answer(cluster: Cluster) -> None:
    headers = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY)
    short = HEALTHY | {"/v1/completions": Raw(headers, BODY[:-1])}
    with serving(short) as server, pytest.raises(Silent) as caught:
        check_answers(asker(cluster, server.port), "tiny")
    assert caught.value.brief.startswith("/v1/completions: IncompleteRead")


class KeepsNoConnection(BaseHTTPRequestHandler):
    """HTTP/1.0, and the body only when the headers have long arrived."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        lines = [b"data: {}\n", b"data: [DONE]\n"] * 100
        self.send_response(200)
        self.send_header("Content-Length", str(len(b"".join(lines))))
        self.end_headers()
        threading.Event().wait(0.3)
        for line in lines:
            self.wfile.write(line)

    def log_message(self, format: str, *args: Any) -> None:
        """Silence."""


class SendsChunks(KeepsNoConnection):
    """HTTP/1.1, and the answer in chunks, as vLLM streams it."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for line in [b"data: {}\n", b"data: [DONE]\n"] * 100:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.write(b"0\r\n\r\n")


@pytest.fixture(params=[KeepsNoConnection, SendsChunks])
def server_kind(request: pytest.FixtureRequest) -> type[BaseHTTPRequestHandler]:
    kind: type[BaseHTTPRequestHandler] = request.param
    return kind


@pytest.fixture
def closing(server_kind: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    """The port of a server that answers in pieces."""
    with ThreadingHTTPServer(("127.0.0.1", 0), server_kind) as listener:
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield listener.server_address[1]
        listener.shutdown()
        thread.join()


def test_a_body_that_comes_after_its_headers(cluster: Cluster, closing: int) -> None:
    status, content = asker(cluster, closing)("POST", "/v1/completions", {}, 10)
    assert (status, content.count(b"[DONE]")) == (200, 100)


def test_an_answer_in_pieces(cluster: Cluster, closing: int) -> None:
    serve = cluster.serve.model_copy(update={"port": closing})
    stream = endpoint.streamer(cluster.model_copy(update={"serve": serve}))
    assert list(stream("/v1/completions", {}, 10)) == [b"data: {}\n", b"data: [DONE]\n"] * 100


def test_nothing_listens_there(cluster: Cluster) -> None:
    port = free_port()
    with pytest.raises(Silent) as caught:
        check_answers(asker(cluster, port), "tiny")
    assert str(caught.value) == f"head: /health: nothing listens on 127.0.0.1:{port}"


def test_a_completion_that_hangs(cluster: Cluster) -> None:
    with serving(HEALTHY | {"/v1/completions": HANG}) as stuck, pytest.raises(Silent) as caught:
        check_answers(asker(cluster, stuck.port), "tiny", timeout=0.3)
    assert str(caught.value) == "head: /v1/completions: no answer within 0.3 s"


def alone(node: Sshd, tmp_path: Path, login_key: Path) -> Cluster:
    known = tmp_path / "known_hosts_of_one"
    known.write_text(node.known)
    return spec(node.place("head"), None, known_hosts=known, key_file=login_key)


def test_a_head_that_is_gone_is_not_a_server_that_is_silent(
    start: Start, tmp_path: Path, login_key: Path, server: Server
) -> None:
    node = start()
    ask = asker(alone(node, tmp_path, login_key), server.port)
    assert check_answers(ask, "tiny").tokens == 4
    node.stop()
    with pytest.raises(NodeUnreachable):
        check_answers(ask, "tiny")


def test_a_head_without_tunnels_says_which_setting(
    start: Start, tmp_path: Path, login_key: Path, server: Server
) -> None:
    node = start("AllowTcpForwarding no")
    ask = asker(alone(node, tmp_path, login_key), server.port)
    with pytest.raises(LoginRefused) as caught:
        check_answers(ask, "tiny")
    assert "Set AllowTcpForwarding yes" in caught.value.remedy
