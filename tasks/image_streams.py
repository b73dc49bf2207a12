"""An image on its way: `docker save` on one machine into `docker load` on others, never a file."""

import re

from pydantic import BaseModel

from blocks import Node
from tasks.errors import CommandFailed, NodeUnreachable, SparkrailError

STEP = "image transfer"
STALL = 120.0
SLOWEST = 10_000_000  # Bytes a second.
# An engine with the containerd store may save an index that names platforms it never pulled.
LACKS_PLATFORM = re.compile(
    r"blobs/sha256/[0-9a-f]{64}: no such file|content digest sha256:[0-9a-f]{64}: not found"
)
# The engine tells errors in the midst of its answer; the command may end well all the same.
ERROR_OBJECT = re.compile(r'"errorDetail"|^Error ', re.MULTILINE)
LOAD = ("docker", "load")


class FolderUnreadable(CommandFailed):
    """The engine's folder could not be read to the end; docker itself may be able to."""


class Moved(BaseModel, frozen=True):
    """How a stream ended: both exit codes, and what both sides said."""

    source_code: int = 0
    source_said: str = ""
    source_stalled: bool = False
    read: int = 0  # Of what the source wrote; `bytes` is what went on of it.
    bytes: int = 0
    seconds: float = 0.0
    legacy: bool = False  # The layout of the archive.
    left_out: int = 0
    sent_anyway: int = 0
    from_store: bool = False  # Read from the engine's folder, not by docker save.
    unread: str = ""  # Why that was tried in vain.
    load_code: int = 0
    load_said: str = ""
    load_stalled: bool = False
    refused: bool = False  # The load stopped listening before the end.
    broken: str = ""  # The stream ended before its end.
    next_failed: str = ""  # Why the machine behind this one did not get it.
    note: str = ""  # Why more was sent than was lacking.

    @property
    def load_failed(self) -> bool:
        return self.load_code != 0 or bool(ERROR_OBJECT.search(self.load_said))


def save_command(name: str, platform: str = "") -> list[str]:
    options = [f"--platform={platform}"] if platform else []
    return ["docker", "save", *options, "--", name]


def save_problem(source: str, moved: Moved) -> SparkrailError | None:
    """Why the image did not come out of its source."""
    if moved.broken and moved.from_store:
        return FolderUnreadable(moved.broken, node=source, remedy=f"Is the disk of {source} well?")
    if moved.source_stalled:
        return CommandFailed(
            f"docker save wrote no byte for {STALL:.0f} s",
            node=source,
            details=moved.source_said,
            remedy=f"Does docker on {source} answer, and its disk? Then run again.",
        )
    if moved.source_code == 127:
        return CommandFailed(
            "docker is missing, the image cannot be saved",
            node=source,
            remedy=f"Install it on {source}, on the PATH of non-interactive logins.",
        )
    if moved.source_code != 0 or moved.read == 0:
        return CommandFailed(
            f"docker save ended with exit code {moved.source_code} after {moved.read} bytes",
            node=source,
            details=moved.source_said,
            remedy=f"Does `docker save` of this image work on {source}, and is there room in its "
            "/var/lib/docker?",
        )
    if moved.broken:
        return CommandFailed(moved.broken, node=source, remedy="Run again.")
    return None


def load_problem(source: str, node: Node, moved: Moved) -> SparkrailError | None:
    """Why the image did not get into the node's engine."""
    if moved.load_stalled:
        return NodeUnreachable(
            f"docker load of the image from {source}: it took no byte for {STALL:.0f} s",
            node=node.name,
            details=moved.load_said,
            remedy=f"Does docker on {node.name} answer, and its disk? Then run again.",
        )
    if moved.load_failed:
        return CommandFailed(
            f"docker load of the image from {source} ended with exit code {moved.load_code}",
            node=node.name,
            details=moved.load_said,
            remedy=_load_remedy(node, moved),
        )
    return None


def _load_remedy(node: Node, moved: Moved) -> str:
    if "no space left" in moved.load_said.lower():
        return f"Make room on {node.name}: docker system df"
    if "permission denied" in moved.load_said.lower():
        return f"On {node.name}: sudo usermod -aG docker {node.user}"
    if moved.load_code == 127:
        return f"Install docker on {node.name}, on the PATH of non-interactive logins."
    return f"Does docker answer on {node.name}? Nothing was replaced; run again."


def refuses_part(moved: Moved) -> bool:
    """Whether a load failed that was not given every layer, for another reason than its machine."""
    said = moved.load_said.lower()
    of_the_machine = moved.load_code == 127 or any(
        reason in said for reason in ("no space left", "permission denied", "cannot connect")
    )
    return moved.left_out > 0 and moved.load_failed and not of_the_machine


def deadline(size: int) -> float:
    # Engines may gather the image before the first byte, and unpack it after the last.
    return 1800 + size / SLOWEST
