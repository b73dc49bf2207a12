"""`make demo`: the main job on the lab, through a real Prefect server and worker."""

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".demo"
CLUSTER = "lab"
POOL = "sparkrail"
SERVER_SECONDS = 120
RUN_SECONDS = 1500
BIN = Path(sys.executable).parent


class DemoFailed(Exception):
    """The demo cannot go on; the text says why."""


def main() -> int:
    """Bring the demo up or down."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.demo", description=__doc__)
    parser.add_argument("verb", choices=("up", "down"))
    verb = parser.parse_args().verb
    try:
        (up if verb == "up" else down)()
    except (DemoFailed, subprocess.CalledProcessError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return 0


def up() -> None:
    """Lab, server, worker, deployments, two runs, and what to try next."""
    HOME.mkdir(exist_ok=True)
    say("bringing up the lab (two nodes with sshd, dockerd, Ray and vLLM on CPUs)")
    lab("up", "--name", CLUSTER)
    environment = start_prefect()
    register(environment)
    first = deploy(environment)
    show(first)
    again = deploy(environment)
    show(again)
    if any(row["outcome"] != "Unchanged" for row in again["steps"]):
        raise DemoFailed("the second run was to find everything unchanged")
    status = sparkrail(environment, "status")
    answer = next(row["detail"] for row in status["steps"] if row["step"] == "decide")
    say(f"the model {answer}")
    say(f"first run {first['seconds']:.0f} s, second run (all unchanged) {again['seconds']:.0f} s")
    print(next_steps(environment))


def next_steps(environment: Mapping[str, str]) -> str:
    """What a person can try now."""
    url = environment["PREFECT_API_URL"]
    return f"""
The Prefect UI:     {url.removesuffix("/api")}
Use it from here:   export PREFECT_API_URL={url}
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
    for name in ("worker", "server"):
        stop(name)
    lab("down", "--name", CLUSTER)


# --- Prefect --------------------------------------------------------------------------------------


def start_prefect() -> dict[str, str]:
    """A server with its own database and a worker; those of an earlier demo are used again."""
    port = running_port() or free_port(4200)
    environment = {
        **os.environ,
        "PREFECT_HOME": str(HOME / "prefect"),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "SPARKRAIL_HOME": str(ROOT),
        "SPARKRAIL_CLUSTER": CLUSTER,
    }
    if not is_running("server"):
        say(f"starting a Prefect server on port {port}")
        start("server", ["prefect", "server", "start", "--port", str(port)], environment)
        (HOME / "port").write_text(str(port))
    poll(
        lambda: answers(f"{environment['PREFECT_API_URL']}/health"),
        SERVER_SECONDS,
        f"the Prefect server does not answer; see {HOME / 'server.log'}",
        alive="server",
    )
    return environment


def register(environment: Mapping[str, str]) -> None:
    """Work pool, deployments and the worker."""
    say("registering deploy/on-demand and deploy/nightly")
    pools = prefect(environment, "work-pool", "ls")
    if POOL not in pools:
        prefect(environment, "work-pool", "create", POOL, "--type", "process")
    prefect(environment, "deploy", "--all", "--prefect-file", "deployments/prefect.yaml")
    if not is_running("worker"):
        start("worker", ["prefect", "worker", "start", "--pool", POOL], environment)


def deploy(environment: Mapping[str, str]) -> dict[str, Any]:
    """Run deploy/on-demand to its end; its steps as the Prefect API has them."""
    say(f"prefect deployment run deploy/on-demand -p cluster={CLUSTER}")
    os.environ.update(environment)
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
    async with get_client() as client:
        mine = FlowRunFilter(id=FlowRunFilterId(any_=[run.id]))
        tasks = await client.read_task_runs(flow_run_filter=mine)
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


def show(run: Mapping[str, Any]) -> None:
    """The steps of one run as a table."""
    for row in run["steps"]:
        detail = " ".join(row["detail"].split())[:70]
        print(f"  {row['outcome']:<10} {row['seconds']:6.1f} s  {row['step']:<34} {detail}")
    print(f"  {run['state']} in {run['seconds']:.1f} s")


# --- processes and programs -----------------------------------------------------------------------


def lab(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "tests.lab", *arguments], cwd=ROOT, check=True)


def prefect(environment: Mapping[str, str], *arguments: str) -> str:
    ran = subprocess.run(
        [BIN / "prefect", "--no-prompt", *arguments],
        cwd=ROOT,
        env=dict(environment),
        capture_output=True,
        text=True,
    )
    if ran.returncode != 0:
        raise DemoFailed(f"prefect {' '.join(arguments)}: {ran.stdout[-2000:]}{ran.stderr[-2000:]}")
    return ran.stdout


def sparkrail(environment: Mapping[str, str], verb: str) -> dict[str, Any]:
    ran = subprocess.run(
        [BIN / "sparkrail", verb, CLUSTER, "--json"],
        cwd=ROOT,
        env=dict(environment),
        capture_output=True,
        text=True,
    )
    if ran.returncode != 0:
        raise DemoFailed(f"sparkrail {verb}: {ran.stdout[-2000:]}{ran.stderr[-2000:]}")
    document: dict[str, Any] = json.loads(ran.stdout)
    return document


def start(name: str, argv: list[str], environment: Mapping[str, str]) -> None:
    """A process of its own session that outlives the demo, known by its pid and start time."""
    # A background process of a script ignores SIGINT, and Prefect's worker then never stops.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with (HOME / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [BIN / argv[0], *argv[1:]],
            cwd=ROOT,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    (HOME / f"{name}.pid").write_text(f"{process.pid} {start_time(process.pid)}")


def stop(name: str) -> None:
    """End a process that `start` started, and its session."""
    pid = is_running(name)
    if pid:
        os.killpg(pid, signal.SIGTERM)
        try:
            poll(lambda: not is_running(name), 15, "")
        except DemoFailed:
            os.killpg(pid, signal.SIGKILL)
    (HOME / f"{name}.pid").unlink(missing_ok=True)


def is_running(name: str) -> int:
    """The pid of what `start` started, or 0: a pid that was used again is not ours."""
    try:
        pid, started = (HOME / f"{name}.pid").read_text().split()
    except (OSError, ValueError):
        return 0
    return int(pid) if start_time(int(pid)) == started else 0


def start_time(pid: int) -> str:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def running_port() -> int:
    return int((HOME / "port").read_text()) if is_running("server") else 0


def free_port(first: int) -> int:
    for port in range(first, first + 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise DemoFailed(f"no free port from {first} on")


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=3):
            return True
    except (OSError, urllib.error.URLError):
        return False


def poll(ready: Callable[[], bool], seconds: float, why: str, alive: str = "") -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if alive and not is_running(alive):
            raise DemoFailed(f"{why} (it has ended)")
        if time.monotonic() > deadline:
            raise DemoFailed(why)
        time.sleep(0.3)


def say(text: str) -> None:
    print(f"demo: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
