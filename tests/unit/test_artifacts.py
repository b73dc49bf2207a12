"""The thread that publishes: it may lose what it is to publish, and never holds up a run."""

import logging
import threading
import time
from functools import partial

import pytest

from tasks import artifacts
from tasks.artifacts import Publisher


def test_all_subjects_in_their_order() -> None:
    publisher, published = Publisher(), list[str]()
    for subject in ("nodes", "endpoint", "report"):
        publisher.put(subject, partial(published.append, subject))
    assert publisher.drain(10)
    assert published == ["nodes", "endpoint", "report"]


def test_of_one_subject_the_latest_when_the_server_is_slow() -> None:
    publisher, published = Publisher(), list[int]()
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        go_on.wait(10)

    publisher.put("bar", slow)
    assert begun.wait(10)
    for percent in range(100):
        publisher.put("bar", partial(published.append, percent))
    go_on.set()
    assert publisher.drain(10)
    assert published == [99]


def test_a_server_that_hangs_holds_nobody_up() -> None:
    publisher, over = Publisher(), threading.Event()
    began = time.monotonic()
    publisher.put("bar", over.wait)
    publisher.put("report", over.wait)
    assert not publisher.drain(0.2)
    assert time.monotonic() - began < 2
    over.set()
    assert publisher.drain(10)


def test_what_fails_is_told_once_until_it_works_again(caplog: pytest.LogCaptureFixture) -> None:
    publisher, published = Publisher(), list[str]()

    def refused() -> None:
        raise ConnectionRefusedError("connection refused")

    with caplog.at_level(logging.WARNING, "sparkrail"):
        for subject, what in (
            ("bar", refused),
            ("nodes", refused),
            ("endpoint", lambda: published.append("endpoint")),
            ("report", refused),
        ):
            publisher.put(subject, what)
        assert publisher.drain(10)
    assert published == ["endpoint"]
    assert [record.getMessage() for record in caplog.records] == [
        "bar could not be published: connection refused",
        "report could not be published: connection refused",
    ]


def test_outside_prefect_nothing_is_published() -> None:
    published = list[str]()
    artifacts.publish("report", lambda: published.append("report"))
    artifacts.drain()
    assert published == []
