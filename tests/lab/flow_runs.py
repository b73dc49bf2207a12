"""Flow runs of deploy/on-demand on a Prefect server, as its API tells of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import Artifact, FlowRun, State, StateType, TaskRun
from prefect.client.schemas.sorting import ArtifactSort, FlowRunSort
from prefect.states import Cancelling, Scheduled

from tests.lab.prefect_processes import Processes
from tests.lab.product import poll

ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


@dataclass(frozen=True)
class Attempt:
    """How one attempt of a flow run went."""

    number: int
    state: str
    message: str
    # From Running to the end, and from the start or the retry to the end.
    seconds: float
    with_start: float
    # Such as {"worker join on worker1": "Changed"}, in the order of their starts.
    steps: dict[str, str]
    step_seconds: dict[str, float]

    @property
    def changed(self) -> list[str]:
        return [name for name, state in self.steps.items() if state != "Unchanged"]


class FlowRuns:
    """The flow runs of one server."""

    def __init__(self, prefect: Processes) -> None:
        self.client = SyncPrefectClient(f"{prefect.ui}/api")

    def close(self) -> None:
        self.client._client.close()

    def start(
        self, name: str = "deploy/on-demand", *, tags: Sequence[str] = (), **parameters: Any
    ) -> UUID:
        deployment = self.client.read_deployment_by_name(name)
        run = self.client.create_flow_run_from_deployment(
            deployment.id, parameters=parameters, state=Scheduled(), tags=tags
        )
        return run.id

    def read(self, run: UUID) -> FlowRun:
        return self.client.read_flow_run(run)

    def newest(self) -> FlowRun:
        [found] = self.client.read_flow_runs(sort=FlowRunSort.EXPECTED_START_TIME_DESC, limit=1)
        return found

    def message(self, run: UUID) -> str:
        state = self.read(run).state
        return (state.message or "") if state else ""

    def is_final(self, run: UUID) -> bool:
        state = self.read(run).state
        return state is not None and state.is_final()

    def cancel(self, run: UUID) -> None:
        """As the Prefect UI does it."""
        self.client.set_flow_run_state(run, Cancelling())

    def set_state(self, run: UUID, kind: StateType) -> None:
        """As a person or an automation does it, whatever the run itself says."""
        self.client.set_flow_run_state(run, State(type=kind), force=True)

    def ended(self, run: UUID, attempt: int = 1, timeout: float = 300) -> Attempt:
        """That attempt, once it has ended."""

        def look() -> FlowRun | None:
            found = self.read(run)
            state = found.state.type.value if found.state else ""
            assert state != "CRASHED", f"the run crashed: {found.state}"
            return found if state in ENDED and found.run_count >= attempt else None

        found = poll(look, timeout, every=0.3)
        assert found is not None and found.state is not None
        # The states of task runs reach the server by events, some of them after the run's own.
        tasks = poll(lambda: self._final_tasks(run, attempt), every=0.3)
        return Attempt(
            number=found.run_count,
            state=found.state.name or "",
            message=found.state.message or "",
            **self._times(run),
            steps={each.name: each.state_name or "" for each in tasks},
            step_seconds={each.name: each.total_run_time.total_seconds() for each in tasks},
        )

    def tasks(self, run: UUID, attempt: int) -> list[TaskRun]:
        mine = FlowRunFilter(id=FlowRunFilterId(any_=[run]))
        found = self.client.read_task_runs(flow_run_filter=mine)
        of_attempt = [each for each in found if each.flow_run_run_count == attempt]
        return sorted(of_attempt, key=lambda each: str(each.start_time or each.created))

    def artifacts(self, run: UUID) -> dict[str, Any]:
        """What a run's artifacts show, by key; of several with one key the latest."""
        return {key: each.data for key, each in self.whole_artifacts(run).items()}

    def whole_artifacts(self, run: UUID) -> dict[str, Artifact]:
        found = self.client.read_artifacts(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run])),
            sort=ArtifactSort.CREATED_DESC,
        )
        return {str(each.key): each for each in reversed(found)}

    def _final_tasks(self, run: UUID, attempt: int) -> list[TaskRun]:
        found = self.tasks(run, attempt)
        final = all(each.state is not None and each.state.is_final() for each in found)
        return found if final else []

    def _times(self, run: UUID) -> dict[str, float]:
        """Of the last attempt alone."""
        states = self.client.read_flow_run_states(run)
        asked = max(each.timestamp for each in states if each.type.value == "SCHEDULED")
        running = max(each.timestamp for each in states if each.type.value == "RUNNING")
        ended = max(each.timestamp for each in states)
        return {
            "seconds": (ended - running).total_seconds(),
            "with_start": (ended - asked).total_seconds(),
        }
