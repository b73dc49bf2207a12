"""Ray's nodes: started on the head, joined by the workers, proven to be exactly those planned."""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from blocks import Cluster, Node
from tasks import artifacts, containers
from tasks.containers import log_tail
from tasks.converge import Gone, Outcome, Ready, Run, Waiting, converge, step, wait_until
from tasks.engines import engine
from tasks.errors import CommandFailed, NotReady
from tasks.failures import ANSI, find_failure
from tasks.remote import connect
from tasks.topology import ContainerSpec, ray_container

RELAYED = Path(__file__).parent / "relayed"
LIST_NODES = (RELAYED / "ray_nodes.py").read_bytes()
LOOK_AT_MEMBER = (RELAYED / "member.py").read_bytes()
STARTED = "Ray runtime started."
HEAD_SECONDS = 90.0


class RayNode(BaseModel, frozen=True):
    """A node as Ray's own table has it."""

    id: str
    alive: bool
    address: str
    resources: Mapping[str, float] = {}

    @property
    def gpus(self) -> float:
        # A node without GPUs has no such key at all.
        return self.resources.get("GPU", 0.0)


class Raylet(BaseModel, frozen=True):
    """What the ranks on a node inherit."""

    VLLM_HOST_IP: str = ""
    GLOO_SOCKET_IFNAME: str = ""


class Member(BaseModel, frozen=True):
    """The versions in a node's container, and its raylets."""

    python: str
    ray: str
    vllm: str
    raylets: tuple[Raylet, ...] = ()


