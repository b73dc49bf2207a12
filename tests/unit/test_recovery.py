"""What follows when a release fails from `stop` on: in which order, and how the run ends.

The steps themselves are stood in for: what each does on real nodes is for the lab's trials.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from blocks import Cluster, Node
from flows import recovery
from flows.recovery import (
    Good,
    kept_alive_when_refused,
    restored_on_failure,
    rolled_back_on_failure,
    start_all,
)
from flows.steps import Silent, Steps, StepsFailed, conduct
from tasks import remote
from tasks.converge import Outcome, Run, Status, step
from tasks.errors import FailedBefore, NodeUnreachable, NotReady
from tasks.records import Release
from tasks.releases import Decision
from tasks.report import Report
from tests.unit.releases import release, wanted
from tests.unit.specs import DOCUMENT, RUN, merged, spec

OLD = release(spec(serve={"port": 8001}))
NEW = wanted(spec())
RAY, SERVE = "sparkrail-sparks-ray", "sparkrail-sparks-serve"
DOWN = Decision(start={"head": (SERVE, RAY), "worker1": (RAY,)}, reasons=("it is exited",))
SERVER_DOWN = Decision(start={"head": (SERVE,)}, reasons=("it is exited",))

Failing = Callable[[str, int], bool]


class Stage:
    """Stands in for the steps; which of them fails, and how often it was done, decides a test."""

    def __init__(self, failing: Failing) -> None:
        self.failing = failing
        self.done: list[str] = []
        self.asked: dict[str, int] = {}
        self.noted: list[Any] = []
        self.restarts: dict[str, str] = {}  # What each step was told of restarts, at last.
        self.asked_as: list[str] = []  # With the key of which releases.
        self.decision = Decision()
        self.ray_is_right = False
        self.ran_before = False  # Ray, when it was to be started.
        self.retryable = True
        self.recorded = False  # Whether a release has answered before.

    def stand_in(self, name: str) -> Any:
        @step(name)
        def made(cluster: Cluster, node: Node, run: Run, **more: Any) -> Outcome:
            self.restarts[name] = run.restart
            self.asked[name] = self.asked.get(name, 0) + (node.name == "head")
            told = f"{name} of all but {more['keep']}" if more.get("keep") else name
            self.done.append(f"{told} on {node.name}:{cluster.serve.port}")
            if "failed" in more:
                self.noted.append(more["failed"])
            if self.failing(name, self.asked[name]):
                error = NotReady(f"{name} number {self.asked[name]} failed", node=node.name)
                error.retryable = self.retryable
                raise error
            data: Any = {"decide": self.decision, "releases": self.recorded}.get(name, {})
            ran = self.ran_before and name in ("start", "join")
            status: Status = "unchanged" if ran else "changed"
            return Outcome(step=name, node=node.name, status=status, data=data)

        return made


STEPS = {
    "clear": "clear",
    "restore_files": "rollback",
    "clean_residue": "cleanup",
    "start_head": "start",
    "join_worker": "join",
    "verify_cluster": "verify",
    "stop_old": "stop",
    "serve": "serve",
    "note_failure": "note",
    "start_again": "restore",
    "decide": "decide",
    "recorded": "releases",
}


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Failing], Stage]]:
    def make(failing: Failing) -> Stage:
        stage = Stage(failing)
        for attribute, name in STEPS.items():
            monkeypatch.setattr(recovery, attribute, stage.stand_in(name))
        monkeypatch.setattr(recovery, "ON_RAY", ("serve",))
        monkeypatch.setattr(
            recovery, "ask_as", lambda _, release: stage.asked_as.append(release.digest)
        )
        monkeypatch.setattr(recovery, "observe_containers", lambda _: {})
        monkeypatch.setattr(recovery, "has_ray_of", lambda *_: stage.ray_is_right)
        return stage

    remote.STOP.clear()
    yield make
    remote.STOP.clear()


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "sparks.yaml"
    file.write_text(yaml.safe_dump(merged(DOCUMENT, {"residue": {"restore": True}})))
    return str(file)


def good(cluster: Cluster) -> Good:
    return Good(OLD, OLD.cluster(cluster), dict(OLD.containers))


def deploy(path: str, *, first: bool = False, digest: str = "new") -> Report:
    """From the stop on, as a deploy does it."""

    def body(steps: Steps) -> None:
        last = None if first else good(steps.cluster)
        steps.stops()
        with restored_on_failure(steps), rolled_back_on_failure(steps, last, digest):
            start_all(steps, NEW.nodes)

    return conduct(path, body)


START = ["cleanup on head", "cleanup on worker1", "start on head", "join on worker1"]
WHOLE = [*START, "verify on head", "serve on head"]
CLEAR = ["clear on head:8000", "clear on worker1:8000"]
BACK = ["rollback on head", "rollback on worker1"]


def at(port: int, *steps: str) -> list[str]:
    return sorted(f"{each}:{port}" for each in steps)


def fails(name: str, *times: int) -> Failing:
    return lambda asked, number: asked == name and number in times


@pytest.mark.parametrize("failing", ["cleanup", "start", "join", "verify", "serve"])
def test_whatever_fails_the_last_good_release_is_started_once(
    staged: Callable[[Failing], Stage], path: str, failing: str
) -> None:
    number = 0 if failing == "join" else 1
    tried: list[int] = []

    def once(name: str, asked: int) -> bool:
        if name != failing or (asked != number and name != "join") or tried:
            return False
        tried.append(asked)
        return True

    stage = staged(once)
    report = deploy(path)
    assert (report.state, report.outcome, report.exit_code) == ("failed", "rolled-back", 1)
    assert report.error
    assert report.error.startswith(f"{failing} on ")
    assert f"Rolled back: release {OLD.title} answers again." in report.error
    at_old = [each for each in stage.done if each.endswith(":8001")]
    assert sorted(at_old) == at(8001, *BACK, *WHOLE)
    assert stage.done.index("clear on head:8000") < stage.done.index("rollback on head:8001")
    [failed] = stage.noted
    assert (failed.digest, failed.ending) == ("new", "rolled-back")
    assert failed.cause.startswith(f"{failing} on ")
    # A release of ours needs the memory of what was stopped for it.
    assert "restore on head:8000" not in stage.done
    assert report.outage_seconds is not None
    assert report.endpoint == "http://10.88.0.1:8001/v1"


BUT_RAY = [f"clear of all but {RAY} on head:8000", f"clear of all but {RAY} on worker1:8000"]


@pytest.mark.parametrize(
    ("failing", "cleared"),
    [
        pytest.param(fails("serve", 1), BUT_RAY, id="the server: Ray stays"),
        pytest.param(fails("verify", 1), CLEAR, id="Ray itself"),
    ],
)
def test_a_ray_that_is_as_it_was_stays(
    staged: Callable[[Failing], Stage], path: str, failing: Failing, cleared: list[str]
) -> None:
    stage = staged(failing)
    stage.ray_is_right = True
    assert deploy(path).outcome == "rolled-back"
    assert [each for each in stage.done if each.startswith("clear")] == cleared


def test_a_ray_that_ran_before_and_is_not_what_it_seemed_is_started_anew(
    staged: Callable[[Failing], Stage], path: str
) -> None:
    """Before anything is rolled back."""
    stage = staged(fails("verify", 1))
    stage.ran_before = True
    report = deploy(path)
    assert (report.state, report.outcome) == ("completed", "changed")
    at = stage.done.index("verify on head:8000")
    again = ["stop on head", "stop on worker1", "start on head", "join on worker1"]
    assert stage.done[at + 1 :] == [
        f"{each}:8000" for each in [*again, "verify on head", "serve on head"]
    ]


@pytest.mark.parametrize(
    ("ran_before", "retryable", "times", "anew"),
    [
        pytest.param(True, True, (1, 2), 1, id="in vain"),
        pytest.param(False, True, (1,), 0, id="it has just been"),
        pytest.param(True, False, (1,), 0, id="it would not help"),
    ],
)
def test_a_ray_is_started_anew_once_and_only_if_that_may_help(
    staged: Callable[[Failing], Stage],
    path: str,
    ran_before: bool,
    retryable: bool,
    times: tuple[int, ...],
    anew: int,
) -> None:
    stage = staged(fails("verify", *times))
    stage.ran_before, stage.retryable = ran_before, retryable
    assert deploy(path).outcome == "rolled-back"
    assert stage.done.count("stop on head:8000") == anew


def test_a_server_that_fails_again_is_not_tried_a_third_time(
    staged: Callable[[Failing], Stage], path: str
) -> None:
    stage = staged(fails("serve", 1, 2))
    stage.ray_is_right = True
    assert deploy(path).outcome == "broken"
    assert [each for each in stage.done if each.startswith("clear")] == [*BUT_RAY, *CLEAR]
    assert stage.asked["serve"] == 2


def test_when_the_rollback_fails_too_all_is_stopped_and_both_causes_are_told(
    staged: Callable[[Failing], Stage], path: str
) -> None:
    stage = staged(fails("serve", 1, 2))
    report = deploy(path)
    assert (report.state, report.outcome) == ("failed", "broken")
    assert report.error
    assert report.error.splitlines()[0] == "serve on head: serve number 1 failed"
    assert report.error.splitlines()[-1] == "serve on head: serve number 2 failed"
    assert f"The rollback to release {OLD.title} failed, too" in report.error
    assert stage.done.count("clear on head:8000") == 2
    assert stage.asked["serve"] == 2
    [failed] = stage.noted
    assert failed.ending == "broken"
    assert (failed.cause, failed.second) == (
        "serve on head: serve number 1 failed",
        "serve on head: serve number 2 failed",
    )
    # Nothing of ours needs the memory: those that were stopped for it run again.
    assert stage.done[-2:] == ["restore on head:8000", "restore on worker1:8000"]
    assert report.outage_seconds is None


def test_the_first_deploy_clears_away_what_it_started(
    staged: Callable[[Failing], Stage], path: str
) -> None:
    stage = staged(fails("serve", 1))
    report = deploy(path, first=True)
    assert (report.state, report.outcome) == ("failed", "changed")
    assert report.error
    assert "There is no release to go back to" in report.error
    assert [each for each in stage.done if "clear" in each or "rollback" in each] == CLEAR
    assert stage.noted == []


def test_what_leaves_nothing_to_go_back_to_is_not_tried_again_by_itself(
    staged: Callable[[Failing], Stage], path: str
) -> None:
    """A release is on record, and cannot be started again: its files or its image are gone."""
    stage = staged(fails("serve", 1))
    stage.recorded = True
    report = deploy(path, first=True)
    assert (report.state, report.outcome) == ("failed", "broken")
    assert [each for each in stage.done if "clear" in each or "rollback" in each] == CLEAR
    assert [each.ending for each in stage.noted] == ["broken"]


def test_the_same_release_that_came_back_is_not_held_against_it(
    staged: Callable[[Failing], Stage], path: str
) -> None:
    stage = staged(fails("serve", 1))
    assert deploy(path, digest=OLD.digest).outcome == "rolled-back"
    assert stage.noted == []


def test_a_run_that_is_cancelled_touches_nothing_any_more(
    staged: Callable[[Failing], Stage], path: str
) -> None:
    def cancelled(name: str, _number: int) -> bool:
        if name == "serve":
            remote.cancel()
        return name == "serve"

    stage = staged(cancelled)
    report = deploy(path)
    assert (report.state, report.outcome) == ("failed", "changed")
    assert stage.done[-1] == "serve on head:8000"


def test_a_mistake_of_ours_is_rolled_back_too(
    staged: Callable[[Failing], Stage], path: str
) -> None:
    stage = staged(lambda _name, _number: False)

    def body(steps: Steps) -> None:
        with rolled_back_on_failure(steps, good(steps.cluster), "new"):
            raise KeyError("a mistake")

    report = conduct(path, body)
    assert (report.outcome, len(stage.noted)) == ("rolled-back", 1)
    assert report.error
    assert report.error.startswith("deploy on head: KeyError: 'a mistake'")


# --- whether there is a release to go back to -----------------------------------------------------


def last(monkeypatch: pytest.MonkeyPatch, now: Cluster, dead: str) -> Good | None:
    """What `last_good` says where one node of the recorded release cannot be reached."""

    @step("releases")
    def recorded(cluster: Cluster, node: Node, run: Run) -> Outcome:  # noqa: ARG001
        return Outcome(step="releases", node=node.name, status="unchanged", data=[release()])

    @step("hold")
    def hold(cluster: Cluster, node: Node, run: Run, release: Release) -> Outcome:  # noqa: ARG001
        if node.name == dead:
            raise NodeUnreachable("no route to host", node=node.name)
        data = {"found_as": "engine:1", "boot": "b", "why": ""}
        return Outcome(step="hold", node=node.name, status="unchanged", data=data)

    monkeypatch.setattr(recovery, "recorded", recorded)
    monkeypatch.setattr(recovery, "hold_release", hold)
    remote.STOP.clear()
    return recovery.last_good(Steps(now, RUN, Silent(), pace=0.0))


def test_a_dead_node_that_has_left_the_spec_keeps_no_release_from_being_deployed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = spec(workers=[], serve={"tensor_parallel": 1})
    assert last(monkeypatch, alone, dead="worker1") is None
    found = last(monkeypatch, alone, dead="")
    assert found
    assert found.release == release()


def test_a_node_of_the_spec_that_is_away_ends_the_run_before_the_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(StepsFailed, match="hold on worker1: no route to host"):
        last(monkeypatch, spec(), dead="worker1")


# --- a release that is not tried again ------------------------------------------------------------


def refused(path: str, error: FailedBefore, monkeypatch: pytest.MonkeyPatch) -> Report:
    @step("breaker")
    def refuse(cluster: Cluster, node: Node, run: Run) -> Outcome:  # noqa: ARG001
        raise error

    monkeypatch.setattr(recovery, "last_good", lambda steps: good(steps.cluster))

    def body(steps: Steps) -> None:
        with kept_alive_when_refused(steps):
            steps.one(refuse)

    return conduct(path, body, restart="always")


@pytest.mark.parametrize(
    ("decision", "failing", "outcome", "told", "cleared"),
    [
        pytest.param(Decision(), (), "changed", "", [], id="it runs: nothing is touched"),
        pytest.param(
            DOWN, (), "rolled-back", "had stopped, and was started again.", CLEAR, id="healed"
        ),
        pytest.param(
            SERVER_DOWN, (), "rolled-back", "was started again.", BUT_RAY, id="its server alone"
        ),
        pytest.param(
            DOWN, (1,), "broken", "could not be started again.", CLEAR * 2, id="not to be healed"
        ),
    ],
)
def test_the_last_good_release_is_healed_meanwhile(
    staged: Callable[[Failing], Stage],
    path: str,
    monkeypatch: pytest.MonkeyPatch,
    decision: Decision,
    failing: tuple[int, ...],
    outcome: str,
    told: str,
    cleared: list[str],
) -> None:
    stage = staged(fails("serve", *failing))
    stage.decision = decision
    report = refused(path, FailedBefore("release new is not tried again"), monkeypatch)
    assert (report.state, report.outcome) == ("failed", outcome)
    assert report.error
    assert report.error.startswith("breaker on head: release new is not tried again")
    assert told in report.error
    assert [each for each in stage.done if each.startswith("clear")] == cleared
    assert stage.asked_as == [OLD.digest]
    # One that could not be healed is not tried each night and by the watch for ever.
    assert [(each.digest, each.ending) for each in stage.noted] == [
        (OLD.digest, "broken") for _ in failing
    ]
    assert stage.restarts["decide"] == "if-changed"


def test_what_was_broken_stays_stopped(
    staged: Callable[[Failing], Stage], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = staged(lambda _name, _number: False)
    error = FailedBefore("release new is not tried again")
    error.heals = False
    assert refused(path, error, monkeypatch).state == "failed"
    assert stage.done == []
