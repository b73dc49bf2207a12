"""`deployments/prefect.yaml`: what is registered, and that it can be found and scheduled."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow
from prefect.client.schemas.schedules import CronSchedule

ROOT = Path(__file__).parents[2]
# As they may be when a cluster is registered.
VALUES = {
    "HOME": "/srv/sparkrail",
    "CLUSTER": "sparks",
    "SPEC": "sparks",
    "CRON": "0 4 * * *",
    "TIMEZONE": "Europe/Berlin",
    "RESTART": "always",
    "WATCH_MINUTES": "5",
}


def filled_in(text: str) -> str:
    for name, value in VALUES.items():
        text = text.replace(f"{{{{ $SPARKRAIL_{name} }}}}", value)
    assert "{{" not in text
    return text


DOCUMENT: dict[str, Any] = yaml.safe_load(
    filled_in((ROOT / "deployments" / "prefect.yaml").read_text())
)
DEPLOYMENTS: list[dict[str, Any]] = DOCUMENT["deployments"]
NAMES = [each["name"] for each in DEPLOYMENTS]


def flow_of(deployment: dict[str, Any]) -> Flow[..., Any]:
    file, _, name = deployment["entrypoint"].partition(":")
    assert (ROOT / file).is_file()
    found = getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), name)
    assert isinstance(found, Flow)
    return found


def test_the_deployments() -> None:
    assert NAMES == ["on-demand", "nightly", "every-few-minutes"]
    assert [flow_of(each).name for each in DEPLOYMENTS] == ["deploy", "deploy", "watch"]


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=NAMES)
def test_its_parameters_are_parameters_of_its_flow(deployment: dict[str, Any]) -> None:
    flow_of(deployment).validate_parameters(deployment["parameters"])
    assert deployment["work_pool"]["name"] == "sparkrail"
    assert deployment["tags"] == ["cluster:sparks"]


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=NAMES)
def test_every_schedule_has_a_slug_and_a_timezone(deployment: dict[str, Any]) -> None:
    """Without a slug, registering again would add a second schedule."""
    for schedule in deployment.get("schedules", []):
        assert set(schedule) - {"active"} == {"cron", "timezone", "slug"}
        assert CronSchedule(cron=schedule["cron"], timezone=schedule["timezone"])


def test_the_nightly_one_runs_once_a_night_and_never_beside_itself() -> None:
    nightly = DEPLOYMENTS[1]
    assert nightly["parameters"] == {"cluster": "sparks", "restart": "always"}
    assert [each["slug"] for each in nightly["schedules"]] == ["nightly"]
    assert nightly["concurrency_limit"] == {
        "limit": 1,
        "collision_strategy": "CANCEL_NEW",
        "grace_period_seconds": 60,
    }


def test_the_watch_is_off_at_first() -> None:
    [schedule] = DEPLOYMENTS[2]["schedules"]
    assert (schedule["slug"], schedule["cron"], schedule["active"]) == (
        "watch",
        "*/5 * * * *",
        False,
    )


def test_flows_run_from_the_checkout() -> None:
    step = {"prefect.deployments.steps.set_working_directory": {"directory": "/srv/sparkrail"}}
    assert DOCUMENT["pull"] == [step]
