"""Who holds GPU memory on a node, by owner."""

from collections.abc import Sequence
from typing import Any

from docker.errors import NotFound
from pydantic import BaseModel

from blocks import Cluster, Node
from tasks.containers import parse_container
from tasks.engines import engine
from tasks.errors import CommandFailed
from tasks.gpu_looks import Look, observe_look
from tasks.owners import Docked, Held, container_of, group
from tasks.remote import Remote


class Holders(BaseModel, frozen=True):
    """Who holds what on a node, largest first, and what else is known of its memory."""

    look: Look
    held: tuple[Held, ...]
    running: frozenset[str] = frozenset()  # The containers among them, by id.
    docker_error: str = ""


def observe_holders(
    cluster: Cluster,
    node: Node,
    remote: Remote,
    also: Sequence[int] = (),
    commands: Sequence[str] = (),
) -> Holders:
    """Who holds GPU memory; docker is asked only where a container is among them."""
    look = observe_look(remote, also, commands)
    docked, error = {}, ""
    pids = {row.pid for row in look.rows} | {*also}
    ids = {container_of(p, look.own_cgroup) for p in look.processes if p.pid in pids} - {""}
    if ids:
        try:
            docked = observe_docked(cluster, node, ids)
        except CommandFailed as failure:
            error = "\n".join(part for part in (failure.brief, failure.details) if part)
    running = frozenset(id for id, found in docked.items() if found.container.running)
    return Holders(look=look, held=group(look, docked), running=running, docker_error=error)


def observe_docked(cluster: Cluster, node: Node, ids: set[str]) -> dict[str, Docked]:
    """What docker knows of these containers; one that it has removed meanwhile is left out."""
    found = {}
    with engine(cluster, node) as client:
        api: Any = client.api
        rows = {row["Id"]: row for row in api.containers(all=True) if row.get("Names")}
        for id in ids & set(rows):
            try:
                host = api.inspect_container(id)["HostConfig"]
            except NotFound:
                continue
            found[id] = Docked(
                container=parse_container(rows[id]),
                restart=host.get("RestartPolicy") or {},
                removed_at_end=bool(host.get("AutoRemove")),
            )
    return found
