"""A closer look at our containers on a node, and at what the head says of the whole; no change."""

from collections.abc import Mapping
from typing import Any

import docker
from docker.errors import ImageNotFound, NotFound

from blocks import Cluster, Node
from tasks import containers, endpoint
from tasks.containers import Container, log_tail
from tasks.converge import Outcome, Run, step
from tasks.engines import engine
from tasks.failures import ANSI, find_failure, shorten
from tasks.images import image_content
from tasks.ray_nodes import observe_ray
from tasks.secret_values import load_secrets
from tasks.standings import Found, Looked
from tasks.topology import ray_container, serve_container

LOG_LINES = 400
RAY_SECONDS = 5.0


def parse_found(container: Container, told: Mapping[str, Any]) -> Found:
    """What docker's inspect says of a container."""
    state = told["State"]
    # Of what has never ended, docker writes the year 1.
    finished = "" if str(state["FinishedAt"]).startswith("0001") else state["FinishedAt"]
    return Found(
        container=container,
        started=state["StartedAt"],
        finished=finished,
        exit_code=state["ExitCode"],
        out_of_memory=bool(state.get("OOMKilled")),
        image=told["Config"]["Image"],
    )


def observe(client: docker.DockerClient, names: tuple[str, ...]) -> dict[str, Found]:
    """The containers of these names with all that there is to tell of them."""
    found = {}
    for name, container in containers.observe(client, names).items():
        try:
            found[name] = _look(client, container)
        except NotFound:  # It went while we looked.
            continue
    return found


def _look(client: docker.DockerClient, container: Container) -> Found:
    api: Any = client.api
    seen = parse_found(container, api.inspect_container(container.id))
    more: dict[str, str] = {}
    try:
        attrs = client.images.get(container.image).attrs
        more = {"image_content": image_content(attrs).digest, "image_created": attrs["Created"]}
    except ImageNotFound:
        pass
    if not container.running:
        more["cause"] = cause_of(log_tail(client, container.id, LOG_LINES))
    return seen.model_copy(update=more)


def cause_of(log: str) -> str:
    """Why something ended, by its log: what we know of it, else its last line."""
    hit = find_failure(log)
    if hit:
        return f"{hit.failure.cause}: {hit.line}"
    lines = ANSI.sub("", log).strip().splitlines()
    return shorten(lines[-1].strip(), 200) if lines else ""


@step("containers")
def look_at_containers(cluster: Cluster, node: Node, run: Run, boot: str) -> Outcome:  # noqa: ARG001 - as every step
    """What runs on one node."""
    names = (ray_container(cluster), serve_container(cluster))
    with engine(cluster, node) as client:
        found = observe(client, names)
    told = ", ".join(f"{name} {each.container.state}" for name, each in found.items()) or "none"
    looked = Looked(boot=boot, found=found)
    return Outcome(step="containers", node=node.name, status="unchanged", detail=told, data=looked)


@step("Ray")
def look_at_ray(cluster: Cluster, node: Node, run: Run) -> Outcome:  # noqa: ARG001 - as every step
    """Which nodes the head's Ray has."""
    nodes = observe_ray(cluster, node, RAY_SECONDS)
    alive = sorted(each.address for each in nodes if each.alive)
    detail = f"alive: {', '.join(alive) or 'none'}"
    return Outcome(step="Ray", node=node.name, status="unchanged", detail=detail, data=nodes)


@step("answer")
def look_at_answer(cluster: Cluster, node: Node, run: Run) -> Outcome:  # noqa: ARG001 - as every step
    """What the endpoint answers; that it does not is an answer too."""
    ask = endpoint.asker(cluster, load_secrets(cluster).api_key)
    try:
        said: endpoint.Answer | endpoint.Silent = endpoint.check_answers(ask, cluster.model.name)
    except endpoint.Silent as error:
        said = error
    detail = said.told if isinstance(said, endpoint.Answer) else f"none: {said.brief}"
    return Outcome(step="answer", node=node.name, status="unchanged", detail=detail, data=said)
