"""What the Prefect UI shows of a run beside its steps."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import TaskRun
from prefect.client.schemas.sorting import ArtifactSort, LogSort
from prefect.settings import PREFECT_LOGGING_TO_API_ENABLED, temporary_settings

from flows.steps import Steps, conduct
from tasks import artifacts
from tasks.converge import log
from tasks.ray_nodes import Member, Raylet, RayNode
from tasks.ray_proof import node_rows
from tasks.transfers import Progress
from tests.lab.prefect_processes import Processes
from tests.lab.product import poll
from tests.unit.specs import DOCUMENT, spec
from tests.unit.steps import changed, lift

CLUSTER = spec()
HEAD, WORKER = CLUSTER.nodes


class Clock:
    """A clock that goes on when it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run(body: Callable[[], Any]) -> UUID:
    """The id of a flow run with this body."""

    @flow(name="showing", persist_result=False)
    def showing() -> None:
        body()
        assert artifacts._publisher.drain(20)

    state = showing(return_state=True)
    assert state.is_completed(), state.message
    flow_run: UUID | None = state.state_details.flow_run_id
    assert flow_run is not None
    return flow_run


def shown(client: SyncPrefectClient, flow_run: UUID) -> list[tuple[str, str, Any, str]]:
    """Key, type, content and description of a run's artifacts."""
    mine = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run]))
    found = client.read_artifacts(flow_run_filter=mine, sort=ArtifactSort.CREATED_DESC)
    return [
        (str(each.key), str(each.type), each.data, str(each.description))
        for each in reversed(found)
    ]


def test_a_transfer_is_one_bar_that_grows(client: SyncPrefectClient) -> None:
    texts = []

    def body() -> None:
        clock = Clock()
        with Progress("weights sync", CLUSTER, WORKER, 10_000_000, clock) as progress:
            for tenth in range(1, 30):
                clock.now = tenth / 10
                progress.told(tenth * 300_000)
                assert artifacts._publisher.drain(20)
                texts.append(shown(client, _this_run())[-1:])
            clock.now = 4.0
            progress.finished(10_000_000)

    flow_run = run(body)
    told = [text for text in dict.fromkeys(str(text) for text in texts) if text != "[]"]
    assert len(told) == 2, "at most one update a second"
    assert "3.0 MB of 10.0 MB (30%) at 3.0 MB/s" in told[0]
    assert shown(client, flow_run) == [
        ("weights-sync-sparks-worker1", "progress", 100, "10.0 MB at 2.5 MB/s, in 4 s")
    ]


def test_a_transfer_that_breaks_says_how_far_it_came(client: SyncPrefectClient) -> None:
    def body() -> None:
        clock = Clock()
        with (
            pytest.raises(OSError, match="broken"),
            Progress("image transfer", CLUSTER, WORKER, 8_000_000, clock) as progress,
        ):
            clock.now = 1.0
            progress.told(2_000_000)
            raise OSError("broken")

    [(key, _, percent, text)] = shown(client, run(body))
    assert (key, percent) == ("image-transfer-sparks-worker1", 25)
    assert text == "stopped after 2.0 MB of 8.0 MB (25%)"


def test_the_nodes_and_the_endpoint(client: SyncPrefectClient) -> None:
    nodes = [
        RayNode(id=node.name, alive=True, address=node.fabric_address, resources={"GPU": 1.0})
        for node in CLUSTER.nodes
    ]
    members = {
        name: Member(
            python="3.12.3",
            ray="2.60.0",
            vllm="0.32.0",
            raylets=(Raylet(GLOO_SOCKET_IFNAME=interface),),
        )
        for name, interface in (("head", "enp1s0f1np1"), ("worker1", "enP2p1s0f0np0"))
    }

    def body() -> None:
        artifacts.show_nodes(CLUSTER, node_rows(CLUSTER, nodes, members))
        artifacts.show_endpoint(CLUSTER, "http://10.88.0.1:8000/v1")

    table, link = shown(client, run(body))
    assert (table[0], table[1]) == ("nodes-sparks", "table")
    assert json.loads(table[2])[1] == {
        "node": "worker1",
        "role": "worker",
        "address": "10.77.0.2",
        "interface": "enP2p1s0f0np0",
        "GPUs": "1",
        "Ray": "2.60.0",
        "Python": "3.12.3",
        "vLLM": "0.32.0",
    }
    assert (link[0], link[2]) == (
        "endpoint-sparks",
        "[http://10.88.0.1:8000/v1](http://10.88.0.1:8000/v1/models)",
    )


def test_a_run_and_its_steps_are_tagged_and_tell_what_they_do(
    client: SyncPrefectClient, tmp_path: Path
) -> None:
    file = tmp_path / "sparks.yaml"
    file.write_text(yaml.safe_dump(DOCUMENT))

    def one_step(steps: Steps) -> None:
        steps.one(lift, do=changed)

    def body() -> None:
        with temporary_settings({PREFECT_LOGGING_TO_API_ENABLED: True}):
            conduct(str(file), one_step)

    flow_run = run(body)
    assert client.read_flow_run(flow_run).tags == ["cluster:sparks"]
    [step] = poll(lambda: _ended(client, flow_run))
    assert (step.name, step.state_name, step.tags) == (
        "lift on head",
        "Changed",
        ["cluster:sparks"],
    )
    lines = poll(lambda: _lines(client, flow_run, step.id))
    assert lines == ["lift on head ...", "lift on head: changed by hand"]
    assert log.propagate


def _ended(client: SyncPrefectClient, flow_run: UUID) -> list[TaskRun]:
    mine = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run]))
    found = client.read_task_runs(flow_run_filter=mine)
    return found if all(each.state and each.state.is_final() for each in found) else []


def _lines(client: SyncPrefectClient, flow_run: UUID, step: UUID) -> list[str]:
    mine = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run]))
    said = client.read_logs(mine, sort=LogSort.TIMESTAMP_ASC)
    found = [each.message for each in said if each.task_run_id == step]
    return found[:2] if len(found) > 1 else []


@pytest.fixture
def silence(processes: Processes) -> Iterator[Callable[[], None]]:
    """Makes the server hang: it takes connections, and never answers."""
    pid = processes.is_running("server")
    try:
        yield lambda: os.killpg(pid, signal.SIGSTOP)
    finally:
        os.killpg(pid, signal.SIGCONT)


def test_a_server_that_hangs_costs_a_run_a_second_or_so(
    client: SyncPrefectClient, processes: Processes, silence: Callable[[], None]
) -> None:
    took = []

    def body() -> None:
        silence()
        began = time.monotonic()
        artifacts.tag_run("cluster:sparks")
        with Progress("weights sync", CLUSTER, WORKER, 10) as progress:
            progress.finished(10)
        artifacts.show_endpoint(CLUSTER, "http://10.88.0.1:8000/v1")
        artifacts.show_report("sparks", "# sparks", "")
        artifacts.drain()
        took.append(time.monotonic() - began)
        os.killpg(processes.is_running("server"), signal.SIGCONT)

    flow_run = run(body)
    assert artifacts.PATIENCE <= took[0] < artifacts.PATIENCE + 1
    # And nothing is lost when it comes back.
    assert {key for key, *_ in shown(client, flow_run)} == {
        "weights-sync-sparks-worker1",
        "endpoint-sparks",
        "report-sparks",
    }
    assert client.read_flow_run(flow_run).tags == ["cluster:sparks"]


def _this_run() -> UUID:
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None
    return context.flow_run.id
