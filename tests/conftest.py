"""What holds for all tests: a limit of time, and that Prefect hears of one file's flows in time."""

import os
import time
from collections.abc import Iterator

import pytest
from prefect.events.worker import EventsWorker

BEGAN = time.monotonic()
LIMIT = "SPARKRAIL_TEST_SECONDS"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that would begin too late is left out, and said to be."""
    limit = os.environ.get(LIMIT)
    if limit and time.monotonic() - BEGAN > float(limit):
        pytest.skip(f"{item.name} would begin after the {limit} s of {LIMIT}")


@pytest.fixture(scope="module", autouse=True)
def events_sent() -> Iterator[None]:
    """While the server of a file's tests is there.

    Prefect's worker for events knows the first server of a process alone: those of the next one
    would go to it, and at exit each would wait a minute for a server that is gone.
    """
    yield
    EventsWorker.drain_all(timeout=30)
