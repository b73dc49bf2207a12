"""Ray's nodes: what the head and the containers say of them, and what is not as planned."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel

from blocks import Cluster, Node
from tasks.errors import CommandFailed, NotReady
from tasks.listeners import Listener, strangers
from tasks.remote import connect
from tasks.topology import ray_container

RELAYED = Path(__file__).parent / "relayed"
LIST_NODES = (RELAYED / "ray_nodes.py").read_bytes()
LOOK_AT_MEMBER = (RELAYED / "member.py").read_bytes()
# A node that was killed stays in Ray's table for up to 15 s.
EXCESS_SECONDS = 25.0
CODES = range(-1, 256)


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


class Placement(BaseModel, frozen=True):
    """What came of asking Ray for the engine's placement group."""

    granted: bool
    free_gpus: Mapping[str, float] = {}  # By the node's id, when it was not granted.
    seconds: float = 0.0


class Seen(BaseModel, frozen=True):
    """What the head says of its cluster."""

    nodes: tuple[RayNode, ...]
    placement: Placement | None = None


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


def parse_seen(text: str) -> Seen:
    """What the relayed program printed."""
    try:
        return Seen.model_validate_json(text)
    except ValueError as error:
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


def bundles(cluster: Cluster) -> list[dict[str, float]]:
    """The placement group that vLLM asks for: its first rank where the server is."""
    ranks = cluster.serve.tensor_parallel * cluster.serve.pipeline_parallel
    first = {"GPU": 1.0, f"node:{cluster.head.fabric_address}": 0.001}
    return [first, *({"GPU": 1.0} for _ in range(ranks - 1))]


def placement_problems(cluster: Cluster, seen: Seen) -> list[tuple[str, str]]:
    """(node, what is wrong) when Ray does not give what the engine will ask for."""
    if seen.placement is None or seen.placement.granted:
        return []
    addresses = {each.id: each.address for each in seen.nodes}
    free = {addresses.get(name, ""): count for name, count in seen.placement.free_gpus.items()}
    taken = [
        (node.name, f"{free[node.fabric_address]:g} of its {node.gpus} GPUs are free in Ray")
        for node in cluster.nodes
        if free.get(node.fabric_address, node.gpus) < node.gpus
    ]
    return taken or [
        (cluster.head.name, f"Ray grants no placement group of {json.dumps(bundles(cluster))}")
    ]


def listening_problems(cluster: Cluster, seen: Sequence[Listener]) -> list[tuple[str, str]]:
    """(node, what is wrong) unless our Ray, and nobody else, listens on the planned port."""
    port, head = cluster.ray.port, cluster.head.name
    if not seen:
        return [(head, f"nobody listens on Ray's port {port}")]
    return [
        (head, f"another process than our Ray listens on {each.address}:{port}")
        for each in strangers(seen, cluster.head.fabric_address)
    ]


def observe_ray(cluster: Cluster, node: Node, timeout: float) -> list[RayNode]:
    """Ray's node table, as the head's container sees it; settled, or as it is at the deadline."""
    return list(ask_ray(cluster, node, timeout).nodes)


def ask_ray(
    cluster: Cluster,
    node: Node,
    timeout: float,
    bundles: Sequence[Mapping[str, float]] = (),
) -> Seen:
    """Ray's node table and, once it is as planned, whether Ray grants these bundles."""
    asked = {
        "gcs": f"{cluster.head.fabric_address}:{cluster.ray.port}",
        "wanted": [each.fabric_address for each in cluster.nodes],
        "timeout": timeout,
        "excess": EXCESS_SECONDS,
        "bundles": bundles,
    }
    result = connect(cluster, node).run(
        exec_python(cluster, json.dumps(asked)), stdin=LIST_NODES, timeout=timeout + 60, ok=CODES
    )
    if result.code != 0 or not result.stdout.strip():
        error = NotReady(
            "Ray's head does not answer",
            node=node.name,
            details="\n".join(result.stderr.strip().splitlines()[-5:]),
        )
        error.retryable = True
        raise error
    return parse_seen(result.stdout.strip().splitlines()[-1])


def observe_member(cluster: Cluster, node: Node) -> Member:
    """Versions and raylets of one node's container."""
    said = connect(cluster, node).run(exec_python(cluster), stdin=LOOK_AT_MEMBER).stdout
    return parse_member(said)


def exec_python(cluster: Cluster, *arguments: str) -> tuple[str, ...]:
    """A program on standard input, run by the Python of the node's Ray container."""
    return ("docker", "exec", "-i", ray_container(cluster), "python3", "-", *arguments)
