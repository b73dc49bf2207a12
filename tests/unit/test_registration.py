"""Registering a cluster with Prefect: what is decided before a server is asked."""

from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, get_args
from zoneinfo import ZoneInfo

import pytest
import yaml
from prefect.events.schemas.automations import AutomationCore, EventTrigger

from blocks import Nightly
from flows import register as registering
from flows.registration import schedule
from flows.registration.automations import NOBODY, NOTIFY
from flows.registration.changes import Change, outcome_of
from flows.registration.deployments import suffix
from flows.registration.templates import AUTOMATIONS, filled_in
from flows.steps import as_state
from tasks.errors import InvalidSpec, SparkrailError
from tasks.inventory import CLUSTERS, load_cluster
from tasks.report import Report

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
NAMES = ("deploy/on-demand", "deploy/nightly")


# --- the schedule


def nightly(cron: str, timezone: str) -> Nightly:
    return Nightly(cron=cron, timezone=timezone)


def test_the_next_run_is_on_the_clock_of_its_zone() -> None:
    run = schedule.next_run(nightly("0 4 * * *", "Asia/Tokyo"), NOW)
    assert run.isoformat() == "2026-12-01T04:00:00+09:00"


@pytest.mark.parametrize("cron", ["0 4 30 2 *", "0 4 31 6 *"])
def test_a_schedule_that_never_comes_is_a_mistake(cron: str) -> None:
    with pytest.raises(InvalidSpec, match=r"^nightly.cron: .* never comes"):
        schedule.next_run(nightly(cron, "Etc/UTC"), NOW)


def test_a_leap_day_comes() -> None:
    assert schedule.next_run(nightly("0 4 29 2 *", "Etc/UTC"), NOW).date() == date(2028, 2, 29)


@pytest.mark.parametrize(
    ("cron", "timezone", "said"),
    [
        pytest.param("0 4 * * *", "Europe/Berlin", [], id="outside"),
        pytest.param("0 3 * * *", "Europe/Berlin", [], id="the end of the hour is outside"),
        pytest.param("30 2 * * *", "Asia/Tokyo", [], id="a zone without clock changes"),
        pytest.param(
            "30 2 * * *",
            "Europe/Berlin",
            [
                "skip 02:00 to 03:00 on 2027-03-28, and 02:30 with it: that run comes later",
                "repeat 02:00 to 03:00 on 2027-10-31, and 02:30 with it: which of the two counts",
            ],
            id="within both",
        ),
        pytest.param(
            "0 2 * * *", "America/New_York", ["skip 02:00 to 03:00"], id="where only one is hit"
        ),
        pytest.param(
            "15 2 * * *", "Australia/Lord_Howe", ["skip 02:00 to 02:30"], id="half an hour"
        ),
        pytest.param("30 2 * * 1", "Europe/Berlin", [], id="never on the day of a change"),
    ],
)
def test_clock_changes(cron: str, timezone: str, said: list[str]) -> None:
    lines = schedule.clock_changes(nightly(cron, timezone), NOW)
    assert len(lines) == len(said)
    for line, words in zip(lines, said, strict=True):
        assert words in line


@pytest.mark.parametrize("timezone", ["Europe/Berlin", "America/New_York", "America/Santiago"])
def test_the_days_of_clock_changes_have_exactly_one_run(timezone: str) -> None:
    """Of the hour that the example recommends, by the code that the server schedules with."""
    example = load_cluster("example").nightly
    assert example
    start = datetime(2027, 1, 1, tzinfo=UTC)
    runs = [
        time.astimezone(ZoneInfo(timezone))
        for quarter in range(4)
        for time in schedule._times(
            example.cron, timezone, start + quarter * DAYS, start + (quarter + 1) * DAYS - SECOND
        )
    ]
    assert len(runs) == len({run.date() for run in runs}) == 4 * DAYS.days
    assert {(run.hour, run.minute) for run in runs} == {(4, 0)}
    assert len({run.utcoffset() for run in runs}) == 2


DAYS, SECOND = timedelta(days=91), timedelta(seconds=1)


# --- names


@pytest.mark.parametrize(
    ("owners", "expected"),
    [
        pytest.param({}, "", id="the first cluster"),
        pytest.param(dict.fromkeys(NAMES, "b"), "", id="registered under the plain names"),
        pytest.param(dict.fromkeys(NAMES, "a"), "-b", id="the plain names are another's"),
        pytest.param({"deploy/nightly": "a"}, "-b", id="one of them is another's"),
        pytest.param(
            dict.fromkeys(NAMES, "a") | {f"{name}-b": "b" for name in NAMES}, "-b", id="the second"
        ),
        pytest.param({f"{name}-b": "b" for name in NAMES}, "-b", id="the first one has gone"),
        pytest.param({"deploy/on-demand": "b"}, "", id="half registered"),
    ],
)
def test_names_of_deployments(owners: Mapping[str, str], expected: str) -> None:
    assert suffix("b", NAMES, owners) == expected


