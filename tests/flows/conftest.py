"""A Prefect server for the flows, started once."""

import gc
import os
import warnings
from collections.abc import Iterator

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_LOGGING_TO_API_ENABLED,
    PREFECT_SERVER_ANALYTICS_ENABLED,
    temporary_settings,
)
from prefect.testing.utilities import prefect_test_harness

from tests.flows.clusters import Spec, outcomes
from tests.lab.prefect_processes import Processes

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


@pytest.fixture(scope="package")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """A Prefect server with the services that the harness leaves out; late runs are seen soon."""
    home = tmp_path_factory.mktemp("prefect")
    running = Processes(
        home,
        "none",
        # Of our own: a server of other tests on this machine, still starting, has no port yet.
        first_port=20000 + os.getpid() % 10000,
        PREFECT_SERVER_SERVICES_LATE_RUNS_LOOP_SECONDS="1",
        PREFECT_SERVER_SERVICES_LATE_RUNS_AFTER_SECONDS="1",
    )
    try:
        running.start_server()
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="package")
def first(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Spec:
    """The first cluster on the server; it makes what all of them share, and has the plain names."""
    spec = Spec(tmp_path_factory.mktemp("first"), "first")
    with temporary_settings({PREFECT_API_URL: f"{processes.ui}/api"}):
        assert outcomes(spec.register()) == {
            "block type ssh-credentials": "created",
            "block type engine-secrets": "created",
            "work pool sparkrail": "created",
            "deployment deploy/on-demand": "created",
            "deployment deploy/nightly": "created",
            "schedule deploy/nightly": "created",
            "deployment watch/every-few-minutes": "created",
            "schedule watch/every-few-minutes": "created",
            "automation sparkrail first: crashed": "created",
        }
    return spec


@pytest.fixture
def client(processes: Processes, first: Spec) -> Iterator[SyncPrefectClient]:  # noqa: ARG001
    """Everything in the test speaks to that server, and so does this."""
    settings = {**QUICK, PREFECT_API_URL: f"{processes.ui}/api"}
    with temporary_settings(settings), get_client(sync_client=True) as made:
        yield made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs a whole Prefect server process belongs to the longer trials."""
    for item in items:
        if "processes" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.extended)
