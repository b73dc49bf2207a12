"""Containers on a node: what docker reports, and the steps that make it what we want."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import docker
from docker.errors import APIError, ImageNotFound, NotFound
from docker.types import DeviceRequest
from pydantic import BaseModel

from tasks import remote
from tasks.errors import Cancelled, CommandFailed, NotOurs
from tasks.topology import FOLDER, ContainerSpec

CLUSTER_LABEL = "sparkrail.cluster"
DIGEST_LABEL = "sparkrail.digest"
RUN_LABEL = "sparkrail.run"
SHARES_LABEL = "sparkrail.shares"
BOOT_LABEL = "sparkrail.boot"
STOP_GRACE = 20
RAY_GRACE = 1
REMOVAL_SECONDS = 60
NEVER: Any = {"Name": "no"}
# What docker is taking away, or was when its engine ended: it can only be removed (again).
HALF_REMOVED = ("removing", "dead")


class Container(BaseModel, frozen=True):
    """A container that docker reports."""

    id: str
    name: str
    state: str
    created: int = 0
    image: str = ""
    labels: Mapping[str, str] = {}

    @property
    def running(self) -> bool:
        return self.state == "running"

    def label(self, name: str) -> str:
        return self.labels.get(name, "")


@dataclass(frozen=True)
class Remove:
    """Stop a container of ours and take it away."""

    container: Container
    why: str

    def __str__(self) -> str:
        return f"remove {self.container.name} ({self.why})"


@dataclass(frozen=True)
class Create:
    """Make and start a container."""

    want: ContainerSpec

    def __str__(self) -> str:
        return f"start {self.want.name}"


Step = Remove | Create


def parse_container(row: Mapping[str, Any]) -> Container:
    """A row of docker's container list."""
    return Container(
        id=row["Id"],
        name=row["Names"][0].removeprefix("/"),
        state=row["State"],
        created=row.get("Created", 0),
        image=row.get("ImageID", ""),
        labels=row.get("Labels") or {},
    )


def observe(client: docker.DockerClient, names: tuple[str, ...]) -> dict[str, Container]:
    """The containers of these names, in any state."""
    # The name filter matches parts, and is a pattern for docker: compare the names ourselves.
    rows = client.api.containers(all=True)
    found = (parse_container(row) for row in rows if row.get("Names"))
    return {container.name: container for container in found if container.name in names}


def refuse_foreign(cluster: str, node: str, have: Mapping[str, Container]) -> None:
    """A container under our name that we did not start is nothing we may touch."""
    for container in have.values():
        if container.label(CLUSTER_LABEL) != cluster:
            raise NotOurs(
                f"container {container.name} ({container.id[:12]}) was not started by sparkrail",
                node=node,
                remedy=f"Rename or remove it: docker rm -f {container.name}",
            )


def why_replace(
    want: ContainerSpec, have: Container, shared: Container | None, run: str, restart: str
) -> str:
    """Why a container of ours cannot stay, or nothing."""
    if have.label(DIGEST_LABEL) != want.digest:
        return "its spec has changed"
    if not have.running:
        return f"it is {have.state}"
    if want.shares and (shared is None or have.label(SHARES_LABEL) != shared.id):
        return f"{want.shares} was started anew"
    if restart == "always" and have.label(RUN_LABEL) != run:
        return "a restart was asked for"
    return ""


def plan(
    want: ContainerSpec, have: Mapping[str, Container], run: str, restart: str = "if-changed"
) -> list[Step]:
    """The steps to one wanted container."""
    container = have.get(want.name)
    if container is None:
        return [Create(want)]
    why = why_replace(want, container, have.get(want.shares), run, restart)
    return [Remove(container, why), Create(want)] if why else []


def act(client: docker.DockerClient, cluster: str, node: str, run: str, step: Step) -> None:
    """Do one step; what docker refuses is an error that names the node."""
    # The docker API knows nothing of our cancel: the engine would go on alone.
    if remote.STOP.is_set():
        raise Cancelled(f"cancelled before: {step}", node=node)
    if isinstance(step, Remove):
        remove(client, step.container)
    else:
        create(client, cluster, node, run, step.want)


