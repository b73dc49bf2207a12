"""What runs where, against what was asked."""

from typing import Any

from prefect import flow
from tasks.images import ensure_image

from flows.deploy import endpoint_of, files_of, gather, wanted_of
from flows.steps import Steps, as_state, call, conduct
from tasks.releases import decide, look_at_containers


@flow(name="status", flow_run_name="status {cluster}", persist_result=False)
def status(cluster: str) -> Any:
    """Compare what runs with the cluster spec; changes nothing.

    Args:
        cluster: Name of a file in deployments/clusters, or a path.
    """
    return as_state(conduct(cluster, tell, dry_run=True))


def tell(steps: Steps) -> None:
    """Each container of each node, then whether the whole is as wanted and answers."""
    cluster = steps.cluster
    steps.endpoint = endpoint_of(cluster)
    facts = gather(steps)
    image = steps.one(ensure_image)
    relayed = {node.name: files_of(cluster, node, facts) for node in cluster.nodes}
    wanted = wanted_of(cluster, facts, relayed, image.data["content"])
    steps.all([call(look_at_containers, node=node, wanted=wanted) for node in cluster.nodes])
    steps.one(decide, wanted=wanted)
