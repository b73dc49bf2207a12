"""An image on its way: `docker save` on one machine into `docker load` on another, never a file."""

import json
import re

from pydantic import BaseModel

from blocks import Cluster, Node
from tasks.errors import CommandFailed, NodeUnreachable, SparkrailError
from tasks.programs import run_program
from tasks.remote import connect
from tasks.transfers import SSH_FAILED, Progress, ssh_command, ssh_failed, target

STEP = "image transfer"
STALL = 120.0
SLOWEST = 10_000_000  # Bytes a second.
# An engine with the containerd store may save an index that names platforms it never pulled.
LACKS_PLATFORM = re.compile(
    r"blobs/sha256/[0-9a-f]{64}: no such file|content digest sha256:[0-9a-f]{64}: not found"
)


class Moved(BaseModel, frozen=True):
    """How a stream ended: both exit codes, and what both sides said."""

    source_code: int
    sink_code: int
    bytes: int
    seconds: float = 0.0
    refused: bool = False  # The sink stopped listening before the end.
    stalled: bool = False
    source_said: str = ""
    sink_said: str = ""


def save_command(name: str, platform: str = "") -> list[str]:
    options = [f"--platform={platform}"] if platform else []
    return ["docker", "save", *options, "--", name]


def load_command(worker: Node) -> list[str]:
    return [*ssh_command(worker), target(worker), "docker load"]


def problem(source: str, node: Node, moved: Moved, ssh: Cluster | None) -> SparkrailError | None:
    """Why a stream failed: the side that failed first is to blame, not the one that followed."""
    if moved.stalled:
        return NodeUnreachable(
            f"the image from {source}: no byte moved for {STALL:.0f} s",
            node=node.name,
            details=moved.sink_said or moved.source_said,
            remedy="Is the link up, and does docker answer at both ends? Then run again.",
        )
    if ssh and moved.sink_code == SSH_FAILED:
        return ssh_failed(ssh, node, moved.sink_said)
    save_first = moved.source_code != 0 and not moved.refused
    if moved.sink_code != 0 and not save_first:
        return CommandFailed(
            f"docker load of the image from {source} ended with exit code {moved.sink_code}",
            node=node.name,
            details=moved.sink_said,
            remedy=_load_remedy(node, moved),
        )
    if moved.source_code == 127:
        return CommandFailed(
            f"docker is missing, the image for {node.name} cannot be saved",
            node=source,
            remedy=f"Install it on {source}, on the PATH of non-interactive logins.",
        )
    if moved.source_code != 0 or moved.bytes == 0:
        return CommandFailed(
            f"docker save for {node.name} ended with exit code {moved.source_code} "
            f"after {moved.bytes} bytes",
            node=source,
            details=moved.source_said,
            remedy=f"Does `docker save` of this image work on {source}, and is there room in its "
            "/var/lib/docker?",
        )
    return None


def _load_remedy(node: Node, moved: Moved) -> str:
    if "no space left" in moved.sink_said.lower():
        return f"Make room on {node.name}: docker system df"
    if "permission denied" in moved.sink_said.lower():
        return f"On {node.name}: sudo usermod -aG docker {node.user}"
    if moved.sink_code == 127:
        return f"Install docker on {node.name}, on the PATH of non-interactive logins."
    return f"Does docker answer on {node.name}? Nothing was replaced; run again."


def send_from_head(cluster: Cluster, worker: Node, name: str, platform: str, size: int) -> Moved:
    """Straight from the head's engine to the worker's, over the fabric."""
    with Progress(STEP, cluster, worker, size) as progress:
        moved = _pipe(cluster, worker, save_command(name), size, progress)
        if LACKS_PLATFORM.search(f"{moved.source_said}\n{moved.sink_said}"):
            moved = _pipe(cluster, worker, save_command(name, platform), size, progress)
        failed = problem(cluster.head.name, worker, moved, cluster)
        if failed:
            raise failed
        progress.finished(moved.bytes)
    return moved


def _pipe(cluster: Cluster, worker: Node, save: list[str], size: int, progress: Progress) -> Moved:
    said = run_program(
        connect(cluster, cluster.head),
        "stream",
        json.dumps(save),
        json.dumps(load_command(worker)),
        f"{STALL:g}",
        timeout=deadline(size),
        on_progress=lambda now: progress.told(now["bytes"]),
    )
    return Moved.model_validate(said)


def deadline(size: int) -> float:
    # Engines may gather the image before the first byte, and unpack it after the last.
    return 1800 + size / SLOWEST
