"""Questions to the server: a right answer is one real completion, and nothing less."""

import http.client
import json
import socket
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from blocks import Node
from tasks import endpoint
from tasks.endpoint import Answer, Ask, Silent, check_answers, complete
from tasks.errors import NodeUnreachable
from tests.unit.http_server import (
    COMPLETION,
    DROP,
    HANG,
    HEALTHY,
    MODELS,
    Raw,
    Replies,
    serving,
)
from tests.unit.specs import spec


def direct(port: int) -> Ask:
    """A question without the tunnel, by the standard library."""

    def ask(method: str, path: str, body: Any, timeout: float) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    return ask


def test_a_right_answer() -> None:
    with serving(HEALTHY) as server:
        answer = check_answers(direct(server.port), "tiny")
    assert (answer.text, answer.tokens) == (" jumps over", 4)
    assert [(path, body) for path, body, _ in server.asked] == [
        ("/health", None),
        ("/v1/models", None),
        ("/metrics", None),
        (
            "/v1/completions",
            {
                "model": "tiny",
                "prompt": "The quick brown fox",
                "max_tokens": 4,
                "temperature": 0,
                "seed": 0,
            },
        ),
    ]


ENGINE_DEAD = {"error": {"message": "EngineCore encountered an issue.", "code": 500}}
NO_TOKENS = COMPLETION | {"choices": [], "usage": {"completion_tokens": 0}}


@pytest.mark.parametrize(
    ("replies", "said"),
    [
        pytest.param({}, '/health: HTTP 404\n{"detail": "Not Found"}', id="not vLLM"),
        pytest.param(HEALTHY | {"/health": (503, b"")}, "/health: HTTP 503", id="not healthy"),
        pytest.param(
            HEALTHY | {"/v1/models": (401, {"error": "Unauthorized"})},
            '/v1/models: HTTP 401\n{"error": "Unauthorized"}',
            id="another API key",
        ),
        pytest.param(
            HEALTHY | {"/v1/models": (200, {"data": [{"id": "a"}, {"id": "b"}]})},
            "wanted tiny, serving a, b",
            id="other served names",
        ),
        pytest.param(
            HEALTHY | {"/v1/models": (200, {"data": []})},
            "wanted tiny, serving nothing",
            id="no served name",
        ),
        pytest.param(
            HEALTHY | {"/v1/completions": (500, ENGINE_DEAD)},
            "a completion: HTTP 500\n"
            '{"error": {"message": "EngineCore encountered an issue.", "code": 500}}',
            id="healthy, and every completion fails",
        ),
        pytest.param(
            HEALTHY | {"/v1/completions": (200, b"<html>")},
            "a completion: not what an OpenAI server answers\n<html>",
            id="no JSON",
        ),
        pytest.param(
            HEALTHY | {"/v1/completions": (200, ["a"])},
            'a completion: not what an OpenAI server answers\n["a"]',
            id="another JSON",
        ),
        pytest.param(
            HEALTHY | {"/v1/models": (200, {"data": None})},
            '/v1/models: not what an OpenAI server answers\n{"data": null}',
            id="JSON with nothing in it",
        ),
        pytest.param(
            HEALTHY | {"/v1/completions": (200, NO_TOKENS)},
            "a completion came back without tokens",
            id="no tokens",
        ),
        pytest.param(
            HEALTHY | {"/v1/completions": (200, COMPLETION | {"usage": {}})},
            "a completion came back without tokens",
            id="no count of tokens",
        ),
    ],
)
def test_other_answers_say_what_is_wrong(replies: Replies, said: str) -> None:
    with serving(replies) as server, pytest.raises(Silent) as caught:
        check_answers(direct(server.port), "tiny")
    assert str(caught.value) == said


def counting(*counts: int) -> Callable[[], tuple[int, bytes]]:
    """What /metrics says, one look after the other, as vLLM writes it."""
    left = list(counts)

    def reply() -> tuple[int, bytes]:
        count = left.pop(0) if len(left) > 1 else left[0]
        return 200, (
            "# HELP vllm:generation_tokens_total Number of generation tokens processed.\n"
            "# TYPE vllm:generation_tokens_total counter\n"
            f'vllm:generation_tokens_total{{engine="0",model_name="tiny"}} {count}.0\n'
            'vllm:generation_tokens_total{engine="1",model_name="tiny"} 1.5e+06\n'
        ).encode()

    return reply


@pytest.mark.parametrize(
    ("counts", "tokens"),
    [
        pytest.param((100, 162), 62, id="it completes for others"),
        pytest.param((100, 100), None, id="it completes for nobody"),
        pytest.param((), None, id="it does not count"),
        pytest.param(None, None, id="its counters hang"),
    ],
)
@pytest.mark.parametrize("reply", [HANG, (503, b"overloaded")], ids=["late", "refused"])
@pytest.mark.usefixtures("head")
def test_a_busy_server_is_told_from_one_that_is_stuck(
    counts: tuple[int, ...] | None, tokens: int | None, reply: Any
) -> None:
    metrics = HANG if counts is None else counting(*counts) if counts else (404, b"")
    with serving(HEALTHY | {"/v1/completions": reply, "/metrics": metrics}) as server:
        ask = impatient(asker(server.port))
        if tokens is None:
            with pytest.raises(Silent) as caught:
                check_answers(ask, "tiny")
            assert caught.value.stage == "completion"
            return
        answer = check_answers(ask, "tiny")
    assert (answer.busy, answer.tokens, answer.text) == (True, tokens, "")
    assert answer.told.startswith("is busy: 62 tokens for others in ")


def impatient(ask: Ask) -> Ask:
    return lambda method, path, body, _timeout: ask(method, path, body, 0.3)


