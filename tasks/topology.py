"""What each node gets: its variables, its files, its containers. Every fact has one owner."""

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, Field

from blocks import Cluster, Node

FOLDER = "/sparkrail"  # Where the containers see the node's files.
LAUNCH = (Path(__file__).parent / "relayed" / "launch").read_bytes()
# Of these each node has its own value: vLLM must not carry the head's over to the other nodes.
STAY = (
    "GLOO_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_HCA",
    "NCCL_IB_GID_INDEX",
    "UCX_NET_DEVICES",
    "VLLM_HOST_IP",
    "VLLM_API_KEY",  # Only the server needs it.
)


class Fabric(BaseModel, frozen=True):
    """The interface that owns a node's fabric address, and the RDMA ports behind it."""

    interface: str
    rdma: tuple[str, ...] = ()  # "mlx5_0:1"


@dataclass(frozen=True)
class Secrets:
    """Values for the containers that nobody may see; they go into a file of mode 0600 only."""

    api_key: str = field(default="", repr=False)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)


class ContainerSpec(BaseModel, frozen=True):
    """A container as we want it. Its digest is a label, so that any drift is one comparison."""

    name: str
    role: str
    image: str
    image_content: str
    command: tuple[str, ...]
    folder: str
    model: str
    gpu_access: str
    shm_mib: int
    rdma: bool
    files: tuple[str, ...]  # sha256 of what it reads from the folder.
    weights: str = ""  # Digest of the model's files, for what loads them.
    shares: str = ""  # Name of the container whose /dev/shm, /tmp/ray and processes it shares.
    # The boot of the node in which it is made: of the container's labels, not of its digest.
    boot: str = Field("", exclude=True)
    # By which name docker finds that content, where it is not the image's own any more.
    found_as: str = Field("", exclude=True)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


class Files(BaseModel, frozen=True):
    """The launch script and what it reads, as they stand on one node."""

    launch: bytes = Field(repr=False)
    environment: bytes = Field(repr=False)  # It holds secrets.
    arguments: bytes | None = Field(None, repr=False)

    def items(self) -> list[tuple[str, bytes, int]]:
        """(name, content, mode) of each file."""
        files = [("launch", self.launch, 0o755), ("node.env", self.environment, 0o600)]
        if self.arguments is not None:
            files.append(("serve.args", self.arguments, 0o644))
        return files


def state_folder(cluster: Cluster, home: str) -> str:
    """Everything of ours on a node lies here; no root needed."""
    return f"{home}/.sparkrail/{cluster.name}"


def run_folder(cluster: Cluster, home: str) -> str:
    """What the containers see under /sparkrail."""
    return f"{state_folder(cluster, home)}/run"


def ray_container(cluster: Cluster) -> str:
    return f"sparkrail-{cluster.name}-ray"


def serve_container(cluster: Cluster) -> str:
    return f"sparkrail-{cluster.name}-serve"


def kept_log(cluster: Cluster, container: str) -> str:
    """Where what a container said is kept when its deploy has failed, on its node."""
    return f"~/.sparkrail/{cluster.name}/failed/{container}.log"


def endpoint_of(cluster: Cluster) -> str:
    """Where clients find the model."""
    host = cluster.serve.host if cluster.serve.host != "0.0.0.0" else cluster.head.address
    return f"http://{host}:{cluster.serve.port}/v1"


