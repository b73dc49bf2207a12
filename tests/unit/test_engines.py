"""Docker's engine on a node: waiting for one that restarts."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from blocks import Cluster, Node
from tasks import engines
from tasks.engines import await_engine, no_engine
from tasks.errors import NodeUnreachable, SparkrailError
from tests.unit.specs import spec

CLUSTER = spec()
HEAD = CLUSTER.head


class Engine:
    """Fails so many times, then answers."""

    def __init__(self, error: SparkrailError, times: int) -> None:
        self.error, self.left, self.asked = error, times, 0

    @contextlib.contextmanager
    def __call__(self, _cluster: Cluster, _node: Node) -> Iterator[Any]:
        yield SimpleNamespace(ping=self.ping)

    def ping(self) -> None:
        self.asked += 1
        if self.left:
            self.left -= 1
            raise self.error


def test_one_that_restarts_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "engine", away := Engine(no_engine(HEAD, "reset"), 1))
    await_engine(CLUSTER, HEAD)
    assert away.asked == 2


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(no_engine(HEAD, "refused"), id="for good"),
        pytest.param(NodeUnreachable("connection lost", node="head"), id="the node itself"),
    ],
)
def test_what_stays_away_is_told(error: SparkrailError, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "engine", Engine(error, 100))
    with pytest.raises(type(error)) as caught:
        await_engine(CLUSTER, HEAD, patience=0)
    assert caught.value is error
