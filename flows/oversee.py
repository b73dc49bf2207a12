"""The watch: a light look every few minutes, and one restart by the deploy flow if need be."""

from typing import Any

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterTags
from prefect.context import FlowRunContext

from flows.deploy import bring_up
from flows.failed_runs import Recovered, StepsFailed
from flows.steps import UNATTENDED, Steps, as_state, call, conduct, named
from tasks.converge import Outcome, log
from tasks.errors import NotReady, SparkrailError
from tasks.failed_releases import read_failed
from tasks.records import Release
from tasks.rollbacks import ask_as, recorded
from tasks.secret_values import forget_keys, load_secrets
from tasks.topology import endpoint_of
from tasks.watching import (
    Look,
    Watched,
    is_worked_on,
    judge,
    keep,
    look_at_node,
    look_at_server,
)

ON_DEMAND = "on-demand"


@flow(name="watch", flow_run_name=named("watch"), persist_result=False)
def watch(cluster: str) -> Any:
    """Look at the running model; restart what is lost by the deploy flow, once.

    Args:
        cluster: Name of a file in deployments/clusters, or a path.
    """
    return as_state(conduct(cluster, oversee))


def oversee(steps: Steps) -> None:
    """Evidence from every node, then from the server; what follows is decided by `judge`."""
    cluster = steps.cluster
    steps.endpoint = endpoint_of(cluster)
    load_secrets(cluster)
    rows: list[Release] = steps.one(recorded).data
    if not rows or read_failed(cluster).is_broken or is_worked_on(cluster):
        log.info("%s: nothing to watch now", cluster.name)
        return
    if not rows[0].restorable:
        raise NotReady(
            f"release {rows[0].title} was recorded by an older sparkrail",
            remedy="Deploy once, so that the watch knows what should run.",
        )
    # What runs is the recorded release, whatever the spec says meanwhile.
    now = steps.on(rows[0].cluster(cluster))
    ask_as(now.cluster, rows[0])
    before, look = look_around(now, rows[0])
    after, action = judge(before, look, cluster.watch.failures)
    if after != before:
        keep(cluster, after)
    if action == "restart":
        log.warning("%s: restarting what is lost: %s", cluster.name, "; ".join(look.problems))
        restart(steps)
    elif look.problems:
        tell(steps, look, after, gave_up=action == "give up")


def look_around(steps: Steps, release: Release) -> tuple[Watched, Look]:
    """All nodes, and the server; one that cannot be reached is a problem like others."""
    nodes = steps.cluster.nodes
    results = steps.attempt([call(look_at_node, node=node, release=release) for node in nodes])
    problems: list[str] = []
    for result in results:
        if isinstance(result, Outcome):
            problems += result.data
        elif isinstance(result, SparkrailError):
            problems.append(str(result).splitlines()[0])
        else:
            raise result
    before, look = steps.one(look_at_server).data
    return before, look.model_copy(update={"problems": (*problems, *look.problems)})


def tell(steps: Steps, look: Look, after: Watched, *, gave_up: bool) -> None:
    """A look that failed is a run that failed, and says what comes next."""
    said = "\n".join(look.problems)
    limit = steps.cluster.watch.failures
    if look.busy:
        raise NotReady("it is not well, but works for somebody", details=said)
    if not after.gave_up:
        raise NotReady(f"not well, {after.failures} of {limit} times in a row", details=said)
    error = NotReady(
        "the restart did not help, and there is no other",
        details=said,
        remedy="Mend the cause, and deploy.",
    )
    cause = StepsFailed([("watch", steps.cluster.head.name, error)])
    if gave_up:
        told = "Nothing is tried any more until it is well again."
        raise Recovered(cause, told, "broken", None)
    raise cause


def restart(steps: Steps) -> None:
    """By a run of the deploy flow of its own; without a deployment of it, here and now."""
    deployment = _on_demand(steps.cluster.name)
    if deployment is None:
        steps.run = steps.run.model_copy(update={"attended": False})
        forget_keys()  # It deploys what the spec says, with the key that the block holds.
        bring_up(steps)
        return
    with get_client(sync_client=True) as client:
        run = client.create_flow_run_from_deployment(deployment, tags=[UNATTENDED])
    log.warning("%s: deploy run %s was started", steps.cluster.name, run.name)


def _on_demand(cluster: str) -> Any:
    """The deployment that deploys this cluster when asked, if we run in Prefect and it has one."""
    if FlowRunContext.get() is None:
        return None
    tags = DeploymentFilterTags(all_=[f"cluster:{cluster}"])
    with get_client(sync_client=True) as client:
        found = client.read_deployments(deployment_filter=DeploymentFilter(tags=tags))
    mine = [each for each in found if each.name.startswith(ON_DEMAND)]
    return mine[0].id if mine else None
