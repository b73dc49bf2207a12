"""Scheduled runs that are late or superseded, as a Prefect server schedules them."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.responses import DeploymentResponse
from prefect.flow_engine import run_flow
from prefect.states import Completed, Failed, Scheduled

from flows.deploy import deploy
from tests.flows.clusters import Spec

EVERY_FIVE_MINUTES = {"cron": "*/5 * * * *", "timezone": "Etc/UTC"}
WENT_ON = "no such file"  # What a run says that was not skipped: its spec is gone.
MakeNightly = Callable[[str], DeploymentResponse]


@pytest.fixture
def client(prefect_server: None) -> Iterator[SyncPrefectClient]:  # noqa: ARG001
    """Of the harness: a process that runs flows sends all its events to one server."""
    with get_client(sync_client=True) as made:
        yield made


@pytest.fixture
def nightly(client: SyncPrefectClient, tmp_path: Path) -> MakeNightly:
    """The nightly deployment of a cluster of that name."""

    def register(name: str) -> DeploymentResponse:
        spec = Spec(tmp_path, name)
        made = spec.register(EVERY_FIVE_MINUTES)
        spec.path.unlink()
        full_name = next(each.name for each in made.objects if each.kind == "schedule")
        found = client.read_deployment_by_name(full_name)
        client.pause_deployment(found.id)  # No run but those that a test asks for.
        return found

    return register


def scheduled(client: SyncPrefectClient, deployment: DeploymentResponse, due: datetime) -> FlowRun:
    """The run that the schedule makes for the five minutes before that moment."""
    asked = {
        "start_time": (due - timedelta(minutes=5)).isoformat(),
        "end_time": due.isoformat(),
        "max_runs": 1,
    }
    client.resume_deployment(deployment.id)
    client.request(
        "POST", "/deployments/{id}/schedule", path_params={"id": deployment.id}, json=asked
    )
    client.pause_deployment(deployment.id)
    runs = client.read_flow_runs(
        deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[deployment.id]))
    )
    made = [run for run in runs if run.expected_start_time and run.expected_start_time <= due]
    assert len(made) == 1
    assert made[0].auto_scheduled
    return made[0]


def run(client: SyncPrefectClient, made: FlowRun) -> State[Any]:
    fresh = client.read_flow_run(made.id)
    state: Any = run_flow(deploy, flow_run=fresh, parameters=fresh.parameters, return_type="state")
    assert isinstance(state, State)
    return state


def test_a_run_that_starts_late_does_nothing_until_a_person_retries_it(
    client: SyncPrefectClient, nightly: MakeNightly
) -> None:
    late = scheduled(client, nightly("late"), datetime.now(UTC) - timedelta(hours=3))
    state = run(client, late)
    assert (state.type.value, state.name) == ("COMPLETED", "Skipped")
    assert state.message and "it starts 3 h 0" in state.message
    assert state.message.endswith("the limit is 1 h. Retry runs it all the same.")
    assert client.read_flow_run(late.id).state_name == "Skipped"

    client.set_flow_run_state(late.id, Scheduled(name="AwaitingRetry"), force=True)
    again = run(client, late)
    assert again.message and WENT_ON in again.message


def test_a_run_that_had_never_begun_is_not_skipped_when_retried(
    client: SyncPrefectClient, nightly: MakeNightly
) -> None:
    late = scheduled(client, nightly("crashed"), datetime.now(UTC) - timedelta(hours=3))
    client.set_flow_run_state(late.id, Failed(name="Crashed"), force=True)
    client.set_flow_run_state(late.id, Scheduled(name="AwaitingRetry"), force=True)
    state = run(client, late)
    assert client.read_flow_run(late.id).run_count == 1
    assert state.message and WENT_ON in state.message


@pytest.mark.parametrize(
    ("name", "of", "skipped"),
    [
        pytest.param("Changed", "superseded", True, id="a deploy that was fine"),
        pytest.param("Planned", "planned", False, id="a dry run"),
        pytest.param("Changed", "lonely", False, id="another cluster's deploy"),
    ],
)
def test_a_newer_success_supersedes_it(
    client: SyncPrefectClient, nightly: MakeNightly, name: str, of: str, skipped: bool
) -> None:
    deployment = nightly(of)
    due = scheduled(client, deployment, datetime.now(UTC) - timedelta(minutes=10))

    @flow(name="deploy")
    def other() -> None:
        """Another way to run it."""

    parameters = deployment.parameters if of != "lonely" else {"cluster": "another"}
    newer = client.create_flow_run(other, parameters=parameters)
    client.set_flow_run_state(newer.id, Completed(name=name), force=True)

    state = run(client, due)
    assert (state.name == "Skipped") is skipped
    assert state.message
    assert ("and a deploy that ended at" if skipped else WENT_ON) in state.message


def test_a_run_on_demand_is_never_skipped(client: SyncPrefectClient, nightly: MakeNightly) -> None:
    deployment = nightly("asked-for")
    long_ago: State[Any] = Scheduled(scheduled_time=datetime.now(UTC) - timedelta(hours=3))
    made = client.create_flow_run_from_deployment(deployment.id, state=long_ago)
    state = run(client, made)
    assert state.message and WENT_ON in state.message
