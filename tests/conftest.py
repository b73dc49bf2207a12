"""A limit of time for a whole run of tests, for machines that end one after so long."""

import os
import time

import pytest

BEGAN = time.monotonic()
LIMIT = "SPARKRAIL_TEST_SECONDS"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that would begin too late is left out, and said to be."""
    limit = os.environ.get(LIMIT)
    if limit and time.monotonic() - BEGAN > float(limit):
        pytest.skip(f"{item.name} would begin after the {limit} s of {LIMIT}")
