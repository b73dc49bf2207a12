"""One redeploy at a time, whoever starts them, and while the Prefect API or the head is away."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prefect.client.schemas.objects import StateType

from tests.lab import holds, processes
from tests.lab.flow_runs import FlowRuns
from tests.lab.moments import loads_its_weights
from tests.lab.prefect_processes import Processes
from tests.lab.product import DONE, FAILED, LOCKED, Product, Running, poll

pytestmark = [pytest.mark.lab, pytest.mark.extended]
FREED = 20  # Seconds after which the head frees the lock of a run that is silent.


@pytest.fixture(scope="module", name="stub")
def by_rsync(stub: Product) -> Product:
    """rsync on the head is what a test can hold: its command ends with the connection."""
    return stub.but(stub.folder, lambda spec: spec.update(weights={"transport": "rsync"}))


@pytest.fixture(scope="module", autouse=True)
def deployed(stub: Product) -> Product:
    stub.deploy()
    return stub


def laptop(stub: Product, folder: Path) -> Running:
    """A deploy from another control machine: other host name, other home, no common Prefect."""
    prefix = ("unshare", "--uts", "sh", "-c", 'hostname laptop; HOME="$0" exec "$@"', str(folder))
    return stub.start("deploy", prefix=prefix)


def locked_by(stub: Product, run: str) -> str:
    """How a refusal names the run that holds the lock."""
    owner = stub.lock_owner()
    assert owner is not None
    assert owner["run"] == run
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner["since"]))
    return f"head: stub is worked on by run {run} of {owner['who']}, since {since}"


def test_nightly_against_on_demand_and_a_laptop(
    stub: Product, runs: FlowRuns, tmp_path: Path
) -> None:
    with holds.held_weights(stub) as hold:
        nightly = runs.start("deploy/nightly", cluster=str(stub.spec))
        hold.wait()
        who = locked_by(stub, str(nightly))
        assert f" of root@{socket.gethostname()}, " in who

        again = runs.start("deploy/nightly", cluster=str(stub.spec))
        on_demand = runs.start(cluster=str(stub.spec))
        said = laptop(stub, tmp_path).wait()
        assert said.code == LOCKED
        assert said.error.startswith(f"lock on {who}")
        refused = runs.ended(on_demand)
        assert (refused.state, list(refused.steps)) == ("Failed", ["lock on head"])
        assert who.removeprefix("head: ") in refused.message
        poll(lambda: runs.is_final(again), 120)
        assert runs.read(again).state_name == "Cancelled"
        assert runs.message(again) == "Deployment concurrency limit reached."
        assert runs.read(nightly).state_name == "Running"
        hold.let_go()
        assert runs.ended(nightly).state == "Changed"
    assert stub.lock_owner() is None


def test_the_holder_is_killed(stub: Product, tmp_path: Path) -> None:
    with holds.held_weights(stub) as hold:
        first = laptop(stub, tmp_path)
        first.until(hold.reached)
        owner = stub.lock_owner()
        assert owner is not None and owner["who"] == "root@laptop"
        first.kill()
        poll(lambda: not stub.of_runs(), what=stub.of_runs)
        hold.let_go()
    # It begins at once, and what the killed one had begun is done.
    assert stub.run("deploy").code == DONE


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def freeze(pids: list[int]) -> Callable[[], None]:
    """Stop processes; what is returned lets them go on."""
    frozen = [processes.Process(pid, processes.started(pid) or 0) for pid in pids]
    for each in frozen:
        os.kill(each.pid, signal.SIGSTOP)

    def thaw() -> None:
        for each in frozen:
            if each.alive:
                os.kill(each.pid, signal.SIGCONT)

    return thaw


CutOff = Callable[[int], list[int]]


@pytest.mark.parametrize(
    "whom",
    [
        pytest.param(lambda pid: [pid], id="itself frozen"),
        pytest.param(children, id="its connection frozen"),
    ],
)
def test_the_holder_is_cut_off(stub: Product, whom: CutOff) -> None:
    """The head frees the lock, but not before it has ended what the silent run had begun."""
    with holds.held_weights(stub) as hold:
        first = stub.start("deploy")
        first.until(hold.reached)
        owner = stub.lock_owner()
        begun = set(stub.of_runs())
        thaw = freeze(whom(first.process.pid))
        cut_off = time.monotonic()
        try:
            second = stub.start("deploy")
            poll(lambda: stub.lock_owner() != owner, 3 * FREED)
            print(f"freed {time.monotonic() - cut_off:.1f} s after it was cut off")
            assert not begun & set(stub.of_runs())
            hold.let_go()
            said = second.wait()
            if said.code == LOCKED:
                said = stub.run("deploy")
            assert said.code == DONE, said.error
        finally:
            thaw()
        lost = first.wait(60)
    assert lost.code == FAILED
    assert "this run was stopped, because its lock is lost" in lost.error
    assert "Run again" in lost.error


# --- while the Prefect API is away ----------------------------------------------------------------


@pytest.fixture
def server_again(prefect: Processes) -> Iterator[None]:
    """Whatever becomes of the test, the server answers afterwards."""
    yield
    prefect.start_server()


def is_free(stub: Product) -> bool:
    return stub.lock_owner() is None


@pytest.mark.usefixtures("server_again")
def test_the_server_is_killed_under_a_run_of_the_worker(
    stub: Product, prefect: Processes, runs: FlowRuns, tmp_path: Path
) -> None:
    with holds.held_weights(stub) as hold:
        run = runs.start("deploy/nightly", cluster=str(stub.spec))
        hold.wait()
        who = locked_by(stub, str(run))
        prefect.signal("server", signal.SIGKILL)
        said = laptop(stub, tmp_path).wait()
        assert (said.code, who in said.error) == (LOCKED, True)
        hold.let_go()
        # All is done on the nodes before the API is back.
        poll(lambda: is_free(stub), 120)
    assert stub.on("worker1", "ls /models/tiny/config.json")
    prefect.start_server()
    ended = runs.ended(run)
    assert ended.state == "Changed"
    assert "weights sync on worker1" in ended.steps


@pytest.mark.long
@pytest.mark.usefixtures("server_again")
def test_the_server_is_away_for_two_minutes_while_the_engine_loads(
    stub: Product, prefect: Processes, runs: FlowRuns, tmp_path: Path
) -> None:
    held = stub.but(tmp_path, lambda spec: spec["environment"].update(STUB_HOLD="1"))
    held.write()
    run = runs.start("deploy/nightly", cluster=str(held.spec))
    poll(lambda: loads_its_weights(held), 120)
    who = locked_by(held, str(run))
    prefect.signal("server", signal.SIGKILL)
    threading.Event().wait(120)
    refused = laptop(held, tmp_path).wait()
    assert (refused.code, who in refused.error) == (LOCKED, True)
    held.send_signal("head", "vllm", signal.SIGUSR1)
    poll(lambda: is_free(held), 120)
    assert held.answer() == " of the stub"
    prefect.start_server()
    # For some seconds the automation may take it for dead.
    poll(lambda: runs.read(run).state_name == "Changed", 120, what=lambda: runs.read(run).state)


def test_a_run_that_was_taken_for_dead_is_alive(stub: Product, runs: FlowRuns) -> None:
    """As the automation does it where the API was away for longer than 90 s."""
    with holds.held_weights(stub) as hold:
        run = runs.start(cluster=str(stub.spec))
        hold.wait()
        runs.set_state(run, StateType.CRASHED)
        poll(lambda: runs.read(run).state_name == "Running", 30)
        assert "is alive" in str(runs.message(run))
        hold.let_go()
        assert runs.ended(run).state == "Changed"


@pytest.mark.usefixtures("server_again")
def test_the_server_hangs_under_a_run_of_the_command_line(
    stub: Product, prefect: Processes, runs: FlowRuns
) -> None:
    with holds.held_weights(stub) as hold:
        running = stub.start("deploy", prefect=prefect.environment)
        running.until(hold.reached, 120)
        prefect.signal("server", signal.SIGSTOP)
        try:
            hold.let_go()
            running.until(lambda: is_free(stub), 120)
        finally:
            prefect.signal("server", signal.SIGCONT)
        said = running.wait(180)
    assert (said.code, said.outcome) == (DONE, "changed")
    newest = runs.newest()
    assert (newest.state_name, newest.tags) == ("Changed", ["cluster:stub"])
