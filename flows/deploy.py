"""Bring the model up on its nodes, or leave it exactly as it is when nothing has changed."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from prefect import flow

from blocks import Cluster, Node
from flows.skip import skipped
from flows.steps import Call, Restart, Steps, StepsFailed, as_state, call, conduct, named
from tasks import artifacts, remote
from tasks.converge import Outcome
from tasks.engine_verdicts import Verdict, check_engine, remember_engine
from tasks.errors import HostKeyRefused, LoginRefused, NodeUnreachable, SparkrailError
from tasks.fabric_proof import prove_fabric
from tasks.facts import NodeFacts, gather_facts
from tasks.images import ensure_image
from tasks.locks import take_lock
from tasks.preflight import preflight
from tasks.ray_proof import verify_cluster
from tasks.ray_start import join_worker, start_head
from tasks.releases import Decision, Release, Wanted, decide, now, record_release
from tasks.residue import clean_residue, start_again
from tasks.scripts import relay_script
from tasks.secret_values import load_secrets
from tasks.serving import serve, stop_old
from tasks.topology import Fabric, Files, arguments, containers, files
from tasks.weights import ensure_weights


@flow(name="deploy", flow_run_name=named("deploy"), persist_result=False)
def deploy(cluster: str, dry_run: bool = False, restart: Restart = "if-changed") -> Any:
    """Deploy the model of a cluster spec over its nodes.

    Args:
        cluster: Name of a file in deployments/clusters, or a path.
        dry_run: Say what would be done, and change nothing.
        restart: if-changed leaves a healthy, equal release alone; always starts it anew.
    """
    if unwanted := skipped():
        return unwanted
    return as_state(conduct(cluster, bring_up, dry_run=dry_run, restart=restart))


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
    steps.all(
        [call(ensure_image, node=node) for node in workers]
        + [call(ensure_weights, node=node) for node in workers]
    )
    relayed = {node.name: files_of(cluster, node, facts) for node in cluster.nodes}
    steps.all(
        [
            call(relay_script, node=node, home=facts[node.name].home, want=relayed[node.name])
            for node in cluster.nodes
        ]
        + remembering(cluster, facts, image.data["content"], engine)
    )

    wanted = wanted_of(cluster, facts, relayed, image, weights)
    decision: Decision = steps.one(decide, wanted=wanted).data
    versions = {} if decision.nothing_to_do else start_anew(steps, wanted, decision)

    release = Release(
        digest=wanted.digest,
        image=cluster.image.name,
        image_content=image.data["content"],
        weights=weights.data["digest"],
        arguments=arguments(cluster),
        versions=versions,
        run=steps.run.id,
        at=now(),
    )
    steps.one(record_release, home=facts[head.name].home, release=release)
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


def start_anew(steps: Steps, wanted: Wanted, decision: Decision) -> dict[str, str]:
    """From the old release to the new: nothing slow, nothing that could be checked before."""
    cluster, head, workers = steps.cluster, steps.cluster.head, steps.cluster.workers
    ray = {name: specs[0] for name, specs in wanted.nodes.items()}
    steps.problems += tuple(steps.one(prove_fabric, wanted=ray).data)
    steps.all(
        [
            call(stop_old, node=node, names=decision.stop[node.name])
            for node in cluster.nodes
            if node.name in decision.stop
        ]
    )
    with restored_on_failure(steps):
        steps.all([call(clean_residue, node=node) for node in cluster.nodes])
        steps.one(start_head, want=ray[head.name])
        steps.all([call(join_worker, node=node, want=ray[node.name]) for node in workers])
        verified = steps.one(verify_cluster)
        steps.one(serve, want=wanted.nodes[head.name][1])
    return verified.data or {}  # A dry run verifies nothing.


@contextlib.contextmanager
def restored_on_failure(steps: Steps) -> Iterator[None]:
    """What was stopped for its memory runs again when that was in vain, if the spec says so."""
    try:
        yield
    except SparkrailError:
        # A run that is cancelled, or has lost its lock, may touch nothing any more.
        if steps.cluster.residue.restore and not steps.run.dry_run and not remote.STOP.is_set():
            steps.attempt([call(start_again, node=node) for node in steps.cluster.nodes])
        raise


def gather(steps: Steps) -> tuple[dict[str, NodeFacts], Verdict | None]:
    """The facts of all nodes and the engine's verdict, once preflight found nothing to block on."""
    told = tell_facts(steps)
    engine = tell_engine(steps, told)
    steps.problems = tuple(steps.one(preflight, facts=told, engine=engine).data)
    return {name: facts for name, facts in told.items() if isinstance(facts, NodeFacts)}, engine


