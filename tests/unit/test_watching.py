"""The watch: what a look sees, and what a row of them leads to."""

import json
from typing import Any

import pytest

from tasks.containers import BOOT_LABEL, DIGEST_LABEL, Container
from tasks.endpoint import Ask
from tasks.watching import (
    Action,
    Look,
    Watched,
    ask_server,
    container_problems,
    judge,
    parse_watched,
)
from tests.unit.releases import release

BAD = Look(problems=("the server does not answer",))
BUSY = Look(problems=("worker1 cannot be reached",), busy=True, tokens=7)


def looks(*seen: Look, failures: int = 3) -> list[Action]:
    """What follows from each of a row of looks."""
    state, actions = Watched(), []
    for look in seen:
        state, action = judge(state, look, failures)
        actions.append(action)
    return actions


@pytest.mark.parametrize(
    ("seen", "actions"),
    [
        pytest.param([Look()] * 4, ["none"] * 4, id="well"),
        pytest.param([BAD, BAD, BAD], ["wait", "wait", "restart"], id="three in a row"),
        pytest.param(
            [BAD, BAD, Look(), BAD, BAD],
            ["wait", "wait", "none", "wait", "wait"],
            id="not in a row",
        ),
        pytest.param([BUSY] * 9, ["none"] * 9, id="a busy server is never restarted"),
        pytest.param(
            [BAD, BAD, BUSY, BAD], ["wait", "wait", "none", "restart"], id="busy in between"
        ),
        pytest.param(
            [BAD] * 8,
            ["wait", "wait", "restart", "wait", "wait", "give up", "wait", "wait"],
            id="one restart, then the breaker",
        ),
        pytest.param(
            [BAD] * 3 + [Look()] + [BAD] * 3,
            ["wait", "wait", "restart", "none", "wait", "wait", "restart"],
            id="a restart that helped is forgotten",
        ),
    ],
)
def test_judge(seen: list[Look], actions: list[Action]) -> None:
    assert looks(*seen) == actions


def test_one_failure_may_be_enough() -> None:
    assert looks(BAD, BAD, failures=1) == ["restart", "give up"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"failures": "x"}'])
def test_a_state_that_cannot_be_read_begins_anew(text: str) -> None:
    assert parse_watched(text) == Watched()


def server(running: int, tokens: int, status: int = 200) -> Ask:
    asked: list[str] = []

    def ask(_method: str, path: str, _body: Any, _timeout: float) -> tuple[int, bytes]:
        asked.append(path)
        if path == "/metrics":
            text = f'vllm:num_requests_running{{engine="0"}} {running}\n'
            return 200, f"{text}vllm:generation_tokens_total {tokens}\n".encode()
        assert not running, "a busy server is asked for nothing"
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": "tiny"}]}).encode()
        said = {"choices": [{"text": " x"}], "usage": {"completion_tokens": 4}}
        return (status if path == "/v1/completions" else 200), json.dumps(said).encode()

    return ask


STUCK = "requests run, but no token has come out since the last look"


@pytest.mark.parametrize(
    ("ask", "before", "look"),
    [
        pytest.param(server(0, 5), None, Look(), id="idle, and it answers"),
        pytest.param(
            server(0, 5, status=500),
            None,
            Look(problems=("the server does not answer: a completion: HTTP 500",)),
            id="idle, and it does not",
        ),
        pytest.param(server(2, 50), None, Look(busy=True, tokens=50), id="busy, seen first"),
        pytest.param(server(2, 50), 40, Look(busy=True, tokens=50), id="busy, and gets on"),
        pytest.param(
            server(2, 50), 50, Look(problems=(STUCK,), tokens=50), id="busy, and stands still"
        ),
    ],
)
def test_the_server(ask: Ask, before: int | None, look: Look) -> None:
    assert ask_server(ask, "tiny", before, []) == look


RELEASE = release()
RAY = "sparkrail-sparks-ray"
# The record is of boot-1, as the release was first deployed in it.
BROUGHT_BACK = {DIGEST_LABEL: RELEASE.containers["worker1"][0].digest, BOOT_LABEL: "boot-2"}


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        pytest.param({}, (), id="as recorded"),
        pytest.param({"state": "exited"}, (f"{RAY} on worker1 is exited",), id="ended"),
        pytest.param(
            {"labels": {}}, (f"{RAY} on worker1 is another than the recorded one",), id="another"
        ),
        pytest.param({"labels": BROUGHT_BACK}, (), id="brought back since the node was rebooted"),
        pytest.param(
            {"labels": BROUGHT_BACK | {BOOT_LABEL: "boot-1"}},
            ("worker1 was rebooted",),
            id="started in another boot",
        ),
    ],
)
def test_containers(changes: dict[str, Any], problems: tuple[str, ...]) -> None:
    [spec] = RELEASE.containers["worker1"]
    labels = {DIGEST_LABEL: spec.digest}
    fields: dict[str, Any] = {"id": "1", "name": RAY, "state": "running", "labels": labels}
    have = {RAY: Container(**fields | changes)}
    assert container_problems(RELEASE, "worker1", have, "boot-2") == problems


def test_a_container_that_is_gone() -> None:
    assert container_problems(RELEASE, "worker1", {}, "boot-1") == (f"{RAY} on worker1 is gone",)
