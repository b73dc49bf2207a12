"""Set a cluster up on a Prefect server: everything checked here first, then object by object."""

import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.settings import PREFECT_API_URL

from blocks import Cluster, Nightly
from flows.registration import automations, basics, deployments, schedule
from flows.registration.changes import Change, Registration, outcome_of
from flows.registration.templates import DEPLOYMENTS, ROOT, filled_in
from tasks.errors import InvalidSpec, SparkrailError
from tasks.inventory import CLUSTERS, load_cluster

# Fills the file for a spec without a schedule; it is never registered.
NEVER = Nightly(cron="0 4 * * *", timezone="Etc/UTC")


def register(cluster: str, *, notify: str | None = None) -> Registration:
    """Create or update what a cluster needs on the Prefect server; twice changes nothing."""
    started = time.monotonic()
    name = cluster
    changes: list[Change] = []
    warnings: list[str] = []
    problem: SparkrailError | None = None
    try:
        spec = load_cluster(cluster)
        name = spec.name
        warnings += check_schedule(spec, datetime.now(UTC))
        for change in _on_the_server(spec, parameter(cluster), notify):
            changes.append(change)
    except SparkrailError as error:
        problem = error
    return Registration(
        cluster=name,
        state="failed" if problem else "completed",
        outcome=outcome_of(changes),
        seconds=time.monotonic() - started,
        objects=tuple(changes),
        warnings=tuple(warnings),
        error=str(problem) if problem else None,
        exit_code=2 if isinstance(problem, InvalidSpec) else 1 if problem else 0,
    )


def check_schedule(spec: Cluster, now: datetime) -> list[str]:
    """What a person should know about the schedule; one that never comes is a mistake."""
    if spec.nightly is None:
        return []
    schedule.next_run(spec.nightly, now)
    return schedule.clock_changes(spec.nightly, now)


def parameter(cluster: str) -> str:
    """How a run, in another folder, finds the same spec: its NAME, or else an absolute path."""
    if "/" not in cluster and not cluster.endswith((".yaml", ".yml")):
        return cluster
    path = Path(cluster).expanduser().resolve()
    return path.stem if path == CLUSTERS / f"{path.stem}.yaml" else str(path)


def _on_the_server(spec: Cluster, place: str, notify: str | None) -> Iterator[Change]:
    url = PREFECT_API_URL.value()
    if not url:
        raise SparkrailError(
            "no Prefect API is configured",
            remedy="Start one with `prefect server start`, and "
            "export PREFECT_API_URL=http://127.0.0.1:4200/api",
        )
    try:
        with get_client(sync_client=True) as client:
            yield from _objects(client, spec, place, notify)
    except httpx.HTTPStatusError as error:
        raise _refused(url, error) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise SparkrailError(
            f"the Prefect API at {url} does not answer: {error}",
            remedy="Is `prefect server start` running there, and is PREFECT_API_URL its address "
            "with /api at the end? Registering again goes on where it stopped.",
        ) from error


def _refused(url: str, error: httpx.HTTPStatusError) -> SparkrailError:
    if error.response.status_code in (401, 403):
        return SparkrailError(
            f"the Prefect API at {url} does not let us in ({error.response.status_code})",
            remedy="export PREFECT_API_AUTH_STRING=USER:PASSWORD, the server's "
            "PREFECT_SERVER_API_AUTH_STRING.",
        )
    return SparkrailError(
        f"the Prefect API at {url} answers {error.response.status_code} to "
        f"{error.request.method} {error.request.url.path}",
        details=error.response.text[:500],
        remedy="Is PREFECT_API_URL a Prefect server's, with /api at the end, of the version that "
        "runs here (`prefect version`)?",
    )


def _objects(
    client: SyncPrefectClient, spec: Cluster, place: str, notify: str | None
) -> Iterator[Change]:
    """In the order in which they need each other; what can be refused is asked for first."""
    block = automations.notification_block(client, notify) if notify else None
    nightly = spec.nightly or NEVER
    variables = {
        # Where the checkout lies on the machine of the Prefect worker, if not where it lies here.
        "SPARKRAIL_HOME": os.environ.get("SPARKRAIL_HOME") or str(ROOT),
        "SPARKRAIL_CLUSTER": spec.name,
        "SPARKRAIL_SPEC": place,
        "SPARKRAIL_CRON": nightly.cron,
        "SPARKRAIL_TIMEZONE": nightly.timezone,
        "SPARKRAIL_RESTART": nightly.restart,
        "SPARKRAIL_WATCH_MINUTES": str(spec.watch.minutes),
    }
    document = filled_in(DEPLOYMENTS, variables)
    wanted = deployments.wanted(document, scheduled=spec.nightly is not None)
    have = deployments.existing(client, wanted, spec.name)
    wanted = deployments.named(wanted, spec.name, have)

    yield from basics.ensure_block_types(client)
    for pool in sorted({str(each.fields["work_pool_name"]) for each in wanted}):
        yield basics.ensure_pool(client, pool)
    for each in wanted:
        yield from deployments.ensure_deployment(client, each, have.get(each.full_name))
    scheduled = next(each for each in wanted if deployments.NIGHTLY in each.schedules)
    variables["SPARKRAIL_NIGHTLY"] = scheduled.name
    yield from automations.ensure_automations(client, variables, block)
