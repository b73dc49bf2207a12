"""How the flows run their steps: each in Prefect or, without a Prefect API, as plain calls."""

import getpass
import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from prefect import Task, states
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext, TagsContext
from prefect.runtime import flow_run

from blocks import Cluster
from flows.failed_runs import Ending, Recovered, RunFailed, StepsFailed, summary_of, told
from flows.outages import GRACE, CancelledByUser, to_its_end, wait_for_api
from flows.runners import Call, Result, Runner, TaskRuns, Threads, call
from flows.watch import Watch
from tasks import artifacts, hidden, locks, remote
from tasks.converge import Outcome, Run, log
from tasks.errors import InvalidSpec, Locked, PreflightFailed, SparkrailError
from tasks.inventory import load_cluster
from tasks.preflight import Problem
from tasks.report import Report, Row, outcome_of, publish
from tasks.secret_values import forget_keys
from tasks.standings import Standing

__all__ = [
    "LISTENER",
    "Call",
    "Listener",
    "Restart",
    "RunFailed",
    "Steps",
    "StepsFailed",
    "as_state",
    "call",
    "conduct",
    "named",
]

Restart = Literal["if-changed", "always"]
STATE_NAMES = {"rolled-back": "RolledBack", "broken": "Broken"}
UNATTENDED = "unattended"  # The tag of flow runs that no person has asked for.
EXIT_CODES: dict[type[BaseException], int] = {InvalidSpec: 2, PreflightFailed: 3, Locked: 4}


class Listener(Protocol):
    """Who wants to see steps begin and end while they run."""

    def began(self, step: str, node: str) -> None: ...

    def ended(self, row: Row) -> None: ...

    def finished(self, report: Report) -> None: ...


class Silent:
    """Nobody watches."""

    def began(self, step: str, node: str) -> None:
        """Nothing to show."""

    def ended(self, row: Row) -> None:
        """Nothing to show."""

    def finished(self, report: Report) -> None:
        """Nothing to show."""


# Set by the command line around a flow; a flow's own parameters must stay plain values.
LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


@dataclass
class Steps:
    """Runs steps and keeps what came of them."""

    cluster: Cluster
    run: Run
    listener: Listener
    rows: list[Row] = field(default_factory=list)
    problems: tuple[Problem, ...] = ()
    endpoint: str | None = None
    running: tuple[Standing, ...] | None = None
    outage: float | None = None
    chart: str = ""
    tables: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    pace: float = 1.0  # Of the pauses before a step is tried again; for tests.

    stopped: float | None = None  # When the old server was, by the monotonic clock.

    def on(self, cluster: Cluster) -> "Steps":
        """For steps on another spec of the same cluster; their rows stand among ours."""
        return self if cluster == self.cluster else replace(self, cluster=cluster)

    def stops(self) -> None:
        """From now on, the model does not answer."""
        self.stopped = self.stopped or time.monotonic()

    def answers(self) -> None:
        """The model answers again."""
        if self.stopped is not None:
            self.outage = time.monotonic() - self.stopped

    def one(self, task: Task[..., Outcome], **arguments: Any) -> Outcome:
        """Run one step on the head unless `node` says otherwise."""
        arguments.setdefault("node", self.cluster.head)
        return self.all([call(task, **arguments)])[0]

    def all(self, calls: Sequence[Call]) -> list[Outcome]:
        """Run steps side by side, wait for every one of them, then fail naming all that failed."""
        return outcomes(calls, self.attempt(calls))

    def attempt(self, calls: Sequence[Call]) -> list[Result]:
        """Run steps side by side and wait for every one; failures are results like others."""
        runner: Runner = TaskRuns() if FlowRunContext.get() else Threads(self.pace)
        started = time.monotonic()
        begun: dict[Any, int] = {}
        ended: dict[int, tuple[Row, Result]] = {}
        try:
            for place, each in enumerate(calls):
                self.listener.began(each.task.name, each.node)
                future = runner.submit(each, {"cluster": self.cluster, "run": self.run})
                begun[future] = place
            for future, result in runner.ended(list(begun)):
                place = begun[future]
                row = _row(calls[place], time.monotonic() - started, result)
                ended[place] = (row, result)
                self.listener.ended(row)
        except BaseException:
            # Ctrl-C, or a cancel from the Prefect UI: no step may go on once the lock is free.
            remote.cancel()
            runner.wait(list(begun), GRACE)
            raise
        in_order = [ended[place] for place in range(len(calls))]
        self.rows.extend(row for row, _ in in_order)
        return [result for _, result in in_order]


def outcomes(calls: Sequence[Call], results: Sequence[Result]) -> list[Outcome]:
    """What came of steps that were attempted; fails naming all that failed."""
    failures = [
        (each.task.name, each.node, result)
        for each, result in zip(calls, results, strict=True)
        if not isinstance(result, Outcome)
    ]
    if failures:
        raise StepsFailed(failures)
    return [result for result in results if isinstance(result, Outcome)]