def remove(client: docker.DockerClient, container: Container) -> None:
    """Stop with grace, then take it away; that it is gone already is fine."""
    try:
        found = client.containers.get(container.id)
        if found.status not in HALF_REMOVED:
            forbid_restart(found)
            # The server may finish what it answers; Ray holds nothing that is worth a wait.
            found.stop(timeout=STOP_GRACE if container.label(SHARES_LABEL) else RAY_GRACE)
        try:
            found.remove(force=True, v=True)
        except APIError as error:
            if "already in progress" not in str(error):
                raise
            found.wait(condition="removed", timeout=REMOVAL_SECONDS)
    except NotFound:
        return


def forbid_restart(found: Any) -> None:
    """A kill from outside counts as a crash for docker: without this it may come back."""
    try:
        found.update(restart_policy=NEVER)
    except APIError as error:
        # It ended just then, and is taken away next.
        if "stopped container" not in str(error):
            raise


def create(
    client: docker.DockerClient, cluster: str, node: str, run: str, want: ContainerSpec
) -> None:
    """Create and start; a container that cannot start is not left behind holding the name."""
    shared = client.containers.get(want.shares) if want.shares else None
    labels = {
        CLUSTER_LABEL: cluster,
        DIGEST_LABEL: want.digest,
        RUN_LABEL: run,
        SHARES_LABEL: str(shared.id) if shared else "",
        BOOT_LABEL: want.boot,
    }
    try:
        container = client.containers.create(
            want.found_as or want.image,
            list(want.command[1:]),
            labels=labels,
            **options(want, shared),
        )
    except ImageNotFound as error:
        raise CommandFailed(f"no image {want.image}", node=node) from error
    try:
        container.start()
    except APIError:
        container.remove(force=True)
        raise


def options(want: ContainerSpec, shared: Any) -> dict[str, Any]:
    """docker-py's keyword arguments for a wanted container."""
    gpus = [DeviceRequest(count=-1, capabilities=[["gpu"]])] if want.gpu_access == "nvidia" else []
    chosen: dict[str, Any] = {
        "name": want.name,
        # An image's own entrypoint would swallow our command; an empty list would not reset it.
        "entrypoint": [want.command[0]],
        "devices": ["/dev/infiniband"] if want.rdma else [],
        "network_mode": "host",
        "init": True,
        "volumes": [f"{want.folder}:{FOLDER}:ro", f"{want.model}:{want.model}:ro"],
        "device_requests": gpus,
        # RDMA pins the memory that it sends from.
        "ulimits": [docker.types.Ulimit(name="memlock", soft=-1, hard=-1)] if want.rdma else [],
        "log_config": docker.types.LogConfig(
            type="json-file", config={"max-size": "50m", "max-file": "3"}
        ),
    }
    if shared is None:
        # Ray and vLLM meet by sockets in /tmp, which ends with Ray's container.
        return chosen | {
            "ipc_mode": "shareable",
            "shm_size": f"{want.shm_mib}m",
            "mounts": [docker.types.Mount("/tmp", None, type="volume")],
        }
    # The server is a Ray driver: it needs the raylet's sockets and shared memory, and ends with it.
    return chosen | {
        "ipc_mode": f"container:{shared.id}",
        "pid_mode": f"container:{shared.id}",
        "volumes_from": [shared.id],
        "init": False,
    }


def log_tail(client: docker.DockerClient, name: str, lines: int = 30) -> str:
    """The last lines that a container printed."""
    try:
        raw: bytes = client.api.logs(name, tail=lines)
    except NotFound:
        return ""
    except APIError as error:
        if "marked for removal" in str(error):  # Of one that is half removed, docker tells none.
            return ""
        raise
    return raw.decode(errors="replace")
