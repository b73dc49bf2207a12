"""What should run on the nodes, and whether it already does."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from pydantic import BaseModel

from blocks import Cluster, Node
from tasks import containers, endpoint, remote
from tasks.containers import Container
from tasks.converge import Outcome, Run, step
from tasks.differences import explained
from tasks.endpoint import Answer, Ask
from tasks.engines import engine
from tasks.errors import CommandFailed, CommandTimedOut, NotReady
from tasks.ray_nodes import membership_problems, observe_ray
from tasks.records import Release, read_releases
from tasks.secret_values import api_key
from tasks.topology import ContainerSpec, digest_of, ray_container, serve_container

LOOKS = 3  # Each takes up to a minute, as `serve` gives a new engine three of them.


class Wanted(BaseModel, frozen=True):
    """The containers of every node, by node name; and, to be told, what they are given."""

    nodes: Mapping[str, tuple[ContainerSpec, ...]]
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, Mapping[str, str]] = {}  # Without secrets.

    @property
    def digest(self) -> str:
        return digest_of([spec for specs in self.nodes.values() for spec in specs])


class Decision(BaseModel, frozen=True):
    """Which containers must go, by node name, and why; nothing at all when all is as wanted."""

    stop: Mapping[str, tuple[str, ...]] = {}
    start: Mapping[str, tuple[str, ...]] = {}
    reasons: tuple[str, ...] = ()
    answer: str = ""

    @property
    def nothing_to_do(self) -> bool:
        return not self.stop and not self.start


def compare(
    cluster: Cluster,
    wanted: Wanted,
    have: Mapping[str, Mapping[str, Container]],
    run: Run,
    releases: Sequence[Release] = (),
) -> Decision:
    """What must be stopped and started, by what docker reports; the record helps to tell why.

    A head that starts anew takes every worker and the server with it; a worker that starts anew
    takes the server, because its rank is lost.
    """
    reasons: list[str] = []
    going: dict[str, set[str]] = {node.name: set() for node in cluster.nodes}
    for name, specs in wanted.nodes.items():
        for spec in specs:
            why = _why(spec, have[name], run)
            if why:
                going[name].add(spec.name)
                more = _more(wanted, name, spec, have[name], releases)
                reasons.append(f"{spec.name} on {name}: {why}{more}")
    _spread(cluster, going)
    return _decision(cluster, wanted, going, have, reasons)


def _why(spec: ContainerSpec, have: Mapping[str, Container], run: Run) -> str:
    container = have.get(spec.name)
    if container is None:
        return "it is not there"
    return containers.why_replace(spec, container, have.get(spec.shares), run.id, run.restart)


def _more(
    wanted: Wanted,
    node: str,
    spec: ContainerSpec,
    have: Mapping[str, Container],
    releases: Sequence[Release],
) -> str:
    digest = have[spec.name].label(containers.DIGEST_LABEL) if spec.name in have else spec.digest
    if digest == spec.digest:
        return ""
    variables = wanted.environment.get(node, {})
    told = explained(releases, node, digest, spec, wanted.arguments, variables)
    return f" ({told})" if told else ""


def _spread(cluster: Cluster, going: dict[str, set[str]]) -> None:
    ray, serve = ray_container(cluster), serve_container(cluster)
    if ray in going[cluster.head.name]:
        for node in cluster.nodes:
            going[node.name].add(ray)
    if any(ray in names for names in going.values()):
        going[cluster.head.name].add(serve)


def _decision(
    cluster: Cluster,
    wanted: Wanted,
    going: Mapping[str, set[str]],
    have: Mapping[str, Mapping[str, Container]],
    reasons: Sequence[str],
) -> Decision:
    reasons = list(reasons)
    belong = {name: {spec.name for spec in specs} for name, specs in wanted.nodes.items()}
    for name, found in have.items():
        for stale in sorted(set(found) - belong[name]):
            going[name].add(stale)
            reasons.append(f"{stale} on {name}: it does not belong there")
    stop = {name: names & set(have[name]) for name, names in going.items()}
    start = {name: names & belong[name] for name, names in going.items()}
    return Decision(
        stop=_in_order(cluster, stop), start=_in_order(cluster, start), reasons=tuple(reasons)
    )


def _in_order(cluster: Cluster, names: Mapping[str, set[str]]) -> dict[str, tuple[str, ...]]:
    """The server before Ray; nodes without any are left out."""
    serve = serve_container(cluster)
    return {
        name: tuple(sorted(each, key=lambda one: (one != serve, one)))
        for name, each in names.items()
        if each
    }


def observe_containers(cluster: Cluster) -> dict[str, dict[str, Container]]:
    """Our containers on every node, all nodes at once; a foreign one under our name raises."""
    names = (ray_container(cluster), serve_container(cluster))

    def look(node: Node) -> tuple[str, dict[str, Container]]:
        with engine(cluster, node) as client:
            found = containers.observe(client, names)
        containers.refuse_foreign(cluster.name, node.name, found)
        return node.name, found

    with ThreadPoolExecutor(max_workers=8) as pool:
        return dict(pool.map(look, cluster.nodes))


def lost(cluster: Cluster, problem_nodes: Sequence[str], why: Sequence[str]) -> Decision:
    """The decision when the containers are as wanted, but Ray or the server is not."""
    going: dict[str, set[str]] = {node.name: set() for node in cluster.nodes}
    for name in problem_nodes:
        going[name].add(ray_container(cluster))
    if not problem_nodes:
        going[cluster.head.name].add(serve_container(cluster))
    _spread(cluster, going)
    names = _in_order(cluster, going)
    return Decision(stop=names, start=names, reasons=tuple(why))


@step("decide")
def decide(cluster: Cluster, node: Node, run: Run, wanted: Wanted) -> Outcome:
    """Whether what runs is what is wanted and answers; else what must be stopped for it."""
    decision = compare(cluster, wanted, observe_containers(cluster), run, read_releases(cluster))
    if not any(ray_container(cluster) in names for names in decision.start.values()):
        # Containers that run as they should: whether Ray itself does, only Ray knows. To be asked
        # before the server is stopped, even if it has to be for another reason.
        decision = both(cluster, decision, _ray_lost(cluster, node))
    if decision.nothing_to_do:
        decision = _answers(cluster)
    detail = "; ".join(decision.reasons) or f"as wanted, and {decision.answer}"
    return Outcome(step="decide", node=node.name, status="unchanged", detail=detail, data=decision)


def both(cluster: Cluster, one: Decision, other: Decision) -> Decision:
    """What either of two decisions asks for."""

    def united(*parts: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        names = {name: {each for part in parts for each in part.get(name, ())} for name in nodes}
        return _in_order(cluster, names)

    nodes = [node.name for node in cluster.nodes]
    return Decision(
        stop=united(one.stop, other.stop),
        start=united(one.start, other.start),
        reasons=one.reasons + other.reasons,
    )


def _ray_lost(cluster: Cluster, node: Node) -> Decision:
    # A node that we cannot reach is no proof that Ray or the server on it is lost.
    try:
        members = observe_ray(cluster, node, timeout=20)
    except (NotReady, CommandFailed, CommandTimedOut) as error:
        return lost(cluster, [node.name], [error.brief])
    problems = membership_problems(cluster, members)
    if problems:
        return lost(cluster, [name for name, _ in problems], [why for _, why in problems])
    return Decision()


def _answers(cluster: Cluster) -> Decision:
    ask = endpoint.asker(cluster, api_key(cluster))
    try:
        answer = answered(ask, cluster.model.name)
    except endpoint.Silent as error:
        return lost(cluster, [], [f"the server does not answer: {error.brief}"])
    return Decision(answer=answer.told)


def answered(ask: Ask, model: str, looks: int = LOOKS) -> Answer:
    """What it answers; one that may still read a long prompt for somebody has a while."""
    try:
        return endpoint.check_answers(ask, model)
    except endpoint.Silent as error:
        waits = error.stage == "completion" and error.late and endpoint.running_requests(ask)
        if looks == 1 or not waits or remote.STOP.is_set():
            raise
    return answered(ask, model, looks - 1)
