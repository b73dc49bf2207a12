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
from tasks.converge import Outcome, Run, step
from tasks.engine_verdicts import ROLE_LABEL
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
LONGEST = 240  # The program ends by itself before that.
# Between the ports that Ray takes and those that the kernel hands out.
PORTS = range(20000, 32000)
# Not by the image's entrypoint, which may swallow our words; the variables are the engine's own.
SCRIPT = f'. {FOLDER}/node.env && exec python3 - "$@"'
FIREWALL = (
    "Is the link up, and does no firewall stop TCP between the fabric addresses? The engine uses "
    "any port."
)
INTERFACE = "Take GLOO_SOCKET_IFNAME out of the spec: it follows from fabric_address."


class Rank(BaseModel, frozen=True):
    """What came of the all-reduce on one node."""

    node: str
    code: int = 0
    said: str = ""
    interface: str = ""
    address: str = ""
    host_ip: str = ""
    mib_s: float = 0.0
    transport: str = ""

    @property
    def last(self) -> str:
        return self.said.splitlines()[-1] if self.said else f"exit code {self.code}"


def rank_command(
    cluster: Cluster, run: Run, want: ContainerSpec, arguments: Sequence[object]
) -> tuple[str, ...]:
    """A throwaway container: gone with its process, which ends with its peers or with us."""
    nvidia = ("--gpus=all",) if want.gpu_access == "nvidia" else ()
    rdma = ("--device=/dev/infiniband", "--ulimit=memlock=-1") if want.rdma else ()
    return (
        *("docker", "run", "--rm", "--interactive", "--init", "--pull=never"),
        *("--network=host", "--log-driver=none", "--entrypoint=/bin/sh"),
        f"--label={CLUSTER_LABEL}={cluster.name}",
        f"--label={RUN_LABEL}={run.id}",
        f"--label={ROLE_LABEL}=proof",
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
        if line.startswith("{"):
            values |= json.loads(line)
    return Rank.model_validate({**values, "node": node, "code": code, "said": stderr.strip()})


def failure(cluster: Cluster, ranks: Sequence[Rank]) -> NotReady | None:
    """The error that names the node at fault; the other ranks only ended with that one."""
    planned = {node.name: node.fabric_address for node in cluster.nodes}
    for rank in ranks:
        if rank.host_ip not in ("", planned[rank.node]):
            return _error(
                rank,
                f"VLLM_HOST_IP is {rank.host_ip}, planned is {planned[rank.node]}; serve would "
                "wait for ever",
                "Take it out of the variables that you give: it follows from fabric_address.",
            )
        if rank.address.startswith("127."):
            # It may go well by chance: of two ranks, one dials and one listens.
            return _error(
                rank, f"{_astray(rank, planned[rank.node])}, nor does any node reach it", INTERFACE
            )
    failed = sorted((rank for rank in ranks if rank.code != 0), key=_blame)
    if not failed:
        return None
    first, hit = failed[0], find_failure(failed[0].said)
    astray = next((rank for rank in ranks if rank.address not in ("", planned[rank.node])), None)
    if astray and not (hit and not hit.failure.retryable):
        return _error(astray, f"{_astray(astray, planned[astray.node])}: {first.last}", INTERFACE)
    if hit:
        return _error(first, f"{hit.failure.cause}: {hit.line}", hit.failure.remedy)
    return _error(first, first.last, FIREWALL if first.code == NOT_REACHED else "")


def _blame(rank: Rank) -> int:
    # What is no exit code of the program's is docker's, or a signal's.
    return {NOT_REACHED: 1, PORT_TAKEN: 2, PEER_ENDED: 3}.get(rank.code, 0)


def _error(rank: Rank, why: str, remedy: str) -> NotReady:
    return NotReady(
        f"{NAME}: {why}",
        node=rank.node,
        details="\n".join(rank.said.splitlines()[-10:]),
        remedy=f"{remedy} Nothing was stopped.".strip(),
    )


def _astray(rank: Rank, planned: str) -> str:
    return f"GLOO_SOCKET_IFNAME is {rank.interface} ({rank.address}), which does not own {planned}"


def problems(
    cluster: Cluster, ranks: Sequence[Rank], rdma: Mapping[str, bool], no_memory: str
) -> list[Problem]:
    """What works but is slow, as rows of the report's table."""
    head, limit = ranks[0], cluster.proof.slow_mib_s
    planned = {node.name: node.fabric_address for node in cluster.nodes}
    found = []
    if no_memory:
        found.append(
            (
                head,
                f"proven by gloo only, not by NCCL: {no_memory}",
                "The running release holds the GPU's memory; what NCCL uses was not tried.",
            )
        )
    if head.mib_s < limit:
        found.append(
            (
                head,
                f"{_speed(ranks)}, less than proof.slow_mib_s {limit}",
                "See the link's speed (ethtool INTERFACE) and who else uses it.",
            )
        )
    for rank in ranks:
        if rank.address != planned[rank.node]:
            found.append((rank, _astray(rank, planned[rank.node]), INTERFACE))
        if rdma.get(rank.node) and rank.transport and not rank.transport.startswith("IB"):
            found.append(
                (
                    rank,
                    f"NCCL takes {rank.transport}, not RDMA",
                    "See NCCL_IB_HCA in node.env, and whether the port is ACTIVE (ibstat).",
                )
            )
    return [
        Problem(node=rank.node, check=NAME, verdict="slow", detail=detail, remedy=remedy)
        for rank, detail, remedy in found
    ]


def _speed(ranks: Sequence[Rank]) -> str:
    by = f"NCCL ({ranks[0].transport})" if ranks[0].transport else "gloo"
    ways = ", ".join(dict.fromkeys(rank.interface for rank in ranks))
    return f"{ranks[0].mib_s:.0f} MiB/s by {by} over {len(ranks)} nodes ({ways})"


def observe(
    cluster: Cluster, run: Run, wanted: Mapping[str, ContainerSpec], backend: str
) -> list[Rank]:
    """One rank on each node, all at once."""
    port = random.choice(PORTS)

    def run_rank(number: int, node: Node) -> Rank:
        arguments = (
            *(number, len(cluster.nodes), cluster.head.fabric_address, port),
            *(backend, MIB, SECONDS),
        )
        command = rank_command(cluster, run, wanted[node.name], arguments)
        result = connect(cluster, node).run(
            command, stdin=PROGRAM, timeout=LONGEST, ok=range(-1, 256)
        )
        return parse_rank(node.name, result.code, result.stdout, result.stderr)

    with ThreadPoolExecutor(max_workers=len(cluster.nodes)) as pool:
        return list(pool.map(run_rank, range(len(cluster.nodes)), cluster.nodes))


@step("fabric proof")
def prove_fabric(
    cluster: Cluster, node: Node, run: Run, wanted: Mapping[str, ContainerSpec]
) -> Outcome:
    """The nodes can reduce a tensor together, as the engine will; nothing was stopped for it."""
    skipped = "" if cluster.workers else "one node"
    if not cluster.proof.enabled:
        skipped = "proof.enabled is false"
    if skipped or run.dry_run:
        detail = f"skipped: {skipped or 'a dry run'}"
        return Outcome(step=NAME, node=node.name, status="unchanged", detail=detail, data=[])
    backend = "nccl" if cluster.image.gpu_access == "nvidia" else "gloo"
    ranks = observe(cluster, run, wanted, backend)
    if any(rank.code == PORT_TAKEN for rank in ranks):
        ranks = observe(cluster, run, wanted, backend)
    full = [rank for rank in ranks if rank.code == NO_MEMORY]
    if full:
        # No matter of the network: whether the addresses and interfaces are right is still told.
        ranks = observe(cluster, run, wanted, "gloo")
    error = failure(cluster, ranks)
    if error:
        raise error
    no_memory = f"{full[0].node}: {full[0].last}" if full else ""
    rows = problems(cluster, ranks, {name: want.rdma for name, want in wanted.items()}, no_memory)
    return Outcome(step=NAME, node=node.name, status="unchanged", detail=_speed(ranks), data=rows)
