"""What a deploy is planned from: the facts, the engine's verdict, and what each node is to run."""

from collections.abc import Mapping

from blocks import Cluster, Node
from flows.failed_runs import StepsFailed
from flows.steps import Call, Steps, call
from tasks.converge import Outcome
from tasks.engine_verdicts import Verdict, check_engine, remember_engine
from tasks.errors import SparkrailError
from tasks.facts import NodeFacts, gather_facts
from tasks.preflight import preflight
from tasks.records import OnNode, Release, now, spec_digest
from tasks.releases import Wanted
from tasks.secret_values import load_secrets
from tasks.topology import Fabric, Files, arguments, containers, environment, files


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


def files_of(cluster: Cluster, node: Node, facts: Mapping[str, NodeFacts]) -> Files:
    """What this node's containers read."""
    return files(cluster, node, fabric_of(node, facts), load_secrets(cluster))


def fabric_of(node: Node, facts: Mapping[str, NodeFacts]) -> Fabric:
    """The interface that owns the node's fabric address; preflight has made sure that one does."""
    fabric = facts[node.name].fabric(node.fabric_address)
    assert fabric is not None, f"{node.name}: preflight let a missing fabric address through"
    return fabric


def wanted_of(
    cluster: Cluster,
    facts: Mapping[str, NodeFacts],
    relayed: Mapping[str, Files],
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
        },
        arguments=arguments(cluster),
        environment={
            node.name: shown_variables(cluster, node, fabric_of(node, facts))
            for node in cluster.nodes
            if node.name in relayed
        },
    )


def shown_variables(cluster: Cluster, node: Node, fabric: Fabric) -> dict[str, str]:
    """A node's variables, without those that a secret stands behind."""
    secret = load_secrets(cluster).environment
    return {
        name: value
        for name, value in environment(cluster, node, fabric).items()
        if name not in secret
    }


def release_of(
    steps: Steps,
    wanted: Wanted,
    facts: Mapping[str, NodeFacts],
    image: Outcome,
    weights: Outcome,
) -> Release:
    """What is deployed, for the record; what only its start can tell is added then."""
    cluster = steps.cluster
    return Release(
        digest=wanted.digest,
        at=now(),
        run=steps.run.id,
        image=cluster.image.name,
        image_content=image.data["content"],
        weights=weights.data["digest"],
        script=wanted.nodes[cluster.head.name][0].files[0],
        arguments=wanted.arguments,
        nodes={
            node.name: on_node(facts[node.name], node, wanted.environment[node.name])
            for node in cluster.nodes
        },
        spec_digest=spec_digest(cluster),
        spec=cluster.model_dump(mode="json"),
        containers={
            # Each node's boot stands with the node; a container on record is of any boot.
            name: tuple(spec.model_copy(update={"boot": ""}) for spec in specs)
            for name, specs in wanted.nodes.items()
        },
    )


def on_node(facts: NodeFacts, node: Node, variables: Mapping[str, str]) -> OnNode:
    """What the record keeps of a node."""
    fabric = fabric_of(node, {node.name: facts})
    return OnNode(
        interface=fabric.interface,
        rdma=fabric.rdma,
        driver=driver_of(facts),
        boot_id=facts.boot_id,
        environment=variables,
    )


def driver_of(facts: NodeFacts) -> str:
    """The version of the GPU driver; nothing where there is no GPU."""
    return ", ".join(dict.fromkeys(gpu.driver for gpu in facts.gpus))
