"""A real all-reduce over the planned nodes, while the old release still serves."""

import json
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from blocks import Cluster, Node
from tasks.containers import CLUSTER_LABEL, RUN_LABEL
from tasks.converge import Outcome, Run, log, step
from tasks.errors import NotReady
from tasks.failures import find_failure
from tasks.preflight import Problem
from tasks.remote import connect
from tasks.topology import FOLDER, ContainerSpec

NAME = "fabric proof"
PROGRAM = (Path(__file__).parent / "relayed" / "all_reduce.py").read_bytes()
FAILED, PEER_ENDED, NO_MEMORY, PORT_TAKEN, NOT_REACHED = 1, 3, 4, 5, 6
MIB = 16  # Small: on a GPU the old release holds nearly all memory.
SECONDS = 15  # For what follows the imports.
LONGEST = 200  # The program ends itself before that.
# Between the ports that Ray takes and those that the kernel hands out.
PORTS = range(20000, 32000)
# Not the image's entrypoint, which may swallow our words; the variables are those of the engine.
SCRIPT = f'. {FOLDER}/node.env && exec python3 - "$@"'


class Rank(BaseModel, frozen=True):
    """What came of the all-reduce on one node."""

    node: str
    code: int
    said: str = ""
    interface: str = ""
    address: str = ""
    host_ip: str = ""
    mib_s: float = 0.0
    seconds: float = 0.0
    transport: str = ""


def rank_command(
    cluster: Cluster, run: Run, want: ContainerSpec, arguments: Sequence[object]
) -> tuple[str, ...]:
    """A throwaway container: gone with its process, which ends when its peers or we do."""
    nvidia = ("--gpus=all",) if want.gpu_access == "nvidia" else ()
    rdma = ("--device=/dev/infiniband", "--ulimit=memlock=-1") if want.rdma else ()
    return (
        *("docker", "run", "--rm", "--interactive", "--init", "--pull=never"),
        *("--network=host", "--log-driver=none", "--entrypoint=/bin/sh"),
        f"--label={CLUSTER_LABEL}={cluster.name}",
        f"--label={RUN_LABEL}={run.id}",
        f"--volume={want.folder}:{FOLDER}:ro",
        *nvidia,
        *rdma,
        *(want.image, "-c", SCRIPT, "sh"),
        *map(str, arguments),
    )


def parse_rank(node: str, code: int, stdout: str, stderr: str) -> Rank:
    """The JSON lines of one rank; a library may print others between them."""
    values: dict[str, Any] = {}
    for line in stdout.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            values |= row
    return Rank.model_validate({**values, "node": node, "code": code, "said": stderr.strip()})


def failure(cluster: Cluster, ranks: Sequence[Rank]) -> NotReady | None:
    """The error that names the node at fault; of the others we only know that they ended with it."""
    for node, rank in zip(cluster.nodes, ranks, strict=True):
        if rank.host_ip not in ("", node.fabric_address):
            return NotReady(
                f"{NAME}: VLLM_HOST_IP is {rank.host_ip}, planned is {node.fabric_address}; "
                "serve would wait for ever",
                node=node.name,
                remedy="Take VLLM_HOST_IP out of the variables that you give: it follows from "
                "fabric_address. Nothing was stopped.",
            )
    order = (FAILED, NOT_REACHED, NO_MEMORY, PORT_TAKEN, PEER_ENDED)
    failed = [rank for rank in ranks if rank.code != 0]
    if not failed:
        return None
    # Any other code is docker's, or a signal's: as bad as a failure of the program itself.
    first = min(failed, key=lambda rank: order.index(rank.code) if rank.code in order else 0)
    return _failed(cluster, first, ranks)


def _failed(cluster: Cluster, first: Rank, ranks: Sequence[Rank]) -> NotReady:
    astray = _astray(cluster, ranks)
    hit = find_failure(first.said)
    last = first.said.splitlines()[-1] if first.said else f"exit code {first.code}"
    details = "\n".join(first.said.splitlines()[-10:-1])
    if astray and not hit:
        name, why = astray[0]
        brief, remedy = why, "Take GLOO_SOCKET_IFNAME out of the spec: it follows from "
        remedy += "fabric_address."
        return NotReady(f"{NAME}: {brief}", node=name, details=first.said, remedy=_kept(remedy))
    if hit:
        brief = f"{hit.failure.cause}: {hit.line}"
        return NotReady(
            f"{NAME}: {brief}", node=first.node, details=details, remedy=_kept(hit.failure.remedy)
        )
    remedy = "See the lines above"
    if first.code == NOT_REACHED:
        port = last.rpartition(":")[0]
        del port
        remedy = (
            f"Is the link up, and does no firewall on {cluster.head.name} or {first.node} stop "
            "TCP between the fabric addresses? All ports are needed, not only Ray's."
        )
    return NotReady(f"{NAME}: {last}", node=first.node, details=details, remedy=_kept(remedy))


def _kept(remedy: str) -> str:
    return f"{remedy} Nothing was stopped."


def _astray(cluster: Cluster, ranks: Sequence[Rank]) -> list[tuple[str, str]]:
    """(node, why) where Gloo uses another address than the fabric's."""
    return [
        (
            node.name,
            f"GLOO_SOCKET_IFNAME is {rank.interface} with {rank.address}, not the interface of "
            f"{node.fabric_address}",
        )
        for node, rank in zip(cluster.nodes, ranks, strict=True)
        if rank.address not in ("", node.fabric_address)
    ]
