"""The loop that acts, the wait, and what makes a function a step."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.cache_policies import NO_CACHE
from prefect.states import Failed

from tasks import remote
from tasks.converge import (
    Gone,
    Outcome,
    Ready,
    Waiting,
    as_state,
    converge,
    step,
    wait_until,
)
from tasks.errors import (
    Cancelled,
    CommandFailed,
    EngineSilent,
    NodeUnreachable,
    NotConverged,
    NotReady,
)


@pytest.fixture(autouse=True)
def not_cancelled() -> Iterator[None]:
    yield
    remote.STOP.clear()


class Lamp:
    """Something that can be on or off, and may be broken."""

    def __init__(self, state: str, *, broken: bool = False) -> None:
        self.state, self.broken = state, broken
        self.log: list[str] = []

    def observe(self) -> str:
        self.log.append("observe")
        return self.state

    def act(self, do: str) -> None:
        self.log.append(do)
        if not self.broken:
            self.state = "on"

    def converge(self, **options: Any) -> Outcome:
        def plan(have: str) -> list[str]:
            return [] if have == "on" else ["screw in", "switch on"]

        return converge(
            "light", "head", self.observe, plan, self.act, data=lambda have: have, **options
        )


def test_as_wanted_nothing_is_done() -> None:
    lamp = Lamp("on")
    assert lamp.converge() == Outcome(step="light", node="head", status="unchanged", data="on")
    assert lamp.log == ["observe"]


def test_otherwise_the_plan_is_done_and_looked_at_again() -> None:
    lamp = Lamp("off")
    outcome = lamp.converge()
    assert outcome == Outcome(
        step="light", node="head", status="changed", detail="screw in; switch on", data="on"
    )
    assert lamp.log == ["observe", "screw in", "switch on", "observe"]
    assert lamp.converge().status == "unchanged"


def test_a_dry_run_only_plans() -> None:
    lamp = Lamp("off")
    outcome = lamp.converge(dry_run=True)
    assert (outcome.status, outcome.detail) == ("planned", "screw in; switch on")
    assert lamp.log == ["observe"]


def test_what_did_not_take_effect_is_a_failure() -> None:
    with pytest.raises(NotConverged) as caught:
        Lamp("off", broken=True).converge()
    assert str(caught.value) == (
        "head: light: done, but still to do: screw in; switch on\n"
        "done: screw in; switch on\n"
        "Something on the node undoes it, or it did not take effect; see its logs."
    )


def test_a_failing_step_ends_it() -> None:
    lamp = Lamp("off")

    def act(do: str) -> None:
        lamp.log.append(do)
        raise CommandFailed("no", node="head")

    with pytest.raises(CommandFailed):
        converge("light", "head", lamp.observe, lambda _: ["a", "b"], act)
    assert lamp.log == ["observe", "a"]


# --- waiting


class Clock:
    """Time that passes only while somebody waits."""

    def __init__(self) -> None:
        self.now = 100.0

    def pause(self, seconds: float) -> None:
        self.now += seconds


def wait(
    answer: Callable[[float], Ready | Waiting | Gone], clock: Clock | None = None, **options: Any
) -> Any:
    """Wait for what `answer` says after so many seconds."""
    clock = clock or Clock()
    begin = clock.now
    return wait_until(
        "the server",
        "head",
        lambda: answer(clock.now - begin),
        clock=lambda: clock.now,
        pause=clock.pause,
        **{"timeout": 60, **options},
    )


def test_ready_ends_the_wait_with_its_value() -> None:
    clock = Clock()
    value = wait(lambda t: Ready("up") if t >= 5 else Waiting("starting"), clock)
    assert value == "up"
    assert clock.now == 105


def test_ready_at_once_waits_not_at_all() -> None:
    clock = Clock()
    wait(lambda _: Ready(), clock)
    assert clock.now == 100


def test_gone_ends_the_wait_at_once() -> None:
    clock = Clock()
    with pytest.raises(NotReady) as caught:
        wait(
            lambda t: (
                Gone("it exited", "last words", "Mend it.") if t >= 2 else Waiting("starting")
            ),
            clock,
        )
    assert str(caught.value) == "head: the server: it exited\nlast words\nMend it."
    assert clock.now == 102


def test_the_deadline_tells_what_was_waited_for() -> None:
    clock = Clock()
    with pytest.raises(NotReady) as caught:
        wait(lambda _: Waiting("still loading"), clock, details=lambda: "last log line")
    assert str(caught.value) == (
        "head: the server: not ready after 60 s: still loading\nlast log line"
    )
    assert 160 < clock.now < 162


def test_no_progress_ends_the_wait_before_the_deadline() -> None:
    clock = Clock()
    with pytest.raises(NotReady, match="not ready after 10 s without progress: loading"):
        wait(lambda _: Waiting("loading", progress="shard 1"), clock, stall=10)
    assert 110 < clock.now < 112


def test_progress_puts_the_end_off() -> None:
    value = wait(
        lambda t: Ready("up") if t > 50 else Waiting("loading", progress=int(t / 8)), stall=10
    )
    assert value == "up"


def test_progress_does_not_put_the_deadline_off() -> None:
    with pytest.raises(NotReady, match="not ready after 60 s"):
        wait(lambda t: Waiting("loading", progress=t), stall=10)


def test_cancel_ends_the_wait() -> None:
    remote.cancel()
    with pytest.raises(Cancelled, match="head: cancelled while waiting for the server"):
        wait(lambda _: Waiting("starting"))


def test_the_pause_ends_on_cancel() -> None:
    """By default it is the event itself that is waited for."""
    remote.cancel()
    with pytest.raises(Cancelled):
        wait_until("it", "head", lambda: Waiting("starting"), timeout=60, every=60)


# --- steps


NODE = SimpleNamespace(name="worker1")


@step("weights")
def ensure_weights(node: Any, size: int = 1) -> Outcome:
    """Make the node hold the weights."""
    return Outcome(step="weights", node=node.name, status="changed", detail=f"{size} GB")


def test_a_step_is_a_task_that_names_its_node_and_is_never_cached() -> None:
    assert ensure_weights.name == "weights"
    assert ensure_weights.task_run_name == "weights on {node.name}"
    assert ensure_weights.cache_policy == NO_CACHE
    assert ensure_weights.persist_result is False
    assert ensure_weights.fn.__doc__ == "Make the node hold the weights."


def test_a_step_called_without_prefect_gives_its_outcome_and_how_long_it_took() -> None:
    outcome = ensure_weights.fn(NODE, size=3)
    assert outcome.model_copy(update={"seconds": 0}) == Outcome(
        step="weights", node="worker1", status="changed", detail="3 GB"
    )
    assert 0 < outcome.seconds < 1


@pytest.mark.parametrize(
    ("status", "name"),
    [("unchanged", "Unchanged"), ("changed", "Changed"), ("planned", "Planned")],
)
def test_prefect_shows_the_outcome_as_a_completed_state(status: Any, name: str) -> None:
    outcome = Outcome(step="weights", node="head", status=status, detail="1 GB")
    state = as_state(outcome)
    assert state.is_completed()
    assert (state.name, state.message) == (name, "1 GB")
    assert state.result() == outcome


@pytest.mark.parametrize(
    ("error", "again"),
    [
        pytest.param(NodeUnreachable("gone", node="head"), True, id="node unreachable"),
        pytest.param(EngineSilent("no docker", node="head"), True, id="docker restarts"),
        pytest.param(CommandFailed("exit code 1", node="head"), False, id="command failed"),
        pytest.param(Cancelled("cancelled", node="head"), False, id="cancelled"),
        pytest.param(ValueError("our own mistake"), False, id="our mistake"),
    ],
)
def test_only_what_may_pass_is_tried_again(error: Exception, again: bool) -> None:
    condition: Any = ensure_weights.retry_condition_fn
    assert condition(ensure_weights, None, Failed(data=error)) is again
    assert ensure_weights.retries == 2


def test_after_cancel_nothing_is_tried_again() -> None:
    remote.cancel()
    condition: Any = ensure_weights.retry_condition_fn
    assert condition(ensure_weights, None, Failed(data=NodeUnreachable("gone"))) is False
