"""What runs where, against what was asked."""

from typing import Any

from prefect import flow

from flows.planning import files_of, tell_facts, wanted_of
from flows.steps import Steps, as_state, call, conduct, named
from tasks.errors import NotReady
from tasks.facts import NodeFacts
from tasks.failed_releases import not_tried
from tasks.images import ensure_image
from tasks.preflight import blocking, problems
from tasks.releases import decide, look_at_containers
from tasks.topology import endpoint_of
from tasks.weights import ensure_weights


@flow(name="status", flow_run_name=named("status"), persist_result=False)
def status(cluster: str) -> Any:
    """Compare what runs with the cluster spec; changes nothing.

    Args:
        cluster: Name of a file in deployments/clusters, or a path.
    """
    return as_state(conduct(cluster, tell, dry_run=True))


def tell(steps: Steps) -> None:
    """Each container of each node that answers, then whether the whole is as wanted and answers."""
    cluster = steps.cluster
    steps.endpoint = endpoint_of(cluster)
    told = tell_facts(steps)
    steps.problems = tuple(problems(cluster, told))
    facts = {name: each for name, each in told.items() if isinstance(each, NodeFacts)}
    nodes = [
        node
        for node in cluster.nodes
        if node.name in facts and facts[node.name].fabric(node.fabric_address)
    ]
    if cluster.head in nodes:
        steps.tables |= not_tried(cluster)
        head = cluster.head
        image, weights = steps.all([call(ensure_image, node=head), call(ensure_weights, node=head)])
        relayed = {node.name: files_of(cluster, node, facts) for node in nodes}
        wanted = wanted_of(cluster, facts, relayed, image, weights)
        steps.all([call(look_at_containers, node=node, wanted=wanted) for node in nodes])
    if len(nodes) < len(cluster.nodes):
        raise NotReady(
            "not every node can be looked at",
            details="\n".join(map(str, blocking(steps.problems))),
        )
    steps.one(decide, wanted=wanted)
