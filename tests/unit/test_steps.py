"""Steps as plain calls, without a Prefect API; and the report of a run, whatever happened."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from prefect.client.schemas.objects import FlowRun

from blocks import Node
from flows import steps as running
from flows.runners import THREADS, Threads, call
from flows.steps import UNATTENDED, Steps, StepsFailed, conduct, is_attended
from tasks import hidden, locks, remote
from tasks.converge import Status
from tasks.engines import no_engine
from tasks.errors import (
    Cancelled,
    CommandFailed,
    Locked,
    NodeUnreachable,
    NotOurs,
    PreflightFailed,
)
from tasks.preflight import Problem
from tasks.report import Report, Row
from tests.unit.specs import DOCUMENT, RUN, merged, spec, workers
from tests.unit.steps import carry, changed, lift, lifts, planned, raising, unchanged

CLUSTER = spec(**workers(2))
HEAD, W1, W2 = CLUSTER.nodes


class Watcher:
    """Writes down what is shown while steps run."""

    def __init__(self, on_end: Callable[[Row], object] = lambda _row: None) -> None:
        self.began_: list[tuple[str, str]] = []
        self.rows: list[Row] = []
        self._on_end = on_end

    def began(self, step: str, node: str) -> None:
        self.began_.append((step, node))

    def ended(self, row: Row) -> None:
        self.rows.append(row)
        self._on_end(row)

    def finished(self, report: Report) -> None:
        """Nothing to write down."""


def steps(watcher: Watcher | None = None) -> Steps:
    return Steps(CLUSTER, RUN, watcher or Watcher(), pace=0)


@pytest.fixture(autouse=True)
def not_cancelled() -> Iterator[None]:
    remote.STOP.clear()
    yield
    remote.STOP.clear()


def shown(rows: list[Row]) -> list[tuple[str, str, str, str]]:
    return [(row.step, row.node, row.outcome, row.detail) for row in rows]


def test_outcomes_come_in_the_order_of_the_calls() -> None:
    run = steps()
    found = run.all(lifts(CLUSTER, unchanged, changed, planned))
    assert [(each.node, each.status) for each in found] == [
        ("head", "unchanged"),
        ("worker1", "changed"),
        ("worker2", "planned"),
    ]
    assert shown(run.rows) == [
        ("lift", "head", "unchanged", "by hand"),
        ("lift", "worker1", "changed", "by hand"),
        ("lift", "worker2", "planned", "by hand"),
    ]


def test_one_step_runs_on_the_head() -> None:
    run = steps()
    assert run.one(lift, do=changed).node == "head"
    assert run.one(lift, do=changed, node=W1).node == "worker1"


def test_no_steps_are_no_trouble() -> None:
    assert steps().all([]) == []


def test_each_step_is_shown_when_it_ends_and_not_when_the_last_one_does() -> None:
    first_was_shown = threading.Event()

    def slow(_node: Node) -> Status:
        assert first_was_shown.wait(10)
        return "changed"

    watcher = Watcher(on_end=lambda _row: first_was_shown.set())
    run = steps(watcher)
    run.all(lifts(CLUSTER, slow, unchanged, slow))
    assert watcher.began_ == [("lift", "head"), ("lift", "worker1"), ("lift", "worker2")]
    assert watcher.rows[0].node == "worker1"
    assert [row.node for row in run.rows] == ["head", "worker1", "worker2"]


def test_all_are_waited_for_and_all_that_failed_are_named() -> None:
    ended = []

    def last(node: Node) -> Status:
        ended.append(node.name)
        return "changed"

    denied = CommandFailed(
        "exit code 1: docker load", node="worker1", details="no space left", remedy="Make room."
    )
    run = steps()
    with pytest.raises(StepsFailed) as caught:
        run.all(
            [
                call(lift, node=HEAD, do=raising(ZeroDivisionError("division by zero"))),
                call(lift, node=W1, do=raising(denied)),
                call(carry, node=W2, do=raising(NotOurs("its gateway refuses", node="head"))),
                call(carry, node=W1, do=last),
            ]
        )
    assert str(caught.value) == (
        "lift on head: ZeroDivisionError: division by zero\n"
        "lift on worker1: exit code 1: docker load\n"
        "no space left\n"
        "Make room.\n"
        "carry on worker2: head: its gateway refuses"
    )
    assert isinstance(caught.value.first, ZeroDivisionError)
    assert ended == ["worker1"]
    assert [(row.node, row.outcome) for row in run.rows] == [
        ("head", "failed"),
        ("worker1", "failed"),
        ("worker2", "failed"),
        ("worker1", "changed"),
    ]


class Flaky:
    """Fails some times, and then does what it should."""

    def __init__(self, error: Exception, times: int) -> None:
        self.error, self.times, self.tried = error, times, 0

    def __call__(self, _node: Node) -> Status:
        self.tried += 1
        if self.tried <= self.times:
            raise self.error
        return "changed"


LOST = NodeUnreachable("connection lost", node="head")


@pytest.mark.parametrize(
    ("error", "times", "tried", "done"),
    [
        pytest.param(LOST, 1, 2, True, id="unreachable once"),
        pytest.param(LOST, 2, 3, True, id="unreachable twice"),
        pytest.param(LOST, 3, 3, False, id="unreachable for good"),
        pytest.param(no_engine(HEAD, "reset"), 1, 2, True, id="docker restarts"),
        pytest.param(CommandFailed("exit code 1", node="head"), 1, 1, False, id="failed"),
        pytest.param(ValueError("a mistake of ours"), 1, 1, False, id="broken"),
    ],
)
def test_only_what_may_pass_is_tried_again(
    error: Exception, times: int, tried: int, done: bool
) -> None:
    flaky = Flaky(error, times)
    run = steps()
    if done:
        assert run.one(lift, do=flaky).status == "changed"
    else:
        with pytest.raises(StepsFailed) as caught:
            run.one(lift, do=flaky)
        assert caught.value.first is error
    assert flaky.tried == tried


def test_nothing_is_tried_again_once_the_run_is_cancelled() -> None:
    flaky = Flaky(LOST, 1)

    def cut_off(node: Node) -> Status:
        remote.cancel()
        return flaky(node)

    with pytest.raises(StepsFailed):
        steps().one(lift, do=cut_off)
    assert flaky.tried == 1


def test_ctrl_c_stops_the_steps_and_waits_for_them() -> None:
    """Else they would go on while the next run already holds the lock."""
    ended = []
    all_began = threading.Barrier(3)

    def at_once(_node: Node) -> Status:
        all_began.wait(10)
        return "unchanged"

    def until_cancelled(node: Node) -> Status:
        all_began.wait(10)
        assert remote.STOP.wait(10)
        ended.append(node.name)
        raise Cancelled("cancelled during: rsync", node=node.name)

    def interrupt(_row: Row) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        steps(Watcher(interrupt)).all(lifts(CLUSTER, until_cancelled, at_once, until_cancelled))
    assert sorted(ended) == ["head", "worker2"]


def test_ctrl_c_does_not_wait_for_steps_that_never_began() -> None:
    began = threading.Event()

    def until_cancelled(_node: Node) -> Status:
        began.set()
        assert remote.STOP.wait(10)
        return "unchanged"

    runner = Threads(pace=0)
    calls = [call(lift, node=HEAD, do=until_cancelled) for _ in range(THREADS + 3)]
    futures = [runner.submit(each, {"cluster": CLUSTER, "run": RUN}) for each in calls]
    assert began.wait(10)
    remote.cancel()
    runner.wait(futures, 30)
    assert all(future.done() for future in futures)


# --- a whole run --------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> str:
    """The spec as a file."""
    file = tmp_path / "sparks.yaml"
    file.write_text(yaml.safe_dump(merged(DOCUMENT, workers(2))))
    return str(file)


def test_the_report_of_a_run(path: str) -> None:
    def body(run: Steps) -> None:
        assert os.environ["SPARKRAIL_RUN"] == f"sparks/{run.run.id}"
        assert (run.run.dry_run, run.run.restart) == (True, "always")
        run.endpoint = "http://10.88.0.1:8000/v1"
        run.all(lifts(run.cluster, unchanged, planned, unchanged))

    report = conduct(path, body, dry_run=True, restart="always")
    assert (report.cluster, report.state, report.outcome) == ("sparks", "completed", "planned")
    assert (report.endpoint, report.error, report.exit_code) == (
        "http://10.88.0.1:8000/v1",
        None,
        0,
    )
    assert [row.node for row in report.steps] == ["head", "worker1", "worker2"]


BLOCKED = Problem(node="head", check="disk", verdict="blocked", detail="full", remedy="Make room.")


def preflight_failed() -> PreflightFailed:
    error = PreflightFailed("preflight: blocked by 1 of 9 checks, on head")
    error.problems = [BLOCKED]
    return error


@pytest.mark.parametrize(
    ("error", "code", "problems"),
    [
        pytest.param(CommandFailed("exit code 1", node="head"), 1, (), id="a command failed"),
        pytest.param(preflight_failed(), 3, (BLOCKED,), id="preflight"),
        pytest.param(Locked("is worked on by run-2", node="head"), 4, (), id="locked"),
        pytest.param(Cancelled("cancelled", node="head"), 1, (), id="cancelled"),
        pytest.param(KeyError("a mistake of ours"), 1, (), id="a mistake of ours in a step"),
    ],
)
def test_the_exit_code_of_a_step_that_failed(
    error: Exception, code: int, problems: tuple[Problem, ...], path: str
) -> None:
    report = conduct(path, lambda run: void(run.one(lift, do=raising(error))))
    assert (report.state, report.exit_code, report.problems) == ("failed", code, problems)
    assert report.error is not None
    assert report.error.startswith("lift on head: ")
    assert [(row.step, row.outcome) for row in report.steps] == [("lift", "failed")]


def void(_value: object) -> None:
    """For a body that is one expression."""


def test_what_changed_before_a_failure_is_told(path: str) -> None:
    def body(run: Steps) -> None:
        run.one(lift, do=changed)
        run.one(carry, do=raising(CommandFailed("exit code 1", node="head")))

    report = conduct(path, body)
    assert (report.state, report.outcome) == ("failed", "changed")
    assert report.error == "carry on head: exit code 1"


def test_a_mistake_of_ours_between_steps_is_told_too(path: str) -> None:
    def body(run: Steps) -> None:
        run.one(lift, do=unchanged)
        raise AssertionError("preflight let it through")

    report = conduct(path, body)
    assert (report.state, report.exit_code) == ("failed", 1)
    assert report.error == "AssertionError: preflight let it through"
    assert len(report.steps) == 1


def test_a_mistake_of_ours_gives_no_secret_away(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden, "_values", set())
    hidden.hide(["sk-abcdef"])
    refused = ValueError("Invalid header value b'Bearer sk-abcdef\\n'")

    def body(run: Steps) -> None:
        if run.attempt([call(lift, node=run.cluster.head, do=raising(refused))]):
            raise ValueError("Bearer sk-abcdef")

    report = conduct(path, body)
    assert report.error == "ValueError: Bearer ***"
    assert report.steps[0].detail == "Invalid header value b'Bearer ***\\n'"


def test_an_invalid_spec_is_told_before_anything_runs(tmp_path: Path) -> None:
    name = str(tmp_path / "absent.yaml")
    report = conduct(name, lambda _run: pytest.fail("it must not begin"))
    assert (report.cluster, report.state, report.outcome) == (name, "failed", "unchanged")
    assert (report.exit_code, report.steps, report.endpoint) == (2, (), None)
    assert report.error


def test_ctrl_c_passes_through_and_cancels(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is released last: what was cancelled may still be ending what it runs."""
    order: list[tuple[str, bool]] = []
    release: Any = lambda _cluster: order.append(("released", remote.STOP.is_set()))  # noqa: E731
    monkeypatch.setattr(locks, "release_lock", release)

    def body(_run: Steps) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conduct(path, body)
    assert order == [("released", True)]


def test_the_run_id_differs_and_names_who() -> None:
    ids = {running._run_id() for _ in range(3)}
    assert len(ids) == 3
    assert "@" in running._who()


@pytest.mark.parametrize(
    ("run", "attended"),
    [
        pytest.param(None, True, id="the command line"),
        pytest.param(FlowRun(flow_id=uuid4()), True, id="a person, in the Prefect UI"),
        pytest.param(FlowRun(flow_id=uuid4(), auto_scheduled=True), False, id="a schedule"),
        pytest.param(FlowRun(flow_id=uuid4(), tags=[UNATTENDED]), False, id="the watch"),
    ],
)
def test_whether_a_person_started_it(run: FlowRun | None, attended: bool) -> None:
    assert is_attended(run) is attended