def tell_facts(steps: Steps) -> dict[str, NodeFacts | SparkrailError]:
    """The facts of all nodes, read side by side; a node that tells none is a finding too."""
    nodes = steps.cluster.nodes
    results = steps.attempt([call(gather_facts, node=node) for node in nodes])
    told: dict[str, NodeFacts | SparkrailError] = {}
    for node, result in zip(nodes, results, strict=True):
        if isinstance(result, Outcome):
            told[node.name] = result.data
        elif isinstance(result, SparkrailError):
            told[node.name] = result
        else:
            raise StepsFailed([(gather_facts.name, node.name, result)])
    return told


def tell_engine(steps: Steps, told: Mapping[str, NodeFacts | SparkrailError]) -> Verdict | None:
    """What the engine says of its arguments, where the image that will serve is on the head."""
    head = told[steps.cluster.head.name]
    if not isinstance(head, NodeFacts) or head.docker is None or head.docker.image is None:
        return None
    # Its container sees the model; without one, preflight blocks anyway.
    if steps.cluster.image.source != "head" or head.weights.folder:
        return None
    return ask_engine(steps, head.home, head.docker.image.content)


def ask_engine(steps: Steps, home: str, content: str) -> Verdict:
    """The verdict of the engine; that it could not be asked is one too."""
    head = steps.cluster.head
    [result] = steps.attempt([call(check_engine, node=head, home=home, content=content)])
    if isinstance(result, Outcome):
        verdict: Verdict = result.data
        return verdict
    if isinstance(result, SparkrailError):
        return Verdict(unparsed=str(result))
    raise StepsFailed([(check_engine.name, head.name, result)])


def remembering(
    cluster: Cluster, facts: Mapping[str, NodeFacts], content: str, engine: Verdict | None
) -> list[Call]:
    """The step that keeps a verdict, where there is one."""
    head = cluster.head
    if engine is None or engine.unparsed:
        return []
    home = facts[head.name].home
    return [call(remember_engine, node=head, home=home, content=content, verdict=engine)]


def files_of(cluster: Cluster, node: Node, facts: dict[str, NodeFacts]) -> Files:
    """What this node's containers read."""
    return files(cluster, node, fabric_of(node, facts), load_secrets(cluster))


def fabric_of(node: Node, facts: dict[str, NodeFacts]) -> Fabric:
    """The interface that owns the node's fabric address; preflight has made sure that one does."""
    fabric = facts[node.name].fabric(node.fabric_address)
    assert fabric is not None, f"{node.name}: preflight let a missing fabric address through"
    return fabric


def wanted_of(
    cluster: Cluster,
    facts: dict[str, NodeFacts],
    relayed: dict[str, Files],
    image: Outcome,
    weights: Outcome,
) -> Wanted:
    """The containers of every node that told its facts."""
    return Wanted(
        nodes={
            node.name: containers(
                cluster,
                node,
                facts[node.name].home,
                fabric_of(node, facts),
                relayed[node.name],
                image.data["content"],
                weights.data["digest"],
                facts[node.name].boot_id,
            )
            for node in cluster.nodes
            if node.name in relayed
        }
    )


def endpoint_of(cluster: Cluster) -> str:
    """Where clients find the model."""
    host = cluster.serve.host if cluster.serve.host != "0.0.0.0" else cluster.head.address
    return f"http://{host}:{cluster.serve.port}/v1"
