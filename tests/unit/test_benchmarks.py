"""The benchmark: how answers are timed, and how their history is kept and drawn."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tasks.benchmarks import (
    PROMPTS,
    TOKENS,
    WAYS,
    Benchmark,
    ask,
    chart,
    measure,
    parse_history,
)
from tasks.endpoint import Silent, running_requests


def events(*documents: Any) -> list[bytes]:
    lines = [f"data: {json.dumps(each)}\n".encode() for each in documents]
    return [b": a comment\n", *(part for line in lines for part in (line, b"\n")), b"data: [DONE]"]


def text(words: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": words}]}


def ticking(step: float) -> Callable[[], float]:
    now = [0.0]

    def clock() -> float:
        now[0] += step
        return now[0]

    return clock


def test_one_request_is_timed_from_its_first_text_on() -> None:
    bodies: list[Any] = []

    def stream(path: str, body: Any, _timeout: float) -> Iterator[bytes]:
        bodies.append((path, body))
        yield from events(
            text(""), text(" a"), text(" b"), {"choices": [], "usage": {"completion_tokens": 7}}
        )

    reply = ask(stream, "tiny", "Hello", ticking(1.0))
    assert (reply.first_token, reply.seconds, reply.tokens) == (1.0, 2.0, 7)
    [(path, body)] = bodies
    assert path == "/v1/completions"
    assert (body["max_tokens"], body["stream"], body["ignore_eos"]) == (TOKENS, True, True)


def test_without_usage_the_pieces_count() -> None:
    reply = ask(lambda *_: iter(events(text(" a"), text(" b"))), "tiny", "Hello")
    assert reply.tokens == 2


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        pytest.param(events(), "without text", id="nothing"),
        pytest.param([b"data: {broken"], "not what an OpenAI server sends", id="no JSON"),
    ],
)
def test_an_answer_that_is_none(lines: list[bytes], said: str) -> None:
    with pytest.raises(Silent, match=said):
        ask(lambda *_: iter(lines), "tiny", "Hello")


def test_one_alone_then_eight_at_once() -> None:
    asked: list[str] = []

    def stream(_path: str, body: Any, _timeout: float) -> Iterator[bytes]:
        asked.append(body["prompt"])
        yield from events(text(" a"), {"choices": [], "usage": {"completion_tokens": 100}})

    found = measure(stream, "tiny")
    assert asked[:2] == [PROMPTS[0]] * 2
    assert sorted(asked[2:]) == sorted(PROMPTS)
    assert len(set(PROMPTS)) == WAYS
    assert found["eight"] > 0 and found["single"] > 0


def benchmark(at: str, single: float) -> Benchmark:
    return Benchmark(
        at=at,
        release="1234567890",
        single=single,
        eight=4 * single,
        first_token=0.25,
        first_token_of_eight=0.5,
    )


HISTORY = [benchmark("2026-11-29T04:00:00+0100", 20), benchmark("2026-11-30T04:00:00+0100", 10)]


def test_the_chart() -> None:
    assert chart(HISTORY[:2]).splitlines()[:3] == [
        "tokens/s, one request",
        f"  2026-11-29T04:00 123456 {'█' * 40} 20",
        f"  2026-11-30T04:00 123456 {'█' * 20} 10",
    ]
    assert chart([]).splitlines() == [
        "tokens/s, one request",
        "tokens/s, eight at once",
        "seconds to the first token",
    ]


@pytest.mark.parametrize(
    ("kept", "count"),
    [
        pytest.param("", 0, id="absent"),
        pytest.param("[", 0, id="cut off"),
        pytest.param("{}", 0, id="no list"),
        pytest.param(json.dumps([HISTORY[0].model_dump(), {"at": 7}]), 1, id="a row that is none"),
    ],
)
def test_the_history(kept: str, count: int) -> None:
    assert len(parse_history(kept)) == count


METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 3.0
vllm:generation_tokens_total{engine="0",model_name="tiny"} 1234.0
"""


@pytest.mark.parametrize(("status", "count"), [(200, 5), (404, 0)])
def test_running_requests(status: int, count: int) -> None:
    assert running_requests(lambda *_: (status, METRICS.encode())) == count
