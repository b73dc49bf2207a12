"""Runs that are cancelled, and Prefect workers that go: what ends, what stays, what is told."""

import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import pytest
from prefect.events.schemas.automations import AutomationCore, EventTrigger

from tests.lab import holds
from tests.lab.flow_runs import FlowRuns
from tests.lab.prefect_processes import Processes
from tests.lab.product import DONE, FAILED, Product, poll

pytestmark = [pytest.mark.lab, pytest.mark.extended]
SOON = 10  # Seconds within which a cancelled run has ended.
DEAD = 120  # Seconds within which a run whose process is gone is seen to have crashed.


@pytest.fixture(scope="module", autouse=True)
def deployed(stub: Product) -> Product:
    stub.deploy()
    return stub


@pytest.fixture
def serving(deployed: Product) -> Iterator[Product]:
    """A release that serves, before the test and as ever after it; and no run is left."""
    before = [deployed.containers(name) for name in deployed.nodes]
    yield deployed
    poll(lambda: not deployed.of_runs(), what=deployed.of_runs)
    poll(lambda: deployed.lock_owner() is None)
    assert [deployed.containers(name) for name in deployed.nodes] == before
    assert deployed.answer() == " of the stub"


def seconds_to_cancel(runs: FlowRuns, run: UUID) -> float:
    """From the click on Cancel until the run has ended as Cancelled."""
    began = time.monotonic()
    runs.cancel(run)
    ended = poll(lambda: runs.is_final(run) and runs.read(run), 60)
    took = time.monotonic() - began
    assert ended and ended.state_name == "Cancelled"
    print(f"cancelled after {took:.1f} s")
    return took


def nothing_runs(serving: Product) -> None:
    """No command of a run; what guards one lives for the three seconds that its group may take."""
    poll(lambda: not serving.of_runs(), 6, what=serving.of_runs)


def test_cancel_ends_the_commands_on_every_node(serving: Product, runs: FlowRuns) -> None:
    with holds.held_facts(serving) as hold:
        run = runs.start(cluster=str(serving.spec))
        hold.wait()
        assert seconds_to_cancel(runs, run) < SOON
        nothing_runs(serving)
        assert serving.lock_owner() is None


def test_cancel_of_a_run_of_the_command_line(
    serving: Product, prefect: Processes, runs: FlowRuns
) -> None:
    """No Prefect worker is there to end it: it sees by itself that it is to end."""
    with holds.held_facts(serving) as hold:
        running = serving.start("deploy", prefect=prefect.environment)
        running.until(hold.reached, 120)
        assert seconds_to_cancel(runs, runs.newest().id) < SOON
        nothing_runs(serving)
        said = running.wait(SOON)
    assert (said.code, said.error) == (FAILED, "cancelled through the Prefect API")


def test_ctrl_c_on_a_run_that_the_prefect_ui_shows(
    serving: Product, prefect: Processes, runs: FlowRuns
) -> None:
    with holds.held_facts(serving) as hold:
        running = serving.start("deploy", prefect=prefect.environment)
        running.until(hold.reached, 120)
        began = time.monotonic()
        running.process.send_signal(signal.SIGINT)
        said = running.wait(60)
        assert time.monotonic() - began < SOON
        nothing_runs(serving)
    assert said.code == FAILED
    assert "interrupted" in said.stderr
    assert runs.newest().state_name == "Crashed"


# --- when the Prefect worker goes -----------------------------------------------------------------


def flow_process(run: UUID) -> int:
    """The pid of the process that runs the flow, by its environment."""
    wanted = f"PREFECT__FLOW_RUN_ID={run}"
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            found = wanted in file.read_text(errors="replace").split("\0")
        except OSError:
            continue
        if found:
            return int(file.parent.name)
    raise AssertionError(f"no process runs {run}")


def test_a_run_outlives_its_worker_and_can_still_be_cancelled(
    serving: Product, prefect: Processes, runs: FlowRuns
) -> None:
    with holds.held_facts(serving) as hold:
        run = runs.start(cluster=str(serving.spec))
        hold.wait()
        os.kill(prefect.is_running("worker"), signal.SIGKILL)
        assert seconds_to_cancel(runs, run) < SOON
        nothing_runs(serving)


def soon(runs: FlowRuns) -> None:
    """Half the silence of the shipped automation: Prefect's shortest heartbeat is 30 s."""
    [crashed] = runs.client.read_automations_by_name("sparkrail stub: crashed")
    trigger = crashed.trigger
    assert isinstance(trigger, EventTrigger)
    soon = {"trigger": trigger.model_copy(update={"within": timedelta(seconds=45)})}
    want = AutomationCore.model_validate(crashed.model_dump(exclude={"id", "owner_resource"}))
    runs.client.update_automation(crashed.id, want.model_copy(update=soon))


def test_dead_runs_have_crashed_and_the_next_deploy_completes(
    serving: Product, prefect: Processes, runs: FlowRuns
) -> None:
    """A worker that is stopped, and one that is killed together with its flow."""
    soon(runs)
    with holds.held_facts(serving) as hold:
        stopped = runs.start(cluster=str(serving.spec))
        hold.wait()
        prefect.stop("worker")
        died = time.monotonic()
        poll(lambda: not serving.of_runs(), what=serving.of_runs)
    assert serving.run("deploy").code == DONE

    prefect.start_worker()
    with holds.held_facts(serving) as hold:
        killed = runs.start(cluster=str(serving.spec))
        hold.wait()
        process = flow_process(killed)
        os.kill(prefect.is_running("worker"), signal.SIGKILL)
        os.kill(process, signal.SIGKILL)
        poll(lambda: not serving.of_runs())
        prefect.stop("worker")
    assert serving.run("deploy").code == DONE
    poll(lambda: runs.is_final(stopped) and runs.is_final(killed), DEAD)
    assert [runs.read(run).state_name for run in (stopped, killed)] == ["Crashed", "Crashed"]
    print(f"all seen as crashed {time.monotonic() - died:.0f} s after the first died")
