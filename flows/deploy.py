"""Bring the model up on its nodes, or leave it exactly as it is when nothing has changed."""

from typing import Any

from prefect import flow

from flows.planning import (
    ask_engine,
    files_of,
    gather,
    release_of,
    remembering,
    wanted_of,
)
from flows.recovery import (
    kept_alive_when_refused,
    last_good,
    restored_on_failure,
    rolled_back_on_failure,
    start_all,
)
from flows.skip import skipped
from flows.steps import Restart, Steps, StepsFailed, as_state, call, conduct, named
from tasks import artifacts
from tasks.canary import watch_canary
from tasks.converge import Outcome
from tasks.errors import HostKeyRefused, LoginRefused, NodeUnreachable
from tasks.fabric_proof import prove_fabric
from tasks.failed_releases import close_breaker, refuse_failed
from tasks.images import ensure_image
from tasks.locks import take_lock
from tasks.preflight import preflight
from tasks.record_keeping import record_release
from tasks.records import Release, now
from tasks.releases import Decision, Wanted, decide
from tasks.scripts import relay_script
from tasks.secret_values import load_secrets
from tasks.serving import stop_old
from tasks.topology import endpoint_of, serve_container
from tasks.weights import ensure_weights


@flow(name="deploy", flow_run_name=named("deploy"), persist_result=False)
def deploy(
    cluster: str, dry_run: bool = False, restart: Restart = "if-changed", force: bool = False
) -> Any:
    """Deploy the model of a cluster spec over its nodes.

    Args:
        cluster: Name of a file in deployments/clusters, or a path.
        dry_run: Say what would be done, and change nothing.
        restart: if-changed leaves a healthy, equal release alone; always starts it anew.
        force: Try a release again that failed before. Retry does so in any case.
    """
    if unwanted := skipped():
        return unwanted
    return as_state(conduct(cluster, bring_up, dry_run=dry_run, restart=restart, force=force))


def bring_up(steps: Steps) -> None:
    """The whole story, in order; the running release is not touched before `stop`."""
    cluster, head, workers = steps.cluster, steps.cluster.head, steps.cluster.workers
    steps.endpoint = endpoint_of(cluster)

    load_secrets(cluster)  # While the Prefect API that started us is there.
    lock(steps)
    facts, engine = gather(steps)

    image, weights = steps.all([call(ensure_image, node=head), call(ensure_weights, node=head)])
    if cluster.image.source == "control" and image.status != "planned":
        engine = ask_engine(steps, facts[head.name].home, image.data["content"])
        steps.one(preflight, facts=facts, engine=engine)
    relayed = {node.name: files_of(cluster, node, facts) for node in cluster.nodes}
    wanted = wanted_of(cluster, facts, relayed, image, weights)
    with kept_alive_when_refused(steps):
        breaker = steps.one(refuse_failed, digest=wanted.digest)
    steps.all(
        [call(ensure_image, node=node) for node in workers]
        + [call(ensure_weights, node=node) for node in workers]
    )
    steps.all(
        [
            call(relay_script, node=node, home=facts[node.name].home, want=relayed[node.name])
            for node in cluster.nodes
        ]
        + remembering(cluster, facts, image.data["content"], engine)
    )

    decision: Decision = steps.one(decide, wanted=wanted).data
    release = release_of(steps, wanted, facts, image, weights)
    if not decision.nothing_to_do:
        release = start_anew(steps, wanted, decision, release)
    steps.one(record_release, home=facts[head.name].home, release=release)
    if breaker.data and not steps.run.dry_run:
        steps.one(close_breaker)
    if not steps.run.dry_run:
        artifacts.show_endpoint(cluster, steps.endpoint)


def lock(steps: Steps) -> None:
    """Hold the cluster's lock; a head that lets nobody in is told as preflight tells it."""
    head = steps.cluster.head
    [result] = steps.attempt([call(take_lock, node=head)])
    if isinstance(result, (NodeUnreachable, HostKeyRefused, LoginRefused)):
        gather(steps)  # With every other problem of every node; it raises, or the head is back.
    if not isinstance(result, Outcome):
        raise StepsFailed([(take_lock.name, head.name, result)])


def start_anew(steps: Steps, wanted: Wanted, decision: Decision, release: Release) -> Release:
    """From the old release to the new: nothing slow, nothing that could be checked before."""
    cluster, head = steps.cluster, steps.cluster.head
    ray = {name: specs[0] for name, specs in wanted.nodes.items()}
    steps.problems += tuple(steps.one(prove_fabric, wanted=ray).data)
    good = last_good(steps)
    with restored_on_failure(steps), rolled_back_on_failure(steps, good, wanted.digest):
        if serve_container(cluster) in decision.stop.get(head.name, ()):
            steps.stops()
        steps.all(
            [
                call(stop_old, node=node, names=decision.stop[node.name])
                for node in cluster.nodes
                if node.name in decision.stop
            ]
        )
        versions = start_all(steps, wanted.nodes)
        steps.answers()
        last = good.release.canary if good else None
        canary = steps.one(watch_canary, wanted=wanted.nodes, last=last).data
    if canary is None:  # A dry run measures nothing.
        return release
    steps.problems += tuple(canary["problems"])
    found = {"versions": versions, "canary": canary["figures"], "started": now()}
    return release.model_copy(update=found)