def _row(each: Call, seconds: float, result: Result) -> Row:
    if isinstance(result, Outcome):
        return Row(
            step=result.step,
            node=result.node,
            outcome=result.status,
            seconds=result.seconds,
            detail=result.detail,
        )
    return Row(
        step=each.task.name,
        node=each.node,
        outcome="failed",
        seconds=seconds,
        detail=str(result),
    )


Body = Callable[[Steps], None]


def conduct(
    cluster: str,
    body: Body,
    *,
    dry_run: bool = False,
    restart: Restart = "if-changed",
    force: bool = False,
) -> Report:
    """Run a flow's body from spec to report; whatever happens, the report tells it."""
    started = time.monotonic()
    try:
        spec = load_cluster(cluster)
    except InvalidSpec as error:
        return _report(cluster, None, started, error)
    run = Run(
        id=_run_id(),
        who=_who(),
        dry_run=dry_run,
        restart=restart,
        force=force or _again(),
        attended=is_attended(_flow_run()),
    )
    os.environ[remote.RUN_VARIABLE] = f"{spec.name}/{run.id}"
    steps = Steps(spec, run, LISTENER.get() or Silent())
    artifacts.tag_run(f"cluster:{spec.name}")
    problem: BaseException | None = None
    try:
        # No tags on task runs that begin: for one that has any, Prefect asks its API about limits,
        # and while that is away no step could. They get theirs when they have begun.
        # The lock is freed last: what was cancelled may still be ending what it runs.
        with (
            TagsContext(),
            artifacts.lines_in_run(),
            locks.released_at_end(spec),
            remote.cancel_scope(),
            Watch() as watch,
        ):
            to_its_end(lambda: body(steps), watch.cancelled)
    except SparkrailError as error:
        problem = error
    except Exception as error:  # A mistake of ours: the report tells it, and the log tells where.
        hidden.clean(error)
        log.exception("%s: the flow itself failed", spec.name)
        problem = error
    finally:
        remote.disconnect()
        forget_keys()
    return _report(spec.name, steps, started, problem)


def _report(
    cluster: str, steps: Steps | None, started: float, error: BaseException | None
) -> Report:
    cause = error.first if isinstance(error, StepsFailed) else error
    problems = steps.problems if steps else ()
    if isinstance(cause, PreflightFailed):
        problems = tuple(getattr(cause, "problems", ())) or problems
    report = Report(
        cluster=cluster,
        state="failed" if error else "completed",
        outcome=_ending(error) or (outcome_of(steps.rows) if steps else "unchanged"),
        seconds=time.monotonic() - started,
        endpoint=steps.endpoint if steps else None,
        outage_seconds=steps.outage if steps else None,
        chart=steps.chart if steps else "",
        tables={name: tuple(rows) for name, rows in steps.tables.items()} if steps else {},
        steps=tuple(steps.rows) if steps else (),
        problems=problems,
        running=steps.running if steps else None,
        error=told(error),
        summary=summary_of(error),
        exit_code=_exit_code(cause),
        cancelled=isinstance(error, CancelledByUser),
    )
    wait_for_api()
    publish(report)
    (LISTENER.get() or Silent()).finished(report)
    return report


def _ending(error: BaseException | None) -> Ending | None:
    return error.ending if isinstance(error, Recovered) else None


def _exit_code(cause: BaseException | None) -> int:
    if cause is None:
        return 0
    return next((code for kind, code in EXIT_CODES.items() if isinstance(cause, kind)), 1)


def named(verb: str) -> Callable[[], str]:
    """A flow run's name; a spec that was given by its path is named like any other."""
    return lambda: f"{verb} {Path(flow_run.get_parameters()['cluster']).stem}"


def as_state(report: Report) -> Any:
    """The final state of a flow run: its message is what a person reads first in the UI."""
    if report.state == "failed":
        ended = states.Cancelled if report.cancelled else states.Failed
        # Its events have the name of the state: automations tell these from other failures.
        name = STATE_NAMES.get(report.outcome, ended.__name__)
        return ended(message=report.summary, data=RunFailed(report), name=name)
    return states.Completed(
        name=report.outcome.capitalize(),
        message=f"{report.cluster}: {report.outcome} in {report.seconds:.0f} s",
        data=report,
    )


def _run_id() -> str:
    # A retry from the UI goes on with the same flow run, and so keeps what it itself started. All
    # of the id: it begins with a time, and a schedule makes the runs of many nights at one time.
    return str(flow_run.get_root_flow_run_id() or uuid.uuid4())


def _again() -> bool:
    """Whether a person wants it: Retry, of a run that has failed."""
    run = _flow_run()
    return run is not None and run.run_count > 1


def _flow_run() -> FlowRun | None:
    context = FlowRunContext.get()
    return context.flow_run if context else None


def is_attended(run: FlowRun | None) -> bool:
    """Whether a person started it: Prefect knows what its schedules and our watch have started."""
    return run is None or not (run.auto_scheduled or UNATTENDED in run.tags)


def _who() -> str:
    return f"{getpass.getuser()}@{socket.gethostname()}"
