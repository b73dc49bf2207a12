"""Scheduled runs that are no longer wanted: too late, or superseded by a newer success."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.context import FlowRunContext
from prefect.states import Completed

from tasks.converge import log

LATEST = timedelta(hours=1)
SUCCESSES = ("Changed", "Unchanged")  # Not Planned or Skipped: those did nothing.
RETRY = "AwaitingRetry"  # The state in which Retry puts a run.


def skipped() -> State[Any] | None:
    """The final state of the flow run that we are in, if it is to do nothing."""
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    if run is None or not run.auto_scheduled or run.expected_start_time is None:
        return None
    reason = _reason(run, _plain(run.expected_start_time))
    return Completed(name="Skipped", message=reason) if reason else None


def is_of_its_schedule(run: FlowRun, history: Iterable[str]) -> bool:
    """Whether its schedule alone started it; a person who retries it wants it to run."""
    return run.auto_scheduled and run.run_count <= 1 and RETRY not in history


def reason_to_skip(due: datetime, now: datetime, newest: datetime | None) -> str:
    """Why a run that was due then does nothing now; empty where it is to run.

    `newest` is when the newest deploy of this cluster that was fine has ended.
    """
    if now - due > LATEST:
        late = int((now - due).total_seconds() // 60)
        return (
            f"skipped: due at {_shown(due)}, it starts {late // 60} h {late % 60:02} min late, and "
            "the limit is 1 h. Retry runs it all the same."
        )
    if newest and newest > due:
        return (
            f"skipped: due at {_shown(due)}, and a deploy that ended at {_shown(newest)} was fine. "
            "Retry runs it all the same."
        )
    return ""


def newest_success(runs: Iterable[FlowRun], cluster: object) -> datetime | None:
    """When the newest deploy of a cluster that was fine has ended."""
    ends = [
        run.end_time
        for run in runs
        if run.parameters.get("cluster") == cluster
        and run.state_name in SUCCESSES
        and run.end_time is not None
    ]
    return _plain(max(ends)) if ends else None


def _reason(run: FlowRun, due: datetime) -> str:
    # A server that is away is no reason: where all is as wanted, running changes nothing.
    try:
        with get_client(sync_client=True) as client:
            history = [str(state.name) for state in client.read_flow_run_states(run.id)]
            if not is_of_its_schedule(run, history):
                return ""
            fine = client.read_flow_runs(
                flow_filter=FlowFilter(name=FlowFilterName(any_=["deploy"])),
                flow_run_filter=FlowRunFilter(
                    state=FlowRunFilterState(
                        type=FlowRunFilterStateType(any_=[StateType.COMPLETED])
                    ),
                    end_time=FlowRunFilterEndTime(after_=due),
                ),
            )
    except Exception as error:  # Whatever the API client raises.
        log.warning("whether this run is still wanted could not be asked: %s", error)
        return ""
    newest = newest_success(fine, run.parameters.get("cluster"))
    return reason_to_skip(due, datetime.now(UTC), newest)


def _plain(moment: datetime) -> datetime:
    # Prefect's own kind of time is on its way out, with a warning at each use.
    return datetime.fromtimestamp(moment.timestamp(), UTC)


def _shown(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