def parse_nodes(text: str) -> list[RayNode]:
    """What the relayed program printed."""
    try:
        return [RayNode.model_validate(row) for row in json.loads(text)["nodes"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CommandFailed(
            "Ray's head said something else than its nodes", details=text
        ) from error


def parse_member(text: str) -> Member:
    """What the relayed program printed."""
    try:
        return Member.model_validate_json(text)
    except ValueError as error:
        raise CommandFailed(
            "its Ray container said something else than its versions", details=text
        ) from error


def membership_problems(cluster: Cluster, nodes: Sequence[RayNode]) -> list[tuple[str, str]]:
    """(node, what is wrong) for each planned node that is not exactly once in Ray as planned."""
    alive = [node for node in nodes if node.alive]
    found = []
    for node in cluster.nodes:
        here = [each for each in alive if each.address == node.fabric_address]
        found += [(node.name, why) for why in _wrong(node, here)]
    planned = {node.fabric_address for node in cluster.nodes}
    strangers = sorted({node.address for node in alive} - planned)
    if strangers:
        addresses = ", ".join(strangers)
        found.append((cluster.head.name, f"Ray has nodes that are not planned: {addresses}"))
    return found


def _wrong(node: Node, here: Sequence[RayNode]) -> list[str]:
    if not here:
        return [f"{node.fabric_address} is not alive in Ray"]
    if len(here) > 1:
        return [f"{node.fabric_address} is in Ray {len(here)} times"]
    problems = []
    if f"node:{node.fabric_address}" not in here[0].resources:
        problems.append(f"Ray has no resource node:{node.fabric_address}; vLLM would wait for ever")
    if here[0].gpus != node.gpus:
        problems.append(f"Ray sees {here[0].gpus:g} GPUs, planned are {node.gpus}")
    return problems


def member_problems(cluster: Cluster, members: Mapping[str, Member]) -> list[tuple[str, str]]:
    """(node, what is wrong): the address that vLLM would use, and versions that differ."""
    found = []
    head = members[cluster.head.name]
    for node in cluster.nodes:
        member = members[node.name]
        if len(member.raylets) != 1:
            found.append((node.name, f"{len(member.raylets)} raylets run in its container, not 1"))
        for raylet in member.raylets:
            if node.fabric_address != raylet.VLLM_HOST_IP:
                found.append(
                    (
                        node.name,
                        f"VLLM_HOST_IP is {raylet.VLLM_HOST_IP or 'not set'}, Ray knows the node "
                        f"as {node.fabric_address}; serve would wait for ever",
                    )
                )
        for name in ("ray", "python", "vllm"):
            mine, heads = getattr(member, name), getattr(head, name)
            if mine != heads:
                found.append(
                    (node.name, f"{name} {mine or 'missing'}, the head has {heads or 'none'}")
                )
    return found


def versions(member: Member) -> dict[str, str]:
    """What the release record keeps of them."""
    return {"python": member.python, "ray": member.ray, "vllm": member.vllm}


def node_rows(
    cluster: Cluster, nodes: Sequence[RayNode], members: Mapping[str, Member]
) -> list[dict[str, Any]]:
    """The table of the verified nodes, for people."""
    gpus = {each.address: each.gpus for each in nodes if each.alive}
    return [
        {
            "node": node.name,
            "role": "head" if node == cluster.head else "worker",
            "address": node.fabric_address,
            "interface": members[node.name].raylets[0].GLOO_SOCKET_IFNAME,
            "GPUs": f"{gpus[node.fabric_address]:g}",
            "Ray": members[node.name].ray,
            "Python": members[node.name].python,
            "vLLM": members[node.name].vllm,
        }
        for node in cluster.nodes
    ]


def observe_ray(cluster: Cluster, node: Node, timeout: float) -> list[RayNode]:
    """Ray's node table, as the head's container sees it; settled, or as it is at the deadline."""
    addresses = ",".join(each.fabric_address for each in cluster.nodes)
    gcs = f"{cluster.head.fabric_address}:{cluster.ray.port}"
    result = connect(cluster, node).run(
        exec_python(cluster, gcs, addresses, f"{timeout:g}"),
        stdin=LIST_NODES,
        timeout=timeout + 30,
        ok=range(256),
    )
    if result.code != 0 or not result.stdout.strip():
        raise NotReady(
            "Ray's head does not answer",
            node=node.name,
            details="\n".join(result.stderr.strip().splitlines()[-5:]),
        )
    return parse_nodes(result.stdout.strip().splitlines()[-1])


def observe_member(cluster: Cluster, node: Node) -> Member:
    """Versions and raylets of one node's container."""
    said = connect(cluster, node).run(exec_python(cluster), stdin=LOOK_AT_MEMBER).stdout
    return parse_member(said)


def exec_python(cluster: Cluster, *arguments: str) -> tuple[str, ...]:
    """A program on standard input, run by the Python of the node's Ray container."""
    return ("docker", "exec", "-i", ray_container(cluster), "python3", "-", *arguments)


def ensure_ray(cluster: Cluster, node: Node, run: Run, want: ContainerSpec, name: str) -> Outcome:
    """The node's Ray container runs as wanted, and its raylet has started."""
    with engine(cluster, node) as client:

        def observe() -> dict[str, containers.Container]:
            found = containers.observe(client, (want.name,))
            containers.refuse_foreign(cluster.name, node.name, found)
            return found

        outcome = converge(
            name,
            node.name,
            observe,
            lambda have: containers.plan(want, have, run.id, run.restart),
            partial(containers.act, client, cluster.name, node.name, run.id),
            dry_run=run.dry_run,
        )
        if outcome.status == "changed":
            timeout = HEAD_SECONDS if want.role == "head" else cluster.ray.join_seconds
            wait_until(
                name,
                node.name,
                lambda: judge_start(client, want.name),
                timeout=timeout,
                details=lambda: log_tail(client, want.name),
            )
    return outcome


def judge_start(client: Any, name: str) -> Ready | Waiting | Gone:
    """One look at a Ray container that starts."""
    container = containers.observe(client, (name,)).get(name)
    log = ANSI.sub("", log_tail(client, name, 200))
    if container is None or not container.running:
        hit = find_failure(log)
        state = container.state if container else "gone"
        return Gone(
            f"its container is {state}: {hit.failure.cause}"
            if hit
            else f"its container is {state}",
            details="\n".join(log.strip().splitlines()[-15:]),
            remedy=hit.failure.remedy if hit else "",
        )
    return Ready() if STARTED in log else Waiting("ray start has not come to its end")


@step("Ray head start")
def start_head(cluster: Cluster, node: Node, run: Run, want: ContainerSpec) -> Outcome:
    """The Ray head runs on the head node."""
    return ensure_ray(cluster, node, run, want, "Ray head start")


@step("worker join")
def join_worker(cluster: Cluster, node: Node, run: Run, want: ContainerSpec) -> Outcome:
    """A Ray worker runs on the node and was pointed at the head."""
    return ensure_ray(cluster, node, run, want, "worker join")


@step("cluster verification")
def verify_cluster(cluster: Cluster, node: Node, run: Run) -> Outcome:
    """Each planned address is alive in Ray exactly once, with its GPUs and equal versions."""
    name = "cluster verification"
    if run.dry_run:
        return Outcome(step=name, node=node.name, status="planned")
    nodes = observe_ray(cluster, node, timeout=cluster.ray.join_seconds)
    problems = membership_problems(cluster, nodes)
    members: dict[str, Member] = {}
    if not problems:
        with ThreadPoolExecutor(max_workers=8) as pool:
            found = pool.map(lambda each: observe_member(cluster, each), cluster.nodes)
            members = {each.name: member for each, member in zip(cluster.nodes, found, strict=True)}
        problems = member_problems(cluster, members)
    if problems:
        registered = ", ".join(sorted(each.address for each in nodes if each.alive)) or "nothing"
        raise NotReady(
            "; ".join(f"{where}: {why}" for where, why in problems),
            details=f"Ray's head at {cluster.head.fabric_address}:{cluster.ray.port} has "
            f"{registered}",
            remedy=f"See docker logs {ray_container(cluster)} on the node that is named.",
        )
    artifacts.show_nodes(cluster, node_rows(cluster, nodes, members))
    return Outcome(
        step=name,
        node=node.name,
        status="unchanged",
        detail=f"{len(nodes)} nodes, {cluster.gpus} GPUs",
        data=versions(members[cluster.head.name]),
    )
