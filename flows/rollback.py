"""Back to a release on record, by hand."""

from collections.abc import Mapping
from typing import Any

from prefect import flow

from flows.planning import driver_of, tell_facts
from flows.recovery import (
    Good,
    bring_back,
    clear_all,
    hold,
    keeps_ray,
    restored_on_failure,
    rolled_back_on_failure,
    whole,
)
from flows.steps import Steps, as_state, conduct, named
from tasks.canary import watch_canary
from tasks.errors import NotReady
from tasks.failed_releases import failure, note_failure, note_rolled_back
from tasks.locks import take_lock
from tasks.node_facts import NodeFacts
from tasks.record_keeping import record_release
from tasks.records import OnNode, Release, now
from tasks.releases import observe_containers
from tasks.rollbacks import choose, recorded, refuse_gone, runs
from tasks.secret_values import load_secrets
from tasks.topology import endpoint_of


@flow(name="rollback", flow_run_name=named("rollback"), persist_result=False)
def rollback(cluster: str, release: str = "", dry_run: bool = False) -> Any:
    """Start a release on record again; the one that it replaces is not tried again by itself.

    Args:
        cluster: Name of a file in deployments/clusters, or a path.
        release: The release, or how its name begins; the newest that does not run by default.
        dry_run: Say what would be done, and change nothing.
    """
    return as_state(conduct(cluster, going_back(release), dry_run=dry_run))


def going_back(release: str = "") -> Any:
    """The body of the flow for one release."""
    return lambda steps: go_back(steps, release)


def go_back(steps: Steps, wanted: str) -> None:
    """What can be checked is checked before anything is stopped; a failure ends where it began."""
    load_secrets(steps.cluster)
    steps.one(take_lock)
    rows: list[Release] = steps.one(recorded).data
    running = [each for each in rows[:1] if runs(each, observe_containers(steps.cluster))]
    release = choose(steps.cluster.name, rows, wanted, running)
    good, held = hold(steps, release)
    refuse_gone(release, held)
    if good is None:
        raise NotReady(
            f"release {release.title} was recorded by an older sparkrail, without what "
            "is needed to start it again"
        )
    load_secrets(good.cluster)
    facts = tell_facts(steps.on(good.cluster))
    lost = [each for each in facts.values() if not isinstance(each, NodeFacts)]
    if lost:
        raise lost[0]
    before = whole(steps, running[0]) if running and running[0] != release else None
    steps.endpoint = endpoint_of(good.cluster)
    if not steps.run.dry_run:
        start(steps, good, before, nodes_now(good.release, facts))
    steps.one(note_rolled_back, digest=release.digest)
    if rows[0].digest != release.digest:
        left = failure(rows[0].digest, steps.run, "by-hand")
        steps.one(note_failure, failed=left)


def nodes_now(release: Release, facts: Mapping[str, Any]) -> dict[str, OnNode]:
    """What the record keeps of the nodes that is another now."""
    return {
        name: node.model_copy(
            update={"boot_id": facts[name].boot_id, "driver": driver_of(facts[name])}
        )
        for name, node in release.nodes.items()
    }


def start(steps: Steps, good: Good, before: Good | None, nodes: Mapping[str, OnNode]) -> None:
    """Stop what runs, start the release, and put it on top of the record."""
    old = steps.on(good.cluster)
    with restored_on_failure(steps), rolled_back_on_failure(steps, before, good.release.digest):
        if before:
            steps.stops()
        clear_all(steps, good, ray_stays=keeps_ray(good))
        versions = bring_back(steps, good)
        canary = old.one(watch_canary, wanted=good.containers, last=None).data
    found = {"versions": versions, "canary": canary["figures"], "started": now(), "nodes": nodes}
    release = good.release.model_copy(update={**found, "at": now(), "run": steps.run.id})
    home = good.containers[good.cluster.head.name][0].folder.rpartition("/.sparkrail/")[0]
    old.one(record_release, home=home, release=release)
