"""Prefect deployments and their schedules: what `prefect.yaml` wants, and what is there."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterName,
    FlowFilter,
    FlowFilterName,
)
from prefect.client.schemas.objects import ConcurrencyOptions
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema

from flows.registration.changes import Change, Outcome
from flows.registration.templates import ROOT
from tasks.errors import SparkrailError

NIGHTLY = "nightly"
SWITCHED_OFF = "off until it is switched on in the Prefect UI"
NO_SCHEDULE = "none: the spec has no nightly part"


@dataclass(frozen=True)
class Wanted:
    """A deployment as the file describes it."""

    flow: str
    name: str
    fields: dict[str, Any]
    schedules: dict[str, CronSchedule | None]  # By their slug; None where there must be none.
    off: frozenset[str] = frozenset()  # Those that begin switched off.

    @property
    def full_name(self) -> str:
        return f"{self.flow}/{self.name}"


def wanted(document: dict[str, Any], *, scheduled: bool) -> list[Wanted]:
    """All deployments of the file; without a `nightly` in the spec, that one has no schedule."""
    return [_wanted(each, document["pull"], scheduled) for each in document["deployments"]]


def _wanted(each: dict[str, Any], pull: list[dict[str, Any]], scheduled: bool) -> Wanted:
    flow: Any = load_flow_from_entrypoint(str(ROOT / each["entrypoint"]))
    limit = each.get("concurrency_limit")
    options = {key: value for key, value in (limit or {}).items() if key != "limit"}
    fields = {
        "description": each["description"],
        "entrypoint": each["entrypoint"],
        "parameters": each["parameters"],
        "tags": each["tags"],
        "pull_steps": pull,
        "work_pool_name": each["work_pool"]["name"],
        "job_variables": each["work_pool"]["job_variables"],
        "parameter_openapi_schema": parameter_schema(flow).model_dump(exclude_unset=True),
        "enforce_parameter_schema": True,
        "concurrency_limit": limit and limit["limit"],
        "concurrency_options": ConcurrencyOptions(**options) if limit else None,
    }
    schedules = {
        at["slug"]: CronSchedule(cron=at["cron"], timezone=at["timezone"])
        if scheduled or at["slug"] != NIGHTLY
        else None
        for at in each.get("schedules", [])
    }
    off = frozenset(at["slug"] for at in each.get("schedules", []) if not at.get("active", True))
    return Wanted(flow.name, each["name"], fields, schedules, off)


def existing(
    client: SyncPrefectClient, want: Sequence[Wanted], cluster: str
) -> dict[str, DeploymentResponse]:
    """What is registered under these names, plain or with the cluster's."""
    flows = sorted({each.flow for each in want})
    names = [name for each in want for name in (each.name, f"{each.name}-{cluster}")]
    ids = {each.id: each.name for each in client.read_flows(flow_filter=_flows(flows))}
    found = client.read_deployments(
        flow_filter=_flows(flows),
        deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=names)),
    )
    return {f"{ids[each.flow_id]}/{each.name}": each for each in found}


def _flows(names: list[str]) -> FlowFilter:
    return FlowFilter(name=FlowFilterName(any_=names))


def named(
    want: Sequence[Wanted], cluster: str, have: Mapping[str, DeploymentResponse]
) -> list[Wanted]:
    """With the names that this cluster's deployments have, or get."""
    owners = {name: owner(each) for name, each in have.items()}
    end = suffix(cluster, [each.full_name for each in want], owners)
    return [replace(each, name=each.name + end) for each in want]


def suffix(cluster: str, names: Sequence[str], owners: Mapping[str, str]) -> str:
    """What follows the names: nothing for the first cluster on a server, `-CLUSTER` for others.

    A cluster that is registered keeps its names, whatever became of the others.
    """
    others = any(owners.get(name, cluster) != cluster for name in names)
    plain = any(owners.get(name) == cluster for name in names)
    suffixed = any(owners.get(f"{name}-{cluster}") == cluster for name in names)
    if not others and (plain or not suffixed):
        return ""
    for name in (f"{name}-{cluster}" for name in names):
        if owners.get(name, cluster) != cluster:
            raise SparkrailError(
                f"deployment {name} belongs to the cluster {owners[name]}, not to {cluster}",
                remedy="Rename or delete it in the Prefect UI, and register again.",
            )
    return f"-{cluster}"


def owner(have: DeploymentResponse) -> str:
    """The cluster whose deployment it is, by its tag or else by its parameter."""
    tags = [tag.removeprefix("cluster:") for tag in have.tags if tag.startswith("cluster:")]
    return tags[0] if tags else str(have.parameters.get("cluster", ""))


def ensure_deployment(
    client: SyncPrefectClient, want: Wanted, have: DeploymentResponse | None
) -> Iterator[Change]:
    """Only what differs is written: an update would drop the runs that are already scheduled."""
    if have is None:
        flow = client.create_flow_from_name(want.flow)
        made = client.create_deployment(flow_id=flow, name=want.name, **want.fields)
        yield Change(kind="deployment", name=want.full_name, outcome="created")
        have = client.read_deployment(made)
    else:
        differing = _differing(want, have)
        if differing:
            client.update_deployment(have.id, DeploymentUpdate(**differing))
        yield Change(
            kind="deployment",
            name=want.full_name,
            outcome="updated" if differing else "unchanged",
            detail=", ".join(differing),
        )
    yield from _ensure_schedules(client, want, have)


def _differing(want: Wanted, have: DeploymentResponse) -> dict[str, Any]:
    limit = have.global_concurrency_limit
    # The field of that name is deprecated there, and always None.
    observed = {name: getattr(have, name) for name in want.fields if name != "concurrency_limit"}
    observed["concurrency_limit"] = limit and limit.limit
    return {name: value for name, value in want.fields.items() if observed[name] != value}


def _ensure_schedules(
    client: SyncPrefectClient, want: Wanted, have: DeploymentResponse
) -> Iterator[Change]:
    """Schedules of ours, known by their slug; whether they are paused is the user's choice."""
    there = {each.slug: each for each in have.schedules}
    for slug, schedule in want.schedules.items():
        found = there.get(slug)
        detail = f"{schedule.cron} {schedule.timezone}" if schedule else NO_SCHEDULE
        outcome: Outcome = "unchanged"
        if schedule and found is None:
            create = DeploymentScheduleCreate(
                schedule=schedule, slug=slug, active=slug not in want.off
            )
            client.create_deployment_schedules(have.id, [create])
            outcome = "created"
        elif schedule and found and found.schedule != schedule:
            client.update_deployment_schedule(have.id, found.id, schedule=schedule)
            outcome = "updated"
        elif found and schedule is None:
            client.delete_deployment_schedule(have.id, found.id)
            outcome = "removed"
        off = slug in want.off and not (found and found.active)
        if schedule and off:
            detail += f", {SWITCHED_OFF}"
        elif schedule and (have.paused or (found and not found.active)):
            detail += ", paused"
        yield Change(kind="schedule", name=want.full_name, outcome=outcome, detail=detail)
