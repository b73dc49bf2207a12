"""Ray's nodes, proven to be exactly those planned and to give what the engine will ask for."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from blocks import Cluster, Node
from tasks import artifacts
from tasks.containers import log_tail
from tasks.converge import Outcome, Run, step
from tasks.engines import engine
from tasks.errors import NotReady
from tasks.listeners import Listener, listeners_of
from tasks.ray_nodes import (
    Member,
    RayNode,
    Seen,
    ask_ray,
    bundles,
    listening_problems,
    member_problems,
    membership_problems,
    observe_member,
    placement_problems,
)
from tasks.topology import kept_log, ray_container


@step("cluster verification")
def verify_cluster(cluster: Cluster, node: Node, run: Run) -> Outcome:
    """Each planned address is alive in Ray exactly once, and Ray gives what the engine will ask."""
    name = "cluster verification"
    if run.dry_run:
        return Outcome(step=name, node=node.name, status="planned")
    seen = ask_ray(cluster, node, cluster.ray.join_seconds, bundles(cluster))
    problems = membership_problems(cluster, seen.nodes)
    members: dict[str, Member] = {}
    if not problems:
        members, listening = look_inside(cluster)
        problems = [
            *member_problems(cluster, members),
            *listening_problems(cluster, listening),
            *placement_problems(cluster, seen),
        ]
    if problems:
        raise unplanned(cluster, seen, problems)
    artifacts.show_nodes(cluster, node_rows(cluster, seen.nodes, members))
    granted = (
        f", {cluster.gpus} granted in {seen.placement.seconds:.1f} s" if seen.placement else ""
    )
    return Outcome(
        step=name,
        node=node.name,
        status="unchanged",
        detail=f"{len(cluster.nodes)} nodes, {cluster.gpus} GPUs{granted}",
        data=versions(members[cluster.head.name]),
    )


def look_inside(cluster: Cluster) -> tuple[dict[str, Member], list[Listener]]:
    """Every node's container, and who listens on the head, all at once."""
    head = cluster.head
    with ThreadPoolExecutor(max_workers=8) as pool:
        port = pool.submit(listeners_of, cluster, head, ray_container(cluster), cluster.ray.port)
        found = pool.map(lambda each: observe_member(cluster, each), cluster.nodes)
        members = {each.name: member for each, member in zip(cluster.nodes, found, strict=True)}
        return members, port.result()


def unplanned(cluster: Cluster, seen: Seen, problems: Sequence[tuple[str, str]]) -> NotReady:
    """The error that names each node that is wrong, and shows the last lines of its log."""
    registered = ", ".join(sorted(each.address for each in seen.nodes if each.alive)) or "nothing"
    lines = [f"Ray's head at {cluster.head.fabric_address}:{cluster.ray.port} has {registered}"]
    for node in cluster.nodes:
        mine = [why for name, why in problems if name == node.name]
        if mine:
            lines += _of_node(cluster, node, twice=any("times" in why for why in mine))
    error = NotReady(
        "; ".join(f"{where}: {why}" for where, why in problems),
        details="\n".join(lines),
        remedy=f"See {kept_log(cluster, ray_container(cluster))} on the node that is named.",
    )
    alive = {each.address for each in seen.nodes if each.alive}
    # What is there and should not be is not gone when Ray starts anew.
    error.retryable = any(node.fabric_address not in alive for node in cluster.nodes)
    return error


def _of_node(cluster: Cluster, node: Node, *, twice: bool) -> list[str]:
    ours = ray_container(cluster)
    with engine(cluster, node) as client:
        log = log_tail(client, ours, 5).strip()
        lines = [f"{ours} on {node.name} said last:", *log.splitlines()] if log else []
        if twice:
            for other in client.containers.list():
                if other.name != ours and "raylet" in str(other.top()["Processes"]):
                    lines.append(f"a raylet also runs in container {other.name} on {node.name}")
    return lines


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
