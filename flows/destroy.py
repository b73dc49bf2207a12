"""The inverse of deploy: stop everything of ours and take our files away."""

from typing import Any

from prefect import flow

from flows.steps import Steps, as_state, call, conduct, named
from tasks.locks import take_lock
from tasks.removal import remove_all


@flow(name="destroy", flow_run_name=named("destroy"), persist_result=False)
def destroy(cluster: str, dry_run: bool = False) -> Any:
    """Take a deployed model down; weights and images stay where they are.

    Args:
        cluster: Name of a file in deployments/clusters, or a path.
        dry_run: Say what would be done, and change nothing.
    """
    return as_state(conduct(cluster, take_down, dry_run=dry_run))


def take_down(steps: Steps) -> None:
    """Under the lock, the head last: it holds the lock's own file, and the server goes with it."""
    cluster = steps.cluster
    steps.one(take_lock)
    steps.all([call(remove_all, node=node) for node in cluster.workers])
    steps.one(remove_all)
