"""`make demo`: the main job on the lab, through a real Prefect server and worker."""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tests.lab.layout import REPOSITORY
from tests.lab.prefect_processes import PrefectFailed, Processes

HOME = REPOSITORY / ".demo"
CLUSTER = "lab"
RUN_SECONDS = 1500
TOLD_SECONDS = 120
LAST_STEP = "record"


class DemoFailed(Exception):
    """The demo cannot go on; the text says why."""


def main() -> int:
    """Bring the demo up or down."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.demo", description=__doc__)
    parser.add_argument("verb", choices=("up", "down"))
    verb = parser.parse_args().verb
    try:
        (up if verb == "up" else down)()
    except (DemoFailed, PrefectFailed, subprocess.CalledProcessError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return 0


def up() -> None:
    """Lab, server, worker, deployments, two runs, and what to try next."""
    say("bringing up the lab (two nodes with sshd, dockerd, Ray and vLLM on CPUs)")
    lab("up", "--name", CLUSTER)
    prefect = Processes(HOME, CLUSTER)
    say(f"a Prefect server and worker on port {prefect.port}")
    prefect.start_server()
    say("registering deploy/on-demand and deploy/nightly")
    prefect.register()
    prefect.start_worker()
    first = deploy(prefect)
    show(first)
    again = deploy(prefect)
    show(again)
    if again["state"] != "Unchanged" or any(
        row["outcome"] != "Unchanged" for row in again["steps"]
    ):
        raise DemoFailed("the second run was to find everything unchanged")
    status = json.loads(prefect.command("sparkrail", "status", CLUSTER, "--json"))
    answer = next(row["runs"] for row in status["running"] if row["what"] == "endpoint")
    say(f"the model {answer}")
    say(f"first run {first['seconds']:.0f} s, second run (all unchanged) {again['seconds']:.0f} s")
    print(next_steps(prefect))


def next_steps(prefect: Processes) -> str:
    """What a person can try now."""
    return f"""
The Prefect UI:     {prefect.ui}
Use it from here:   export PREFECT_API_URL={prefect.ui}/api
What runs where:    .venv/bin/sparkrail status {CLUSTER}
Break something:    .venv/bin/python -m tests.lab break worker1 kill    (and: boot)
                    then: .venv/bin/sparkrail deploy {CLUSTER}
Deploy by Prefect:  .venv/bin/prefect deployment run deploy/on-demand -p cluster={CLUSTER} --watch
Retry:              the Retry button of a failed run in the UI
Look into a node:   .venv/bin/python -m tests.lab exec head -- docker ps
Stop everything:    make demo-down
"""


def down() -> None:
    """Worker, server and lab; all that the demo started."""
    Processes(HOME, CLUSTER).stop()
    lab("down", "--name", CLUSTER)


def deploy(prefect: Processes) -> dict[str, Any]:
    """Run deploy/on-demand to its end; its steps as the Prefect API has them."""
    say(f"prefect deployment run deploy/on-demand -p cluster={CLUSTER}")
    os.environ.update(prefect.environment)
    return asyncio.run(_deploy())


async def _deploy() -> dict[str, Any]:
    # Imported here: Prefect reads its settings from the environment when it is imported.
    from prefect import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
    from prefect.deployments.flow_runs import arun_deployment

    run = await arun_deployment(
        "deploy/on-demand", parameters={"cluster": CLUSTER}, timeout=RUN_SECONDS
    )
    if run.state is None or not run.state.is_completed():
        said = f"{run.state.name}: {run.state.message}" if run.state else "no state"
        raise DemoFailed(f"the run {run.name} ended as {said}; see {HOME / 'worker.log'}")
    mine = FlowRunFilter(id=FlowRunFilterId(any_=[run.id]))
    async with get_client() as client:
        deadline = time.monotonic() + TOLD_SECONDS
        while not _all_told(tasks := await client.read_task_runs(flow_run_filter=mine)):
            if time.monotonic() > deadline:
                raise DemoFailed(f"the Prefect server does not tell all steps of {run.name}")
            await asyncio.sleep(0.3)
    tasks = sorted(tasks, key=lambda task: (task.start_time is None, task.start_time))
    steps = [
        {
            "step": task.name,
            "outcome": task.state.name if task.state else "?",
            "seconds": task.total_run_time.total_seconds(),
            "detail": (task.state.message or "") if task.state else "",
        }
        for task in tasks
    ]
    return {"steps": steps, "seconds": run.total_run_time.total_seconds(), "state": run.state.name}


def _all_told(tasks: Sequence[Any]) -> bool:
    """The steps come to the server as events, seconds after the run itself has ended."""
    ended = all(task.state is not None and task.state.is_final() for task in tasks)
    return ended and any(task.name.startswith(LAST_STEP) for task in tasks)


def show(run: Mapping[str, Any]) -> None:
    """The steps of one run as a table."""
    for row in run["steps"]:
        detail = " ".join(row["detail"].split())[:70]
        print(f"  {row['outcome']:<10} {row['seconds']:6.1f} s  {row['step']:<34} {detail}")
    print(f"  {run['state']} in {run['seconds']:.1f} s")


def lab(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "tests.lab", *arguments], cwd=REPOSITORY, check=True)


def say(text: str) -> None:
    print(f"demo: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
