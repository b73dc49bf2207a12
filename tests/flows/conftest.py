"""A Prefect server for the flows, started once."""

import gc
import warnings
from collections.abc import Iterator

import pytest
from prefect.settings import (
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_LOGGING_TO_API_ENABLED,
    PREFECT_SERVER_ANALYTICS_ENABLED,
    temporary_settings,
)
from prefect.testing.utilities import prefect_test_harness

# A synchronous flow run waits a second for its heartbeat thread to end.
QUICK = {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None, PREFECT_LOGGING_TO_API_ENABLED: False}


@pytest.fixture(scope="package")
def prefect_server() -> Iterator[None]:
    with (
        pytest.MonkeyPatch.context() as environment,
        temporary_settings({PREFECT_SERVER_ANALYTICS_ENABLED: False}),
    ):
        environment.setenv("DO_NOT_TRACK", "1")
        with prefect_test_harness(server_startup_timeout=120), temporary_settings(QUICK):
            yield
    with warnings.catch_warnings():
        # Prefect leaves sockets of its clients to the garbage collector.
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
