"""Steps as Prefect task runs: what a person sees of them in the UI."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml
from prefect import flow
from prefect.artifacts import Artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import State, TaskRun

from flows.cli import _through_prefect
from flows.runners import call
from flows.steps import Steps, as_state, conduct
from tasks import remote
from tasks.errors import CommandFailed, NodeUnreachable
from tasks.report import Report
from tests.ssh.sshd import poll
from tests.unit.specs import DOCUMENT, merged, workers
from tests.unit.steps import carry, changed, lift, lifts, planned, raising, unchanged
from tests.unit.test_steps import Flaky

pytestmark = [
    pytest.mark.usefixtures("prefect_server"),
    # Prefect leaves sockets of its clients to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]
LOST = NodeUnreachable("connection lost", node="head")


@pytest.fixture(autouse=True)
def not_cancelled() -> Iterator[None]:
    remote.STOP.clear()
    yield
    remote.STOP.clear()


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "sparks.yaml"
    file.write_text(yaml.safe_dump(merged(DOCUMENT, workers(2))))
    return str(file)


Body = Callable[[Steps], Any]


def made(body: Body) -> Any:
    """A flow with this body, as those of the product are made."""

    @flow(name="lifting", persist_result=False)
    def lifting(cluster: str) -> Any:
        return as_state(conduct(cluster, body))

    return lifting


def run(path: str, body: Body) -> State[Any]:
    state: State[Any] = made(body)(cluster=path, return_state=True)
    return state


def task_runs(state: State[Any]) -> dict[str, TaskRun]:
    flow_run: UUID | None = state.state_details.flow_run_id
    assert flow_run is not None
    with get_client(sync_client=True) as client:
        found = client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run]))
        )
    return {each.name: each for each in found}


def assert_states(state: State[Any], expected: dict[str, str]) -> None:
    """The server hears of task runs by events, some moments later."""

    def found() -> dict[str, str | None]:
        return {name: each.state_name for name, each in sorted(task_runs(state).items())}

    with contextlib.suppress(AssertionError):
        poll(lambda: found() == expected, "the states arrive")
    assert found() == expected


def test_states_show_what_came_of_each_step(path: str) -> None:
    state = run(path, lambda steps: steps.all(lifts(steps.cluster, unchanged, changed, planned)))
    assert (state.type.value, state.name) == ("COMPLETED", "Changed")
    assert state.message is not None
    assert state.message.startswith("sparks: changed in ")
    expected = {
        "lift on head": "Unchanged",
        "lift on worker1": "Changed",
        "lift on worker2": "Planned",
    }
    assert_states(state, expected)


def test_what_a_step_found_reaches_the_next(path: str) -> None:
    found = []

    def body(steps: Steps) -> None:
        found.append(steps.one(lift, do=unchanged).data)
        found.append(steps.run.id)

    state = run(path, body)
    flow_run = str(state.state_details.flow_run_id)
    assert found == [{"of": "it"}, flow_run]


def test_the_flow_fails_when_any_step_fails_and_names_all_that_did(path: str) -> None:
    def body(steps: Steps) -> None:
        head, first, second = steps.cluster.nodes
        steps.all(
            [
                call(lift, node=head, do=changed),
                call(lift, node=first, do=raising(CommandFailed("exit code 1", node="worker1"))),
                call(carry, node=second, do=raising(ZeroDivisionError("division by zero"))),
            ]
        )
        pytest.fail("nothing may follow")

    state = run(path, body)
    assert (state.type.value, state.message) == (
        "FAILED",
        "lift on worker1: exit code 1\ncarry on worker2: ZeroDivisionError: division by zero",
    )
    expected = {
        "carry on worker2": "Failed",
        "lift on head": "Changed",
        "lift on worker1": "Failed",
    }
    assert_states(state, expected)


def test_a_failure_of_the_last_step_is_a_failure_of_the_flow(path: str) -> None:
    state = run(path, lambda steps: steps.one(lift, do=raising(CommandFailed("no", node="head"))))
    assert (state.type.value, state.message) == ("FAILED", "lift on head: no")


def test_only_a_failed_connection_is_tried_again(path: str) -> None:
    at_once = lift.with_options(retry_delay_seconds=0)
    lost, failed = Flaky(LOST, 2), Flaky(CommandFailed("exit code 1", node="worker1"), 1)

    def body(steps: Steps) -> None:
        head, worker, _ = steps.cluster.nodes
        steps.all([call(at_once, node=head, do=lost), call(at_once, node=worker, do=failed)])

    state = run(path, body)
    assert (lost.tried, failed.tried) == (3, 1)
    assert state.message == "lift on worker1: exit code 1"
    assert_states(state, {"lift on head": "Changed", "lift on worker1": "Failed"})
    assert task_runs(state)["lift on head"].run_count == 3


@pytest.mark.parametrize(
    ("body", "code"),
    [
        pytest.param(lambda steps: steps.one(lift, do=changed), 0, id="completed"),
        pytest.param(
            lambda steps: steps.one(lift, do=raising(CommandFailed("no", node="head"))),
            1,
            id="failed",
        ),
    ],
)
def test_the_command_line_gets_the_report(path: str, body: Body, code: int) -> None:
    report = _through_prefect(made(body), path, {})
    assert isinstance(report, Report)
    assert (report.exit_code, len(report.steps)) == (code, 1)


def test_the_report_is_an_artifact_of_the_run(path: str) -> None:
    run(path, lambda steps: steps.one(lift, do=changed))
    artifact = Artifact.get("report-sparks")
    assert artifact is not None and not hasattr(artifact, "__await__")
    assert str(artifact.data).startswith("# sparks: completed, changed\n")
