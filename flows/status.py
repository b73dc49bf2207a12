"""What runs where, against what was asked."""

from collections.abc import Mapping
from typing import Any

from prefect import flow

from flows.planning import files_of, tell_facts, wanted_of
from flows.steps import Call, Steps, as_state, call, conduct, named
from tasks.container_looks import look_at_answer, look_at_containers, look_at_ray
from tasks.converge import Outcome
from tasks.errors import NotReady, SparkrailError
from tasks.facts import NodeFacts
from tasks.failed_releases import not_tried
from tasks.images import ensure_image
from tasks.preflight import problems
from tasks.standings import Looked, standings
from tasks.topology import ContainerSpec, endpoint_of, ray_container
from tasks.weights import ensure_weights

Wanted = Mapping[str, tuple[ContainerSpec, ...]]


@flow(name="status", flow_run_name=named("status"), persist_result=False)
def status(cluster: str) -> Any:
    """Compare what runs with the cluster spec; changes nothing.

    Args:
        cluster: Name of a file in deployments/clusters, or a path.
    """
    return as_state(conduct(cluster, tell, dry_run=True))


def tell(steps: Steps) -> None:
    """The whole table, whatever cannot be looked at; that some could not fails at the end."""
    cluster, head = steps.cluster, steps.cluster.head
    steps.endpoint, steps.running = endpoint_of(cluster), ()
    told = tell_facts(steps)
    steps.problems = tuple(problems(cluster, told))
    facts = {name: each for name, each in told.items() if isinstance(each, NodeFacts)}
    missing = {name: each for name, each in told.items() if isinstance(each, SparkrailError)}

    wanted, unknown = asked(steps, facts)
    reached = [node for node in cluster.nodes if node.name in facts]
    looked: dict[str, Looked | SparkrailError] = dict(missing)
    calls = [call(look_at_containers, node=node, boot=facts[node.name].boot_id) for node in reached]
    for node, result in zip(reached, attempt(steps, calls), strict=True):
        looked[node.name] = result
        if isinstance(result, SparkrailError):
            missing[node.name] = result

    whole = []
    if head in reached:
        steps.tables |= not_tried(cluster)
        whole.append(call(look_at_answer, node=head))
    if has_ray(looked.get(head.name), ray_container(cluster)):
        whole.append(call(look_at_ray, node=head))
    answer, ray = [*attempt(steps, whole), None, None][:2]
    steps.running = tuple(standings(cluster, wanted, looked, ray, answer))
    complain(missing, unknown)


def has_ray(head: Looked | SparkrailError | None, name: str) -> bool:
    """Whether there is a Ray on the head that can be asked."""
    return isinstance(head, Looked) and name in head.found and head.found[name].container.running


def attempt(steps: Steps, calls: list[Call]) -> list[Any]:
    """What each step found, or the error that kept it from that."""
    results = steps.attempt(calls)
    for result in results:
        if not isinstance(result, Outcome | SparkrailError):
            raise result
    return [each.data if isinstance(each, Outcome) else each for each in results]


def asked(steps: Steps, facts: dict[str, NodeFacts]) -> tuple[Wanted, SparkrailError | None]:
    """The containers that were asked for, or what keeps us from telling."""
    cluster, head = steps.cluster, steps.cluster.head
    if head.name not in facts:
        return {}, None
    found = steps.attempt([call(ensure_image, node=head), call(ensure_weights, node=head)])
    outcomes = [result for result in found if isinstance(result, Outcome)]
    for result in found:
        if isinstance(result, SparkrailError):
            return {}, result
        if isinstance(result, BaseException):
            raise result
    fabric = {
        node.name: node
        for node in cluster.nodes
        if node.name in facts and facts[node.name].fabric(node.fabric_address)
    }
    try:
        relayed = {name: files_of(cluster, node, facts) for name, node in fabric.items()}
    except SparkrailError as error:  # The secrets block cannot be read.
        return {}, error
    return wanted_of(cluster, facts, relayed, *outcomes).nodes, None


def complain(missing: Mapping[str, SparkrailError], unknown: SparkrailError | None) -> None:
    """One error for all that could not be looked at."""
    if missing:
        raise NotReady(
            "not every node can be looked at",
            details="\n".join(dict.fromkeys(map(str, missing.values()))),
        )
    if unknown:
        raise NotReady("what was asked for cannot be told", details=str(unknown))
