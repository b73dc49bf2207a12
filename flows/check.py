"""Every problem on every node, before anything is touched."""

from typing import Any

from prefect import flow

from flows.planning import gather
from flows.steps import Steps, as_state, conduct, named
from tasks.topology import endpoint_of


@flow(name="check", flow_run_name=named("check"), persist_result=False)
def check(cluster: str) -> Any:
    """Check the nodes of a cluster spec; changes nothing.

    Args:
        cluster: Name of a file in deployments/clusters, or a path.
    """
    return as_state(conduct(cluster, look, dry_run=True))


def look(steps: Steps) -> None:
    """Facts, then all checks at once; takes no lock, since it changes nothing."""
    steps.endpoint = endpoint_of(steps.cluster)
    gather(steps)