def test_a_name_that_belongs_to_another_cluster_is_refused() -> None:
    owners = {"deploy/on-demand": "a", "deploy/nightly-b": "c"}
    with pytest.raises(SparkrailError, match="deploy/nightly-b belongs to the cluster c, not to b"):
        suffix("b", NAMES, owners)


def test_how_a_run_finds_the_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert registering.parameter("sparks") == "sparks"
    assert registering.parameter(str(CLUSTERS / "example.yaml")) == "example"
    assert registering.parameter("./sparks.yaml") == str(tmp_path / "sparks.yaml")


# --- automations


def automations() -> dict[str, AutomationCore]:
    variables = {"SPARKRAIL_CLUSTER": "b", "SPARKRAIL_NIGHTLY": "nightly-b", NOTIFY: str(NOBODY)}
    document = filled_in(AUTOMATIONS, variables)
    made = [AutomationCore.model_validate(each) for each in document["automations"]]
    return {each.name.removeprefix("sparkrail b: "): each for each in made}


def trigger(name: str) -> EventTrigger:
    found = automations()[name].trigger
    assert isinstance(found, EventTrigger)
    return found


def test_the_automations() -> None:
    assert list(automations()) == [
        "crashed",
        "failed",
        "rolled back",
        "broken",
        "nightly did not start",
        "nightly gave way",
        "recovered",
    ]


def test_each_automation_is_one_cluster_s() -> None:
    tag = {"prefect.resource.role": "tag", "prefect.resource.id": "prefect.tag.cluster:b"}
    for name, automation in automations().items():
        assert automation.tags == ["cluster:b"]
        related = trigger(name).match_related
        specs = related if isinstance(related, list) else [related]
        assert tag in [each.model_dump() for each in specs if not isinstance(each, dict)]


def test_each_automation_is_described() -> None:
    assert all(each.description.endswith(".") for each in automations().values())


def test_what_the_server_fills_in_is_left_alone() -> None:
    text = str(automations()["failed"].actions[0].model_dump())
    assert "{{ flow_run.name }}" in text
    assert "$" not in text


def test_a_deploy_that_was_fine_is_a_recovery() -> None:
    fine = {"changed", "unchanged"}
    assert trigger("recovered").expect == {f"prefect.flow-run.{word.capitalize()}" for word in fine}
    outcomes: Any = get_args(Report.model_fields["outcome"].annotation)
    assert fine <= set(outcomes)


@pytest.mark.parametrize(
    ("outcome", "name"), [("rolled-back", "rolled back"), ("broken", "broken")]
)
def test_a_state_has_the_name_that_automations_wait_for(outcome: Any, name: str) -> None:
    state = as_state(Report(cluster="b", state="failed", outcome=outcome, seconds=1, error="why"))
    assert trigger(name).expect == {f"prefect.flow-run.{state.name}"}
    assert state.type.value == "FAILED"


def test_a_run_may_miss_two_heartbeats() -> None:
    document: dict[str, Any] = yaml.safe_load(
        (AUTOMATIONS.parent / "prefect.yaml").read_text(encoding="utf-8")
    )
    for deployment in document["deployments"]:
        env = deployment["work_pool"]["job_variables"]["env"]
        beat = int(env["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"])
        assert trigger("crashed").within == timedelta(seconds=3 * beat)


# --- what is told


def test_outcome_of() -> None:
    def changes(*outcomes: Any) -> list[Change]:
        return [Change(kind="pool", name="x", outcome=outcome) for outcome in outcomes]

    assert outcome_of([]) == "unchanged"
    assert outcome_of(changes("unchanged", "left")) == "unchanged"
    for outcome in ("created", "updated", "removed"):
        assert outcome_of(changes("unchanged", outcome)) == "changed"


def test_nothing_is_asked_of_a_server_with_a_bad_spec(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: bad\nnightly: {cron: 0 4 * * *, timezone: Berlin}\n")
    registration = registering.register(str(bad))
    assert (registration.state, registration.exit_code, registration.objects) == ("failed", 2, ())
    assert registration.error
    assert (
        'nightly.timezone: "Berlin" — no IANA time zone (did you mean Europe/Berlin?); '
        "allowed: such as Europe/Berlin, America/New_York or Etc/UTC"
    ) in registration.error
