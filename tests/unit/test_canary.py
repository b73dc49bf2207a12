"""The canary: what is measured, and from when on a server counts as slower."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from blocks import Canary
from tasks import endpoint
from tasks.canary import answered, best, measure, regressions, slower
from tasks.errors import NotReady
from tasks.records import Figures
from tests.unit.specs import spec

CANARY = Canary(tokens=64, slower_percent=30)
LAST = Figures(seconds=1.0, tokens_per_second=20)  # 3.2 s for the longer one.


@pytest.mark.parametrize(
    ("now", "slower"),
    [
        pytest.param(LAST, [], id="the same"),
        pytest.param(Figures(seconds=0.5, tokens_per_second=40), [], id="faster"),
        pytest.param(Figures(seconds=1.29, tokens_per_second=15.5), [], id="within the limit"),
        pytest.param(
            Figures(seconds=1.4, tokens_per_second=20),
            ["a short completion takes 1.40 s, with the last good release 1.00 s"],
            id="a longer latency",
        ),
        pytest.param(
            Figures(seconds=1.0, tokens_per_second=15),
            ["15.0 tokens/s, with the last good release 20.0"],
            id="fewer tokens",
        ),
    ],
)
def test_regressions(now: Figures, slower: list[str]) -> None:
    assert regressions(CANARY, now, LAST) == slower


def test_without_a_release_before_nothing_is_slower() -> None:
    assert regressions(CANARY, Figures(seconds=99, tokens_per_second=0.1), None) == []


def test_what_nobody_notices_is_noise() -> None:
    fast = Figures(seconds=0.01, tokens_per_second=2000)
    assert regressions(CANARY, Figures(seconds=0.1, tokens_per_second=500), fast) == []


def test_the_best_of_all_looks_counts() -> None:
    looks = [Figures(seconds=2, tokens_per_second=9), Figures(seconds=1, tokens_per_second=8)]
    assert best(looks) == Figures(seconds=1, tokens_per_second=9)


def answering(tokens: Iterator[int], bodies: list[Any]) -> endpoint.Ask:
    def ask(_method: str, _path: str, body: Any, _timeout: float) -> tuple[int, bytes]:
        bodies.append(body)
        said = {"choices": [{"text": " x"}], "usage": {"completion_tokens": next(tokens)}}
        return 200, json.dumps(said).encode()

    return ask


def test_a_short_completion_and_one_of_as_many_tokens_as_the_spec_says() -> None:
    bodies: list[Any] = []
    clock = itertools.count(0.0, 2.0).__next__
    found = measure(answering(iter([4, 64]), bodies), spec(), clock)
    assert found == Figures(seconds=2, tokens_per_second=32)
    assert [(each["max_tokens"], each.get("ignore_eos")) for each in bodies] == [
        (4, None),
        (64, True),
    ]


def test_a_longer_completion_has_longer() -> None:
    """A server of 20 tokens/s needs 205 s for these."""
    timeouts: list[float] = []

    def ask(_method: str, _path: str, body: Any, timeout: float) -> tuple[int, bytes]:
        timeouts.append(timeout)
        said = {"choices": [{"text": " x"}], "usage": {"completion_tokens": body["max_tokens"]}}
        return 200, json.dumps(said).encode()

    measure(ask, spec(canary={"tokens": 4096}))
    assert timeouts == [60, 4096]


def test_an_answer_without_tokens_is_none() -> None:
    with pytest.raises(NotReady, match="without tokens"):
        measure(answering(iter([4, 0]), []), spec())


def silent() -> Figures:
    raise endpoint.Silent("a completion: no answer within 60 s", details="TimeoutError")


def counting(running: int, *tokens: int) -> endpoint.Ask:
    """Its counters, as they are one look after another."""
    made = iter(tokens)

    def ask(_method: str, _path: str, _body: Any, _timeout: float) -> tuple[int, bytes]:
        text = f"vllm:num_requests_running {running}\nvllm:generation_tokens_total {next(made)}\n"
        return 200, text.encode()

    return ask


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(counting(0, 5, 9, 9), id="nobody else is served"),
        pytest.param(counting(2, 5, 5, 5), id="its queue stands still"),
    ],
)
def test_a_server_that_stops_answering(ask: endpoint.Ask) -> None:
    with pytest.raises(NotReady) as caught:
        answered(silent, ask, spec().head, "a while later")
    assert str(caught.value) == (
        "head: canary: the server does not answer (a while later): "
        "a completion: no answer within 60 s\nTimeoutError"
    )


def test_a_server_that_works_for_others_is_none_that_failed() -> None:
    """Else clients who come back at once would have a good release rolled back."""
    assert answered(silent, counting(2, 5, 9, 9), spec().head, "the first completions") is None
    slow = Figures(seconds=9, tokens_per_second=1)
    assert slower(CANARY, [None, None], LAST) == []
    assert slower(CANARY, [None, LAST], LAST) == []
    assert len(slower(CANARY, [None, slow], LAST)) == 2
