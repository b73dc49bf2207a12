"""Flow runs of deploy/on-demand on a Prefect server, as its API tells of them."""

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import Artifact, FlowRun, TaskRun
from prefect.states import Scheduled

from tests.lab.prefect_processes import Processes
from tests.lab.product import poll

ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


@dataclass(frozen=True)
class Attempt:
    """How one attempt of a flow run went."""

    number: int
    state: str
    message: str
    seconds: float
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

    def start(self, **parameters: Any) -> UUID:
        deployment = self.client.read_deployment_by_name("deploy/on-demand")
        run = self.client.create_flow_run_from_deployment(
            deployment.id, parameters=parameters, state=Scheduled()
        )
        return run.id

    def read(self, run: UUID) -> FlowRun:
        return self.client.read_flow_run(run)

    def ended(self, run: UUID, attempt: int = 1, timeout: float = 180) -> Attempt:
        """That attempt, once it has ended."""

        def look() -> FlowRun | None:
            found = self.read(run)
            over = found.state is not None and found.state.type.value in ENDED
            return found if over and found.run_count >= attempt else None

        found = poll(look, timeout, every=0.3)
        assert found is not None and found.state is not None
        # The states of task runs reach the server by events, some of them after the run's own.
        tasks = poll(lambda: self._final_tasks(run, attempt), every=0.3)
        return Attempt(
            number=found.run_count,
            state=found.state.name or "",
            message=found.state.message or "",
            seconds=_seconds(found),
            steps={each.name: each.state_name or "" for each in tasks},
            step_seconds={each.name: each.total_run_time.total_seconds() for each in tasks},
        )

    def tasks(self, run: UUID, attempt: int) -> list[TaskRun]:
        mine = FlowRunFilter(id=FlowRunFilterId(any_=[run]))
        found = self.client.read_task_runs(flow_run_filter=mine)
        of_attempt = [each for each in found if each.flow_run_run_count == attempt]
        return sorted(of_attempt, key=lambda each: str(each.start_time or each.created))

    def artifacts(self, run: UUID) -> dict[str, Artifact]:
        """The artifacts of a run, by key; of several with one key the latest."""
        said = self.client._client.post("/artifacts/filter", json={"flow_runs": {"id": {"any_": [str(run)]}}, "sort": "CREATED_DESC"})
        found = [Artifact.model_validate(each) for each in said.json()]
        return {str(each.key): each for each in reversed(found)}

    def _final_tasks(self, run: UUID, attempt: int) -> list[TaskRun]:
        found = self.tasks(run, attempt)
        final = all(each.state is not None and each.state.is_final() for each in found)
        return found if final else []


def _seconds(run: FlowRun) -> float:
    """Of the last attempt alone."""
    assert run.state is not None and run.start_time is not None
    return run.total_run_time.total_seconds()
