"""`sparkrail register` against a real Prefect server: once, twice, and after a change."""

import itertools
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import (
    DeploymentScheduleCreate,
    DeploymentUpdate,
    WorkPoolCreate,
)
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterTags
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.events.schemas.automations import AutomationCore
from prefect.settings import PREFECT_API_URL, temporary_settings

from blocks.secrets import EngineSecrets
from flows import cli
from flows.registration.basics import ensure_pool
from flows.registration.changes import Registration
from flows.registration.templates import ROOT
from tasks.errors import SparkrailError
from tests.flows.clusters import NIGHTLY, Spec, outcomes
from tests.lab.prefect_processes import BIN, Processes

NOTIFICATIONS = [
    "failed",
    "rolled back",
    "broken",
    "nightly did not start",
    "nightly gave way",
    "recovered",
]
numbers = itertools.count()

Register = Callable[..., Registration]


@pytest.fixture
def spec(tmp_path: Path, client: SyncPrefectClient) -> Spec:  # noqa: ARG001
    """A further cluster, that no other test registers."""
    return Spec(tmp_path, f"sparks{next(numbers)}")


def changed(registration: Registration) -> dict[str, str]:
    return {
        name: outcome
        for name, outcome in outcomes(registration).items()
        if outcome not in ("unchanged", "left")
    }


def deployments(client: SyncPrefectClient, cluster: str) -> dict[str, DeploymentResponse]:
    found = client.read_deployments(
        deployment_filter=DeploymentFilter(tags=DeploymentFilterTags(all_=[f"cluster:{cluster}"]))
    )
    return {each.name: each for each in found}


def schedules(client: SyncPrefectClient, spec: Spec) -> list[DeploymentSchedule]:
    return deployments(client, spec.name)[f"nightly-{spec.name}"].schedules


def test_the_first_time_makes_everything_and_the_second_nothing(
    spec: Spec, client: SyncPrefectClient
) -> None:
    first, second = spec.register(), spec.register()
    name = spec.name
    assert changed(first) == {
        f"deployment deploy/on-demand-{name}": "created",
        f"deployment deploy/nightly-{name}": "created",
        f"schedule deploy/nightly-{name}": "created",
        f"deployment watch/every-few-minutes-{name}": "created",
        f"schedule watch/every-few-minutes-{name}": "created",
        f"automation sparkrail {name}: crashed": "created",
    }
    assert (first.outcome, first.exit_code, first.warnings) == ("changed", 0, ())
    assert changed(second) == {}
    assert outcomes(second).keys() == outcomes(first).keys()
    assert (second.outcome, second.exit_code) == ("unchanged", 0)
    assert sorted(deployments(client, name)) == [
        f"every-few-minutes-{name}",
        f"nightly-{name}",
        f"on-demand-{name}",
    ]
    assert len(schedules(client, spec)) == 1
    assert len(client.read_automations_by_name(f"sparkrail {name}: crashed")) == 1


