"""What keeps weights from being written on a node, and what to do about it, for both transports."""

import shlex

from blocks import Cluster, Node
from tasks.errors import SparkrailError


def disk_full(worker: Node, path: str) -> tuple[str, str]:
    """(why, remedy)."""
    return "the disk is full", f"Make room on {worker.name}: df -h {shlex.quote(path)}"


def is_disk_full(said: str) -> bool:
    return "No space left" in said or "Disk quota exceeded" in said


def ownership(worker: Node, path: str) -> str:
    """The remedy where a file or folder may not be written."""
    quoted = shlex.quote(path)
    return (
        f"On {worker.name}: sudo mkdir -p {quoted} && sudo chown -R {worker.user} {quoted}\n"
        f"(files that {worker.user} cannot read on the head are the other possible cause)"
    )


def source_changed(cluster: Cluster, worker: Node, what: str) -> SparkrailError:
    """The head's model is not any more what was to be sent."""
    return SparkrailError(
        f"the model changed while it was sent to {worker.name}: {what}",
        node=cluster.head.name,
        remedy="Wait until nothing writes there any more, then run again.",
    )