def test_a_completion_tells_how_long_it_took() -> None:
    ticks = count(10.0, 1.5)
    with serving(HEALTHY) as server:
        answer = complete(direct(server.port), "tiny", clock=lambda: next(ticks))
    assert answer == Answer(text=" jumps over", tokens=4, seconds=1.5)
    assert answer.told == "answers ' jumps over' in 1.50 s"


def test_a_long_page_is_shown_in_part() -> None:
    replies = HEALTHY | {"/health": (500, b"x" * 9000)}
    with serving(replies) as server, pytest.raises(Silent) as caught:
        check_answers(direct(server.port), "tiny")
    assert caught.value.details == "x" * 500


# --- through a node -----------------------------------------------------------------------------


class Head:
    """A node whose tunnels are plain sockets."""

    alive = True

    def __init__(self, node: Node) -> None:
        self.node = node
        self.ran: list[tuple[str, ...]] = []

    def open_tunnel(self, host: str, port: int, timeout: float) -> socket.socket:
        try:
            return socket.create_connection((host, port), timeout)
        except ConnectionRefusedError as error:
            raise NodeUnreachable(f"no connection to {host}:{port}", node="head") from error

    def run(self, argv: tuple[str, ...], *, timeout: float) -> None:
        self.ran.append(argv)
        if not self.alive:
            raise NodeUnreachable(f"no answer within {timeout:g} s", node="head")


Asker = Callable[..., Ask]


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[Head]:
    found = Head(spec().head)
    monkeypatch.setattr(endpoint, "connect", lambda _cluster, _node: found)
    yield found


def asker(port: int, **changes: Any) -> Ask:
    return endpoint.asker(spec(serve={"port": port}, **changes), api_key="sk-1")


@pytest.mark.usefixtures("head")
def test_through_the_head_s_tunnel_with_the_api_key() -> None:
    with serving(HEALTHY) as server:
        answer = check_answers(asker(server.port), "tiny")
    assert answer.tokens == 4
    headers = [headers["Authorization"] for _, _, headers in server.asked]
    assert headers == ["Bearer sk-1"] * 4


def test_nothing_listens(head: Head) -> None:
    with serving({}) as server:
        port = server.port
    with pytest.raises(Silent) as caught:
        check_answers(asker(port), "tiny")
    assert str(caught.value) == f"head: /health: nothing listens on 127.0.0.1:{port}"
    head.alive = False
    with pytest.raises(NodeUnreachable):
        check_answers(asker(port), "tiny")


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        pytest.param(
            HANG, "head: /v1/completions: no answer within 0.3 s", id="a hanging completion"
        ),
        pytest.param(
            DROP,
            "head: /v1/completions: Remote end closed connection without response",
            id="closed without an answer",
        ),
    ],
)
def test_a_server_that_does_not_answer(head: Head, reply: str, said: str) -> None:
    """Whether the server or the node is silent is found out by asking the node."""
    with serving(HEALTHY | {"/v1/completions": reply}) as server:
        with pytest.raises(Silent) as caught:
            check_answers(asker(server.port), "tiny", timeout=0.3)
        assert (str(caught.value), head.ran) == (said, [("true",)])
        head.alive = False
        with pytest.raises(NodeUnreachable, match="no answer within 30 s"):
            check_answers(asker(server.port), "tiny", timeout=0.3)


WHOLE = json.dumps(COMPLETION).encode()
CHUNK = b"%x\r\n%s\r\n"


def cut(headers: bytes, body: bytes) -> Raw:
    return Raw(b"HTTP/1.1 200 OK\r\n%s\r\n%s" % (headers, body))


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        pytest.param(
            cut(b"Connection: close\r\nContent-Length: %d\r\n" % len(WHOLE), WHOLE[:-20]),
            "/v1/completions: IncompleteRead",
            id="fewer bytes than said",
        ),
        pytest.param(
            cut(b"Content-Length: %d\r\n" % (len(WHOLE) + 1), WHOLE),
            "/v1/completions: IncompleteRead",
            id="whole JSON, and yet a byte less than said",
        ),
        pytest.param(
            cut(b"Connection: close\r\n", WHOLE[:-20]),
            "a completion: not what an OpenAI server answers",
            id="JSON cut off, no length said",
        ),
        pytest.param(
            cut(b"Transfer-Encoding: chunked\r\n", CHUNK % (len(WHOLE), WHOLE)),
            "/v1/completions: IncompleteRead",
            id="the last chunk is missing",
        ),
        pytest.param(
            cut(b"Connection: close\r\nContent-Length: 0\r\n", b""),
            "a completion: not what an OpenAI server answers",
            id="nothing at all",
        ),
    ],
)
@pytest.mark.usefixtures("head")
def test_a_completion_that_is_cut_short_is_none(reply: Raw, said: str) -> None:
    with (
        serving(HEALTHY | {"/v1/completions": reply}) as server,
        pytest.raises(Silent) as caught,
    ):
        check_answers(asker(server.port), "tiny")
    assert caught.value.stage == "completion"
    assert caught.value.brief.startswith(said)


@pytest.mark.usefixtures("head")
def test_a_whole_completion_without_a_length_is_one() -> None:
    reply = cut(b"Connection: close\r\n", WHOLE)
    with serving(HEALTHY | {"/v1/completions": reply}) as server:
        assert check_answers(asker(server.port), "tiny").tokens == 4


def test_models_and_completions_have_the_shape_that_vllm_gives() -> None:
    assert endpoint.Models.model_validate(MODELS).data[0].id == "tiny"
    assert endpoint.Completion.model_validate(COMPLETION).usage.completion_tokens == 4
