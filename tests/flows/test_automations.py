"""The automations that `sparkrail register` makes, at work on a real Prefect server."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
import yaml
from prefect import flow
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State
from prefect.events.schemas.automations import AutomationCore, EventTrigger
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled, Completed, Failed, Pending, Running, Scheduled

from flows.register import register
from tests.flows.clusters import Spec
from tests.lab.prefect_processes import Processes
from tests.lab.product import poll
from tests.unit.http_server import Server, serving
from tests.unit.specs import DOCUMENT, merged

NAME = "watched"
Rung = Callable[[], list[dict[str, str]]]
SOON = timedelta(seconds=10)  # The least that Prefect allows for what did not come.


@pytest.fixture(scope="module")
def bell() -> Iterator[Server]:
    """Where notifications arrive."""
    with serving({"/": (200, b"")}) as server:
        yield server


@pytest.fixture(scope="module")
def head() -> Iterator[socket.socket]:
    """A head node that accepts connections and says nothing, so that a deploy hangs."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield silent


@pytest.fixture(scope="module")
def names(
    processes: Processes,
    first: Spec,  # noqa: ARG001 - it has the plain names
    bell: Server,
    head: socket.socket,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, str]:
    """The cluster is registered; its deployments by their plain names."""
    port = head.getsockname()[1]
    here = {"address": "127.0.0.1", "port": port}
    path = tmp_path_factory.mktemp("watched") / f"{NAME}.yaml"
    spec: dict[str, Any] = merged(
        DOCUMENT, {"name": NAME, "head": here, "ssh": {"connect_timeout": 60}}
    )
    path.write_text(yaml.safe_dump(spec))
    with temporary_settings({PREFECT_API_URL: f"{processes.ui}/api"}):
        CustomWebhookNotificationBlock(
            name="bell",
            url=f"http://127.0.0.1:{bell.port}/",
            json_data={"subject": "{{subject}}", "body": "{{body}}"},
        ).save("bell", overwrite=True)
        registration = register(str(path), notify="custom-webhook/bell")
    assert registration.error is None
    made = [each.name for each in registration.objects if each.kind == "deployment"]
    return {plain: name for plain in ("on-demand", "nightly") for name in made if plain in name}


@pytest.fixture
def rung(bell: Server) -> Rung:
    """What a test has made the bell say."""
    already = len(bell.asked)
    return lambda: [body for _, body, _ in bell.asked[already:]]


def shorten(client: SyncPrefectClient, name: str) -> None:
    """As it is registered, but with less patience."""
    (have,) = client.read_automations_by_name(f"sparkrail {NAME}: {name}")
    assert isinstance(have.trigger, EventTrigger)
    trigger = have.trigger.model_copy(update={"within": SOON})
    want = AutomationCore.model_validate(have.model_dump(exclude={"id", "owner_resource"}))
    client.update_automation(have.id, want.model_copy(update={"trigger": trigger}))


def start(client: SyncPrefectClient, deployment: str, state: State[Any]) -> UUID:
    found = client.read_deployment_by_name(deployment)
    return client.create_flow_run_from_deployment(found.id, state=state).id


def put(client: SyncPrefectClient, run: UUID, *states: State[Any]) -> None:
    for state in states:
        client.set_flow_run_state(run, state, force=True)


def subjects(said: list[dict[str, str]]) -> list[str]:
    return [each["subject"].removeprefix(f"sparkrail {NAME}: ") for each in said]


def heartbeat(client: SyncPrefectClient, run: UUID) -> None:
    """As the process of a flow run sends it."""
    event = {
        "occurred": datetime.now(UTC).isoformat(),
        "event": "prefect.flow-run.heartbeat",
        "resource": {"prefect.resource.id": f"prefect.flow-run.{run}"},
        "related": [
            {"prefect.resource.id": f"prefect.tag.cluster:{NAME}", "prefect.resource.role": "tag"}
        ],
        "id": str(uuid4()),
    }
    client.request("POST", "/events", json=[event])


def test_a_deploy_that_fails_and_the_first_that_is_fine_again(
    client: SyncPrefectClient, names: dict[str, str], rung: Rung
) -> None:
    run = start(client, names["on-demand"], Pending())
    put(client, run, Running(), Failed(message="serve on head: out of memory"))
    (said,) = poll(rung)
    assert subjects([said]) == ["deploy failed"]
    assert "Failed\nserve on head: out of memory\n" in said["body"]

    dry, fine, also_fine = (start(client, names["on-demand"], Pending()) for _ in range(3))
    put(client, dry, Running(), Completed(name="Planned"))
    put(client, fine, Running(), Completed(name="Unchanged", message="watched: unchanged in 3 s"))
    poll(lambda: len(rung()) > 1)
    put(client, also_fine, Running(), Completed(name="Changed"))
    run = start(client, names["on-demand"], Pending())
    put(client, run, Running(), Failed(name="RolledBack", message="restored"))
    poll(lambda: len(rung()) > 2)
    run = start(client, names["on-demand"], Pending())
    put(client, run, Running(), Failed(name="Broken", message="all is stopped"))
    poll(lambda: len(rung()) > 3)
    assert subjects(rung()) == [
        "deploy failed",
        "deploys work again",
        "rolled back to the last good release",
        "broken, the model does not answer",
    ]
    assert "Unchanged\nwatched: unchanged in 3 s\n" in rung()[1]["body"]


