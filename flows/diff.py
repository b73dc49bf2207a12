"""How the nodes differ from the spec and from the recorded release, in plain words."""

from collections.abc import Mapping
from typing import Any

from prefect import flow

from blocks import Node
from flows.planning import files_of, on_node, tell_facts, wanted_of
from flows.steps import Steps, as_state, call, conduct, named
from tasks.converge import Outcome
from tasks.errors import NotReady
from tasks.images import ensure_image
from tasks.node_facts import NodeFacts
from tasks.preflight import blocking, problems
from tasks.records import OnNode, Release
from tasks.releases import Decision, decide
from tasks.rollbacks import recorded
from tasks.scripts import relay_script
from tasks.topology import endpoint_of
from tasks.weights import ensure_weights


@flow(name="diff", flow_run_name=named("diff"), persist_result=False)
def diff(cluster: str) -> Any:
    """Name each difference between the nodes, the spec and the recorded release; changes nothing.

    Args:
        cluster: Name of a file in deployments/clusters, or a path.
    """
    return as_state(conduct(cluster, tell_differences, dry_run=True))


def tell_differences(steps: Steps) -> None:
    """The same questions that a deploy asks before it acts, and so exactly what it would act on."""
    cluster, head = steps.cluster, steps.cluster.head
    steps.endpoint = endpoint_of(cluster)
    told = tell_facts(steps)
    steps.problems = tuple(problems(cluster, told))
    facts = {name: each for name, each in told.items() if isinstance(each, NodeFacts)}
    if len(facts) < len(cluster.nodes) or not all(
        facts[node.name].fabric(node.fabric_address) for node in cluster.nodes
    ):
        raise NotReady(
            "not every node can be compared",
            details="\n".join(map(str, blocking(steps.problems))),
        )
    image, weights = steps.all([call(ensure_image, node=head), call(ensure_weights, node=head)])
    relayed = {node.name: files_of(cluster, node, facts) for node in cluster.nodes}
    wanted = wanted_of(cluster, facts, relayed, image, weights)
    outcomes = [image, weights]
    outcomes += steps.all(
        [call(ensure_image, node=node) for node in cluster.workers]
        + [call(ensure_weights, node=node) for node in cluster.workers]
        + [
            call(relay_script, node=node, home=facts[node.name].home, want=relayed[node.name])
            for node in cluster.nodes
        ]
    )
    decision: Decision = steps.one(decide, wanted=wanted).data
    rows: list[Release] = steps.one(recorded).data
    steps.tables["differences"] = [
        *map(of_step, (each for each in outcomes if each.status == "planned")),
        *(of_container(why) for why in decision.reasons),
        *since(rows, cluster.nodes, facts, wanted.environment),
    ]


def of_step(outcome: Outcome) -> dict[str, str]:
    """What a deploy would put right without a restart."""
    return difference(outcome.node, outcome.step, outcome.detail)


def of_container(why: str) -> dict[str, str]:
    """A reason of `decide`: `CONTAINER on NODE: WHY`, or of Ray and the server as a whole."""
    where, _, said = why.partition(": ")
    what, _, node = where.partition(" on ")
    return difference(node, what, said) if node else difference("", "cluster", why)


def since(
    rows: list[Release],
    nodes: tuple[Node, ...],
    facts: Mapping[str, NodeFacts],
    variables: Mapping[str, Mapping[str, str]],
) -> list[dict[str, str]]:
    """What is another than when the recorded release was started."""
    if not rows:
        return [difference("", "release", "none is on record")]
    found = []
    for node in nodes:
        now = on_node(facts[node.name], node, variables[node.name])
        for words in machine(rows[0].nodes.get(node.name), now):
            found.append(difference(node.name, "node", f"{words} since release {rows[0].digest}"))
    return found


def machine(then: OnNode | None, now: OnNode) -> list[str]:
    """How a node itself has changed."""
    if then is None:
        return ["it is new"]
    told = []
    if then.boot_id != now.boot_id:
        told.append("it was rebooted")
    if then.driver != now.driver:
        told.append(f"its driver is {now.driver or 'gone'} instead of {then.driver or 'none'}")
    if then.interface != now.interface:
        told.append(f"its fabric address is on {now.interface} instead of {then.interface}")
    if then.rdma != now.rdma:
        told.append(f"its RDMA ports are {', '.join(now.rdma) or 'gone'}")
    return told


def difference(node: str, what: str, words: str) -> dict[str, str]:
    return {"node": node, "what": what, "difference": words}
