"""Who else holds GPU memory on a node once our own release is stopped."""

from collections.abc import Sequence

from blocks import Cluster, Node
from tasks.containers import CLUSTER_LABEL
from tasks.converge import Outcome, Ready, Run, Waiting, step, wait_until
from tasks.facts import NodeFacts, observe_facts
from tasks.node_facts import GpuHolder

NAME = "GPU residue cleanup"
RELEASE_SECONDS = 30.0


def strangers(cluster: Cluster, facts: NodeFacts) -> list[GpuHolder]:
    """Holders of GPU memory that no container of this cluster started."""
    ours = {
        container.id
        for container in (facts.docker.containers if facts.docker else ())
        if container.label(CLUSTER_LABEL) == cluster.name
    }
    return [
        holder
        for holder in facts.gpu_holders
        if holder.process is None or holder.process.container not in ours
    ]


def describe(holders: Sequence[GpuHolder]) -> str:
    """For people: who holds how much."""
    return "; ".join(
        f"pid {holder.pid} ({holder.name}) holds "
        f"{'an unknown amount' if holder.used_mib is None else f'{holder.used_mib} MiB'}"
        for holder in holders
    )


def judge(cluster: Cluster, facts: NodeFacts) -> Ready | Waiting:
    """Ready when every process that nvidia-smi lists exists: a row may outlive its process."""
    others = strangers(cluster, facts)
    dead = [holder for holder in others if holder.process is None and holder.name == "[Not Found]"]
    if dead:
        return Waiting(f"ended processes still hold memory: {describe(dead)}")
    return Ready(others)


@step("GPU residue cleanup")
def report_residue(cluster: Cluster, node: Node, run: Run) -> Outcome:
    """Our own processes have let go of the GPU; who else holds memory is reported, not touched."""
    if run.dry_run:
        return Outcome(step=NAME, node=node.name, status="unchanged")
    others = wait_until(
        NAME,
        node.name,
        lambda: judge(cluster, observe_facts(cluster, node)),
        timeout=RELEASE_SECONDS,
        every=1.0,
    )
    return Outcome(step=NAME, node=node.name, status="unchanged", detail=describe(others))
