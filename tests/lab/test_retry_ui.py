"""Retry, as a person does it: a failed deploy, its cause mended, a click in the Prefect UI."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_LOGGING_LEVEL,
    temporary_settings,
)

from tests.bench import unchanged
from tests.lab import browser
from tests.lab.browser import NewUi, OldUi
from tests.lab.flow_runs import Attempt, FlowRuns
from tests.lab.holds import FREE, OCCUPY
from tests.lab.prefect_processes import Processes
from tests.lab.product import Product, lab_command, poll

pytestmark = [pytest.mark.lab, pytest.mark.extended]

# Steps that only look where everything is as wanted, with seconds for a machine that is busy.
LOOK = ("lock", "facts", "preflight", "image transfer", "weights sync", "decide")
SECONDS = 20
SCREENSHOTS = os.environ.get("SPARKRAIL_SCREENSHOTS")  # A folder: keep those of the README there.


@pytest.fixture
def mended(stub: Product) -> Iterator[Callable[[], None]]:
    """Whatever a test breaks on the nodes is mended, even when the test fails."""
    yield lambda: mend(stub)
    mend(stub)


def mend(stub: Product) -> None:
    lab_command(stub.lab, "break", "worker1", "link-up")


def started(product: Product, node: str, run: UUID, name: str) -> bool:
    """Whether that run has started that container."""
    label = f"label=sparkrail.run={run}"
    return name in product.containers(node, f"--filter {label}")


def quick(attempt: Attempt) -> bool:
    """Whether what had held before the failure took but seconds now."""
    looked = {
        name: seconds
        for name, seconds in attempt.step_seconds.items()
        if name.startswith(tuple(f"{step} on " for step in LOOK))
    }
    return len(looked) >= len(LOOK) and max(looked.values()) < SECONDS


def test_a_link_that_fails_during_the_join(
    stub: Product, prefect: Processes, runs: FlowRuns, mended: Callable[[], None]
) -> None:
    """Retry in the old UI; also that the first deploy shows what it does, and is cleared away."""
    stub.destroy()
    stub.on("worker1", "rm -rf /models/tiny")
    run = runs.start(cluster=str(stub.spec))
    poll(lambda: started(stub, "head", run, stub.ray), 300, every=0.5)
    lab_command(stub.lab, "break", "worker1", "link-down")

    first = runs.ended(run)
    assert first.state == "Failed"
    assert first.message.startswith("worker join on worker1: no SSH connection to root@10.77.0.2")
    assert "Is worker1 up" in first.message
    assert {name for name, state in first.steps.items() if state == "Failed"} == {
        "worker join on worker1",
        "clear on worker1",
    }
    assert stub.containers("head", "--all") == {}
    shown = runs.artifacts(run)
    assert shown["report-stub"].startswith("# stub: failed")
    assert shown["weights-sync-stub-worker1"] == 100

    mended()
    with browser.page() as page:
        ui = OldUi(page, prefect.ui)
        ui.open_run(run)
        ui.retry()
    again = runs.ended(run, 2)
    assert again.state == "Changed"
    assert quick(again)
    assert set(again.changed) - {"script relay on worker1", "stop on worker1"} == {
        "script relay on head",
        "Ray head start on head",
        "worker join on worker1",
        "vLLM serve on head",
        "record on head",
    }
    assert runs.artifacts(run)["report-stub"].startswith("# stub: completed, changed")


def test_a_server_that_crashes_and_then_the_ray_head_dies(
    stub: Product, prefect: Processes, runs: FlowRuns, tmp_path: Path
) -> None:
    """Retry in the new UI, after a correction in the spec."""
    too_long = stub.but(stub.folder, lambda spec: set_arguments(spec, "--max-model-len=999999"))
    too_long.write()
    run = runs.start(cluster=str(stub.spec))
    first = runs.ended(run)
    assert first.message.startswith("vLLM serve on head: its container is exited")
    assert "999999" in first.message
    assert first.state == "RolledBack"
    assert stub.answer() == " of the stub"

    stub.on("head", f"docker kill {stub.ray}")
    stub.write()
    with browser.page() as page:
        ui = NewUi(page, prefect.ui)
        ui.open_run(run)
        ui.retry()
        again = runs.ended(run, 2)
        assert again.state == "Changed"
        assert quick(again)
        assert set(again.changed) == {
            "breaker on head",
            "stop on head",
            "stop on worker1",
            "Ray head start on head",
            "worker join on worker1",
            "vLLM serve on head",
        }
        shown = runs.whole_artifacts(run)
        assert '"interface": "enP2p1s0f0np0"' in str(shown["nodes-stub"].data)
        folder = Path(SCREENSHOTS) if SCREENSHOTS else tmp_path
        ui.open_run(run)
        ui.shoot_run(folder / "run.png")
        ui.shoot_artifact(shown["report-stub"].id, "cluster verification", folder / "report.png")


def set_arguments(document: dict[str, Any], *arguments: str) -> None:
    document["serve"]["arguments"] = list(arguments)


def test_a_retry_costs_the_server_s_start_and_little_more(
    stub: Product, prefect: Processes, runs: FlowRuns
) -> None:
    """Where a release is to go back to: Ray has gone on running through the rollback."""
    stub.deploy()
    stub.but(stub.folder, lambda spec: set_arguments(spec, "--max-model-len=2000")).write()
    stub.on("head", f"docker exec {stub.ray} touch /tmp/crash-once")
    run = runs.start(cluster=str(stub.spec))
    first = runs.ended(run)
    assert first.message.startswith("vLLM serve on head: its container is exited")
    assert first.state == "RolledBack"
    ray = [stub.containers(name)[stub.ray] for name in stub.nodes]

    prefect.command("prefect", "flow-run", "retry", str(run))
    again = runs.ended(run, 2)
    assert again.state == "Changed"
    assert set(again.changed) == {
        "breaker on head",
        "script relay on head",
        "stop on head",
        "vLLM serve on head",
        "record on head",
    }
    assert [stub.containers(name)[stub.ray] for name in stub.nodes] == ray
    serve = again.step_seconds["vLLM serve on head"]
    for name, seconds in again.step_seconds.items():
        print(f"{seconds:6.2f} s {name}")
    print(f"the retry's flow {again.seconds:.1f} s, of which vLLM serve {serve:.1f} s")
    assert again.seconds - serve < SECONDS


def test_a_deploy_that_changes_nothing_spends_little(stub: Product, prefect: Processes) -> None:
    """By Prefect, with the heartbeat that registration sets, beyond what the nodes are asked."""
    api = {
        PREFECT_API_URL: f"{prefect.ui}/api",
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY: 30,
        PREFECT_LOGGING_LEVEL: "ERROR",
    }
    with temporary_settings(api):
        unchanged.measure(str(stub.spec))
        figures = [unchanged.measure(str(stub.spec)) for _ in range(2)]
    for each in figures:
        print(each)
    assert {each.outcome for each in figures} == {"Unchanged"}
    assert min(each.beyond for each in figures) < 3


def test_a_real_server_that_finds_its_port_taken(
    lab_cluster: Product, stub: Product, prefect: Processes, runs: FlowRuns
) -> None:
    """`prefect flow-run retry`, after everything was cleared away."""
    stub.destroy()
    changes = {"name": stub.name, "proof": {"enabled": False}}
    real = lab_cluster.but(stub.folder, lambda document: document.update(changes))
    real.write()
    run = runs.start(cluster=str(stub.spec), restart="always")
    poll(lambda: started(real, "worker1", run, real.ray), 300, every=0.5)
    real.on("head", OCCUPY)
    try:
        first = runs.ended(run)
    finally:
        real.on("head", FREE)
    assert first.message.startswith("vLLM serve on head: another process listens on the port")
    assert [real.containers(name, "--all") for name in real.nodes] == [{}, {}]

    prefect.command("prefect", "flow-run", "retry", str(run))
    again = runs.ended(run, 2, timeout=400)
    assert quick(again)
    assert again.state == "Changed"
    assert set(again.changed) == {
        "script relay on head",
        "script relay on worker1",
        "Ray head start on head",
        "worker join on worker1",
        "vLLM serve on head",
        "record on head",
    }
    # What failed was cleared away, as nothing is on record to go back to: Ray starts anew, too.
    restart = ("Ray head start", "worker join", "cluster verification", "vLLM serve", "canary")
    took = {
        step: max(
            seconds for name, seconds in again.step_seconds.items() if name.startswith(f"{step} on")
        )
        for step in restart
    }
    anew = sum(took.values())
    print(
        f"{', '.join(f'{step} {seconds:.1f} s' for step, seconds in took.items())}; "
        f"the retry's flow {again.seconds:.1f} s, "
        f"and with the start of its process {again.with_start:.1f} s"
    )
    assert again.seconds < anew + 30
