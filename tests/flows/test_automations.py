"""The automations that `sparkrail register` makes, at work on a real Prefect server."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State
from prefect.events.schemas.automations import AutomationCore, EventTrigger
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled, Completed, Crashed, Failed, Pending, Running, Scheduled

from flows.register import register
from tests.lab.prefect_processes import Processes
from tests.lab.product import poll
from tests.unit.http_server import Server, serving
from tests.unit.specs import DOCUMENT, merged

NAME = "watched"
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
    return {
        plain: name for plain in ("on-demand", "nightly") for name in made if plain in name
    }


@pytest.fixture
def rung(bell: Server, client: SyncPrefectClient, names: dict[str, str]) -> Iterator[Any]:
    """What a test has made the bell say."""
    assert client and names
    already = len(bell.asked)
    yield lambda: [body for _, body, _ in bell.asked[already:]]


def shorten(client: SyncPrefectClient, name: str) -> None:
    """As it is registered, but with less patience."""
    (have,) = client.read_automations_by_name(f"sparkrail {NAME}: {name}")
    assert isinstance(have.trigger, EventTrigger)
    trigger = have.trigger.model_copy(update={"within": SOON})
    want = AutomationCore.model_validate(have.model_dump(exclude={"id"}))
    client.update_automation(have.id, want.model_copy(update={"trigger": trigger}))


def start(client: SyncPrefectClient, deployment: str, state: State[Any]) -> UUID:
    found = client.read_deployment_by_name(deployment)
    return client.create_flow_run_from_deployment(found.id, state=state).id


def put(client: SyncPrefectClient, run: UUID, *states: State[Any]) -> None:
    for state in states:
        client.set_flow_run_state(run, state, force=True)


def subjects(said: list[dict[str, str]]) -> list[str]:
    return [each["subject"].removeprefix(f"sparkrail {NAME}: ") for each in said]