def environment(
    cluster: Cluster, node: Node, fabric: Fabric, secrets: Secrets | None = None
) -> dict[str, str]:
    """The variables of one node: derived ones first, then the user's; empty values are left out."""
    store = cluster.ray.object_store_mib
    derived = {
        "SPARKRAIL_HEAD": cluster.head.fabric_address,
        "SPARKRAIL_RAY_PORT": str(cluster.ray.port),
        "SPARKRAIL_GPUS": str(node.gpus),
        "SPARKRAIL_OBJECT_STORE": str(store * 1024 * 1024) if store else "",
        "SPARKRAIL_STAY": json.dumps(staying(cluster)),
        "VLLM_HOST_IP": node.fabric_address,
        # Gloo takes one name; "=" makes NCCL match the whole name, not every name it begins.
        "GLOO_SOCKET_IFNAME": fabric.interface,
        "TP_SOCKET_IFNAME": fabric.interface,
        "NCCL_SOCKET_IFNAME": f"={fabric.interface}",
        "NCCL_IB_HCA": f"={','.join(fabric.rdma)}" if fabric.rdma else "",
        "UCX_NET_DEVICES": ",".join(fabric.rdma) or fabric.interface,
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    # An interface that is left empty is no choice: without ours, Gloo would take 127.0.0.1.
    own = {name: value for name, value in node.environment.items() if value or name not in STAY}
    values = {**derived, **cluster.environment, **own}
    secret = secrets.environment if secrets else {}
    shown = [name for name, value in values.items() if value and name not in secret]
    if secrets:
        values |= secret
        if secrets.api_key and node == cluster.head:
            values["VLLM_API_KEY"] = secrets.api_key
    values["SPARKRAIL_SHOWN"] = " ".join(shown)
    # A variable that is set but empty is read as 0 by NCCL (nccl #769): leave it out instead.
    return {name: value for name, value in values.items() if value}


def staying(cluster: Cluster) -> list[str]:
    """Variables that differ per node, by their nature or because the spec of a node sets them."""
    own = {name for node in cluster.nodes for name in node.environment}
    return [*STAY, *sorted(own - set(STAY))]


def arguments(cluster: Cluster) -> tuple[str, ...]:
    """What `vllm` is called with."""
    serve = cluster.serve
    return (
        "serve",
        cluster.model.path,
        f"--served-model-name={cluster.model.name}",
        f"--host={serve.host}",
        f"--port={serve.port}",
        f"--tensor-parallel-size={serve.tensor_parallel}",
        f"--pipeline-parallel-size={serve.pipeline_parallel}",
        "--distributed-executor-backend=ray",
        *(("--trust-remote-code",) if cluster.model.trust_remote_code else ()),
        *serve.arguments,
    )


def files(cluster: Cluster, node: Node, fabric: Fabric, secrets: Secrets | None = None) -> Files:
    """The files of one node; only the head has vLLM's arguments."""
    lines = (
        f"export {name}={shlex.quote(value)}\n"
        for name, value in environment(cluster, node, fabric, secrets).items()
    )
    is_head = node == cluster.head
    return Files(
        launch=LAUNCH,
        environment="".join(lines).encode(),
        arguments=f"set -- {shlex.join(arguments(cluster))}\n".encode() if is_head else None,
    )


def containers(
    cluster: Cluster,
    node: Node,
    home: str,
    fabric: Fabric,
    files: Files,
    image_content: str,
    weights: str = "",
    boot: str = "",
) -> tuple[ContainerSpec, ...]:
    """Ray on every node, and on the head the server beside it."""
    base = {
        "image": cluster.image.name,
        "image_content": image_content,
        "folder": run_folder(cluster, home),
        "model": cluster.model.path,
        "gpu_access": cluster.image.gpu_access,
        "shm_mib": cluster.image.shm_mib,
        "rdma": bool(fabric.rdma),
        "boot": boot,
    }
    is_head = node == cluster.head
    common = (_sha(files.launch), _sha(files.environment))
    ray = ContainerSpec(
        name=ray_container(cluster),
        role="head" if is_head else "worker",
        command=_launch("head" if is_head else "worker"),
        files=common,
        **base,
    )
    if not is_head:
        return (ray,)
    serve = ContainerSpec(
        name=serve_container(cluster),
        role="serve",
        command=_launch("serve"),
        files=(*common, _sha(files.arguments or b"")),
        weights=weights,
        shares=ray.name,
        **base,
    )
    return (ray, serve)


def _launch(role: str) -> tuple[str, ...]:
    return ("/bin/sh", f"{FOLDER}/launch", role)


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def digest_of(specs: Sequence[ContainerSpec]) -> str:
    """One digest for everything that runs on the nodes."""
    return hashlib.sha256("".join(spec.digest for spec in specs).encode()).hexdigest()[:16]