def test_a_run_of_another_flow_or_cluster_rings_nothing(
    client: SyncPrefectClient, names: dict[str, str], rung: Rung
) -> None:
    @flow(name="check")
    def check() -> None:
        """Nothing."""

    other = client.create_flow_run(check, tags=[f"cluster:{NAME}"]).id
    put(client, other, Failed(message="another flow's"))
    run = start(client, names["on-demand"], Pending())
    client.update_flow_run(run, tags=["cluster:another"])
    put(client, run, Failed(message="it has the deployment's tag yet"))
    poll(rung)
    assert [each["body"].splitlines()[1] for each in rung()] == ["it has the deployment's tag yet"]


def test_the_nightly_run_that_gives_way(
    client: SyncPrefectClient, names: dict[str, str], rung: Rung
) -> None:
    """Prefect cancels it by itself, with this message."""
    first = start(client, names["nightly"], Scheduled())
    client.set_flow_run_state(first, Pending())
    second = start(client, names["nightly"], Scheduled())
    client.set_flow_run_state(second, Pending())
    state = client.read_flow_run(second).state
    assert state and state.type.value == "CANCELLED"
    by_hand = start(client, names["nightly"], Pending())
    put(client, by_hand, Cancelled(message="by a person"))
    poll(rung)
    put(client, first, Running(), Failed(message="the last"))
    poll(lambda: len(rung()) > 1)
    assert subjects(rung()) == [
        "the nightly redeploy gave way to one that still runs",
        "deploy failed",
    ]


def test_the_nightly_run_that_does_not_start(
    client: SyncPrefectClient, names: dict[str, str], rung: Rung
) -> None:
    """No Prefect worker is running; the server itself finds the run late."""
    shorten(client, "nightly did not start")
    due: State[Any] = Scheduled(scheduled_time=datetime.now(UTC) - timedelta(seconds=30))
    on_demand = start(client, names["on-demand"], due)
    nightly = start(client, names["nightly"], due)
    (said,) = poll(rung, timeout=60)
    assert subjects([said]) == ["the nightly redeploy did not start"]
    assert "is Late.\nIs a Prefect worker of the pool sparkrail running" in said["body"]
    put(client, nightly, Cancelled())
    put(client, on_demand, Cancelled())


def test_a_run_that_falls_silent_has_crashed_and_one_that_ended_has_not(
    client: SyncPrefectClient, names: dict[str, str], rung: Rung
) -> None:
    shorten(client, "crashed")
    ended, silent = (start(client, names["on-demand"], Pending()) for _ in range(2))
    put(client, ended, Running())
    put(client, silent, Running())
    heartbeat(client, ended)
    put(client, ended, Completed(name="Planned"))
    heartbeat(client, silent)

    state = poll(lambda: crashed(client, silent), timeout=60)
    assert state and state.message and state.message.startswith("No heartbeat for 90 s")
    assert client.read_flow_run(ended).state_name == "Planned"
    poll(rung)
    assert subjects(rung()) == ["deploy failed"]


def test_a_flow_that_is_killed_with_its_worker(
    client: SyncPrefectClient, processes: Processes, names: dict[str, str]
) -> None:
    shorten(client, "crashed")
    processes.start_worker()
    try:
        run = start(client, names["on-demand"], Scheduled())
        poll(lambda: heard(client, run), timeout=300, every=0.5)
    finally:
        worker = processes.is_running("worker")
        for pid in (worker, *descendants(worker)):
            os.kill(pid, signal.SIGKILL)
    state = poll(lambda: crashed(client, run), timeout=90)
    assert state and state.message and state.message.startswith("No heartbeat for 90 s")


def crashed(client: SyncPrefectClient, run: UUID) -> State[Any] | None:
    state = client.read_flow_run(run).state
    return state if state and state.is_crashed() else None


def heard(client: SyncPrefectClient, run: UUID) -> bool:
    asked = {
        "event": {"name": ["prefect.flow-run.heartbeat"]},
        "resource": {"id": [f"prefect.flow-run.{run}"]},
    }
    said = client.request("POST", "/events/filter", json={"filter": asked})
    return bool(said.json()["total"])


def descendants(pid: int) -> list[int]:
    """All processes below one."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [each for child in map(int, children) for each in (child, *descendants(child))]
