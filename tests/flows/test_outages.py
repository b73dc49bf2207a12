"""What ends a run, and what does not: lost leases, Ctrl-C, and what the Prefect API says of it."""

import _thread
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from prefect import flow
from prefect._internal.concurrency.cancellation import WatcherThreadCancelScope
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateType
from prefect.context import FlowRunContext

from flows.outages import CancelledByUser, to_its_end
from flows.steps import Steps, as_state, conduct
from flows.watch import ALIVE
from tasks import remote
from tasks.errors import Cancelled
from tests.ssh.sshd import poll
from tests.unit.specs import DOCUMENT
from tests.unit.steps import changed, lift

pytestmark = [
    # Prefect leaves sockets of its clients to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]


@pytest.fixture(autouse=True)
def not_cancelled() -> Iterator[None]:
    remote.STOP.clear()
    yield
    remote.STOP.clear()


def test_a_lease_that_prefect_lost_does_not_end_the_body() -> None:
    ended = threading.Event()

    def body() -> None:
        scope.cancel()
        assert not remote.STOP.wait(1)
        ended.set()

    with WatcherThreadCancelScope() as scope:
        to_its_end(body, threading.Event())
    assert ended.is_set()


def test_an_error_of_the_body_is_its_own() -> None:
    def body() -> None:
        raise Cancelled("the lock is lost")

    with pytest.raises(Cancelled, match="the lock is lost"):
        to_its_end(body, threading.Event())


def until_stopped(begin: Callable[[], object], ended: list[str]) -> Callable[[], None]:
    def body() -> None:
        begin()
        assert remote.STOP.wait(10)
        ended.append("the body")

    return body


def test_ctrl_c_ends_the_body_first() -> None:
    ended: list[str] = []
    # A background process of a script ignores SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            to_its_end(until_stopped(_thread.interrupt_main, ended), threading.Event())
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == ["the body"]


def test_a_cancelled_run_ends_its_body_first() -> None:
    ended: list[str] = []
    cancelled = threading.Event()
    with pytest.raises(CancelledByUser):
        to_its_end(until_stopped(cancelled.set, ended), cancelled)
    assert ended == ["the body"]


# --- by a Prefect server --------------------------------------------------------------------------


def put(kind: StateType) -> None:
    """Somebody sets the state of the flow run that we are in."""
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(ours(), State(type=kind), force=True)


def ours() -> Any:
    context = FlowRunContext.get()
    assert context and context.flow_run
    return context.flow_run.id


def now() -> State[Any]:
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(ours()).state
    assert state is not None
    return state


def run(folder: Path, body: Callable[[Steps], object]) -> State[Any]:
    path = folder / "sparks.yaml"
    path.write_text(yaml.safe_dump(DOCUMENT))

    @flow(name="lifting", persist_result=False)
    def lifting(cluster: str) -> Any:
        return as_state(conduct(cluster, lambda steps: void(body(steps))))

    return cast(State[Any], lifting(cluster=str(path), return_state=True))


def void(_value: object) -> None:
    """For a body that is one expression."""


@pytest.mark.usefixtures("prefect_server")
def test_a_run_that_nobody_else_could_end_sees_that_it_is_cancelled(tmp_path: Path) -> None:
    def body(_steps: Steps) -> None:
        put(StateType.CANCELLING)
        assert remote.STOP.wait(20)

    state = run(tmp_path, body)
    assert (state.name, state.message) == ("Cancelled", "cancelled through the Prefect API")


@pytest.mark.usefixtures("prefect_server")
def test_a_run_that_was_taken_for_dead_says_that_it_lives(tmp_path: Path) -> None:
    def body(steps: Steps) -> None:
        put(StateType.CRASHED)
        poll(lambda: now().message == ALIVE, "it is alive", seconds=20)
        assert now().is_running()
        steps.one(lift, do=changed)

    assert run(tmp_path, body).name == "Changed"