def test_what_is_registered(spec: Spec, client: SyncPrefectClient) -> None:
    spec.register()
    mine = deployments(client, spec.name)
    for name, deployment in mine.items():
        flow = "oversee.py:watch" if name.startswith("every") else "deploy.py:deploy"
        nightly_ones = {"restart": "if-changed"} if name.startswith("nightly") else {}
        assert deployment.parameters == {"cluster": str(spec.path)} | nightly_ones
        assert deployment.tags == [f"cluster:{spec.name}"]
        assert deployment.work_pool_name == "sparkrail"
        assert deployment.entrypoint == f"flows/{flow}"
        assert deployment.job_variables == {"env": {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}}
        assert deployment.pull_steps == [
            {"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}
        ]
    (watch,) = mine[f"every-few-minutes-{spec.name}"].schedules
    assert (watch.slug, watch.active) == ("watch", False)
    assert watch.schedule == CronSchedule(cron="*/5 * * * *", timezone="Etc/UTC")
    (schedule,) = schedules(client, spec)
    assert (schedule.slug, schedule.active) == ("nightly", True)
    assert schedule.schedule == CronSchedule(**NIGHTLY)
    nightly = deployments(client, spec.name)[f"nightly-{spec.name}"]
    assert nightly.global_concurrency_limit and nightly.global_concurrency_limit.limit == 1
    assert nightly.concurrency_options
    assert nightly.concurrency_options.collision_strategy == "CANCEL_NEW"


def test_the_first_cluster_on_a_server_has_the_plain_names(
    first: Spec, client: SyncPrefectClient
) -> None:
    assert sorted(deployments(client, first.name)) == ["every-few-minutes", "nightly", "on-demand"]
    assert changed(first.register()) == {}


def test_by_hand_is_the_same(first: Spec, client: SyncPrefectClient, processes: Processes) -> None:
    """As the header of the file says."""
    before = deployments(client, first.name)
    values = {
        "SPARKRAIL_HOME": str(ROOT),
        "SPARKRAIL_CLUSTER": first.name,
        "SPARKRAIL_SPEC": str(first.path),
        "SPARKRAIL_CRON": NIGHTLY["cron"],
        "SPARKRAIL_TIMEZONE": NIGHTLY["timezone"],
        "SPARKRAIL_RESTART": "if-changed",
        "SPARKRAIL_WATCH_MINUTES": "5",
    }
    file = "deployments/prefect.yaml"
    subprocess.run(
        [BIN / "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", file],
        env={**processes.environment, **values},
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    assert changed(first.register()) == {}
    after = deployments(client, first.name)
    assert {each.id for each in after.values()} == {each.id for each in before.values()}


# --- the schedule


def test_another_hour_changes_the_schedule_in_place(spec: Spec, client: SyncPrefectClient) -> None:
    spec.register()
    (before,) = schedules(client, spec)
    again = spec.register({"cron": "30 5 * * *", "timezone": "Asia/Tokyo"})
    assert changed(again) == {f"schedule deploy/nightly-{spec.name}": "updated"}
    (after,) = schedules(client, spec)
    assert after.id == before.id
    assert after.schedule == CronSchedule(cron="30 5 * * *", timezone="Asia/Tokyo")


def pause_schedule(client: SyncPrefectClient, deployment: DeploymentResponse) -> None:
    (schedule,) = deployment.schedules
    client.update_deployment_schedule(deployment.id, schedule.id, active=False)


def pause_deployment(client: SyncPrefectClient, deployment: DeploymentResponse) -> None:
    client.pause_deployment(deployment.id)


@pytest.mark.parametrize("pause", [pause_schedule, pause_deployment])
def test_what_was_paused_in_the_ui_stays_paused(
    spec: Spec,
    client: SyncPrefectClient,
    pause: Callable[[SyncPrefectClient, DeploymentResponse], None],
) -> None:
    spec.register()

    def nightly() -> DeploymentResponse:
        return deployments(client, spec.name)[f"nightly-{spec.name}"]

    pause(client, nightly())
    paused = nightly()
    for hour, outcome in ("0 4 * * *", "unchanged"), ("0 5 * * *", "updated"):
        again = spec.register({"cron": hour, "timezone": "Europe/Berlin"})
        assert outcomes(again)[f"schedule deploy/nightly-{spec.name}"] == outcome
        line = next(each for each in again.objects if each.kind == "schedule")
        assert line.detail == f"{hour} Europe/Berlin, paused"
        after = nightly()
        assert after.paused == paused.paused
        assert after.schedules[0].active == paused.schedules[0].active
    client.update_deployment(after.id, DeploymentUpdate(description="by hand"))
    assert changed(spec.register({"cron": "0 5 * * *", "timezone": "Europe/Berlin"})) == {
        f"deployment deploy/nightly-{spec.name}": "updated"
    }
    assert nightly().paused == paused.paused


def test_without_a_nightly_part_nothing_runs_by_itself(
    spec: Spec, client: SyncPrefectClient
) -> None:
    first = spec.register(None)
    line = next(each for each in first.objects if each.kind == "schedule")
    assert (line.outcome, line.detail) == ("unchanged", "none: the spec has no nightly part")
    assert schedules(client, spec) == []
    spec.register()
    mine = deployments(client, spec.name)[f"nightly-{spec.name}"]
    own = DeploymentScheduleCreate(schedule=CronSchedule(cron="0 12 * * 0"), slug="sundays")
    client.create_deployment_schedules(mine.id, [own])
    again = spec.register(None)
    assert changed(again) == {f"schedule deploy/nightly-{spec.name}": "removed"}
    assert [each.slug for each in schedules(client, spec)] == ["sundays"]
    assert changed(spec.register(None)) == {}


def test_an_hour_that_clocks_skip_is_a_warning(spec: Spec) -> None:
    registration = spec.register({"cron": "30 2 * * *", "timezone": "Europe/Berlin"})
    assert registration.exit_code == 0
    assert len(registration.warnings) == 2
    assert all("clocks in Europe/Berlin" in line for line in registration.warnings)


# --- automations


@pytest.fixture(scope="module")
def ops(processes: Processes) -> Iterator[str]:
    """A notification block."""
    with temporary_settings({PREFECT_API_URL: f"{processes.ui}/api"}):
        block = CustomWebhookNotificationBlock(name="ops", url="http://127.0.0.1:9/")
        saved: Any = block.save("ops", overwrite=True)
        assert isinstance(saved, UUID)
        yield "custom-webhook/ops"


def test_notifications_need_a_block_and_are_left_without_one(
    spec: Spec, client: SyncPrefectClient, ops: str
) -> None:
    names = {f"automation sparkrail {spec.name}: {name}" for name in NOTIFICATIONS}
    assert not names & outcomes(spec.register()).keys()
    assert changed(spec.register(notify=ops)) == dict.fromkeys(names, "created")
    assert changed(spec.register(notify=ops)) == {}
    without = outcomes(spec.register())
    assert {without[name] for name in names} == {"left"}
    for name in names:
        assert len(client.read_automations_by_name(name.removeprefix("automation "))) == 1


def test_what_was_switched_off_in_the_ui_stays_off(spec: Spec, client: SyncPrefectClient) -> None:
    spec.register()
    name = f"sparkrail {spec.name}: crashed"
    (have,) = client.read_automations_by_name(name)
    client.pause_automation(have.id)
    line = next(each for each in spec.register().objects if each.kind == "automation")
    assert (line.outcome, line.detail) == ("unchanged", "switched off")
    other = AutomationCore.model_validate(have.model_dump(exclude={"id", "owner_resource"}))
    client.update_automation(
        have.id, other.model_copy(update={"description": "by hand", "enabled": False})
    )
    assert changed(spec.register()) == {f"automation {name}": "updated"}
    (after,) = client.read_automations_by_name(name)
    assert (after.enabled, after.id) == (False, have.id)
    assert after.description == have.description


def test_a_notification_block_that_is_not_there(spec: Spec) -> None:
    registration = spec.register(notify="slack-webhook/nobody")
    assert registration.exit_code == 1
    assert registration.objects == ()
    assert registration.error
    assert registration.error.startswith("--notify slack-webhook/nobody: there is no such block\n")


def test_a_block_that_cannot_notify(spec: Spec) -> None:
    saved: Any = EngineSecrets(api_key="k").save("no-bell", overwrite=True)
    assert saved
    registration = spec.register(notify="engine-secrets/no-bell")
    assert registration.error
    assert "a block of the type engine-secrets cannot notify" in registration.error


# --- what else may be wrong


@pytest.mark.parametrize(
    ("url", "said"),
    [
        pytest.param(None, "no Prefect API is configured\n", id="none"),
        pytest.param("http://127.0.0.1:9/api", "does not answer", id="none listens"),
        pytest.param("http://127.0.0.1:{port}", "answers 40", id="not the API"),
    ],
)
def test_without_a_prefect_api(
    processes: Processes, spec: Spec, url: str | None, said: str
) -> None:
    with temporary_settings({PREFECT_API_URL: url and url.format(port=processes.port)}):
        registration = spec.register()
    assert (registration.exit_code, registration.objects) == (1, ())
    assert registration.error
    assert said in registration.error
    assert "PREFECT_API_URL" in registration.error


def test_a_work_pool_of_another_type_is_refused(client: SyncPrefectClient) -> None:
    client.create_work_pool(WorkPoolCreate(name="clouds", type="docker"))
    with pytest.raises(SparkrailError, match="work pool clouds: its type is docker, and ours must"):
        ensure_pool(client, "clouds")


def test_the_command(spec: Spec, capsys: pytest.CaptureFixture[str]) -> None:
    spec.register()
    assert cli.main(["register", str(spec.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    row = ["deployment", f"deploy/on-demand-{spec.name}", "unchanged"]
    assert row in [line.split()[:3] for line in lines]
    assert lines[-1].startswith(f"{spec.name}: completed, unchanged, ")

    assert cli.main(["register", str(spec.path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    fields = "cluster state outcome seconds objects warnings error"
    assert list(document) == fields.split()
    assert document["objects"][0] == {
        "kind": "block type",
        "name": "ssh-credentials",
        "outcome": "unchanged",
        "detail": "",
    }
