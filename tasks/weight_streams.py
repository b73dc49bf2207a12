"""The model's files on their way: rsync on the head to a worker, and what its exit codes mean."""

import shlex

from blocks import Cluster, Node
from tasks.errors import CommandFailed, NodeUnreachable, SparkrailError
from tasks.manifests import SHOWN
from tasks.remote import Result
from tasks.transfers import SSH_FAILED, SSH_SAID, ssh_command, ssh_failed, target

CANNOT_WRITE, BROKEN, TIMED_OUT, NOT_FOUND = 11, 12, 30, 127


def rsync_command(cluster: Cluster, worker: Node) -> tuple[str, ...]:
    """Run on the head; its standard input names the files, each ended by a zero byte."""
    path = cluster.model.path.rstrip("/")
    return (
        "rsync",
        "--copy-links",
        "--times",
        # They are known to differ by content, whatever their size and time say.
        "--ignore-times",
        "--files-from=-",
        "--from0",
        # An interrupted file goes on where it stopped, and never stands under its final name.
        "--partial-dir=.rsync-part",
        "--timeout=60",
        "--info=progress2",
        "--protect-args",
        f"--rsh={shlex.join(ssh_command(worker))}",
        f"{path}/",
        f"{target(worker)}:{path}/",
    )


def rsync_failed(cluster: Cluster, worker: Node, result: Result) -> SparkrailError:
    """What an exit code of rsync means, and what to do about it."""
    said, code = result.stderr.strip(), result.code
    # rsync may see the end of the stream before the end of its ssh: then it is 12.
    if code == SSH_FAILED or (code == BROKEN and SSH_SAID.search(said)):
        return ssh_failed(cluster, worker, said)
    head, path = cluster.head.name, cluster.model.path
    details = "\n".join([line for line in said.splitlines() if line.strip()][-SHOWN:])
    if code == NOT_FOUND and "rsync error" not in said:
        return CommandFailed(
            f"rsync is missing, the model's files cannot be sent to {worker.name}",
            node=head,
            details=details,
            remedy="Install it: apt-get install rsync",
        )
    why, remedy = _reason(code, said, head, worker, path)
    # The transport was lost: worth another try, which goes on where this one stopped.
    kind = NodeUnreachable if code == TIMED_OUT else CommandFailed
    return kind(
        f"the model's files did not arrive from {head}: {why} (rsync exit code {code})",
        node=worker.name,
        details=details,
        remedy=remedy,
    )


def _reason(code: int, said: str, head: str, worker: Node, path: str) -> tuple[str, str]:
    name = worker.name
    if full := disk_full(said, worker, path):
        return full
    if "Permission denied" in said or "Operation not permitted" in said:
        return "may not read or write", ownership(worker, path)
    if code == NOT_FOUND or "command not found" in said or "rsync: not found" in said:
        return "rsync is missing", f"Install it on {name}: apt-get install rsync"
    if code == 2 or "is your shell clean" in said:
        return (
            "its login prints text",
            f"Silence what {worker.user}'s shell prints at login on {name}.",
        )
    if code == CANNOT_WRITE:
        # The receiver's own words do not always arrive.
        return "cannot be written", f"Is its disk full? On {name}: df -h {shlex.quote(path)}"
    if code in (23, 24):
        return "files changed on the way", f"Does something write to {path} on {head}? Run again."
    if code == TIMED_OUT:
        return "nothing moved for 60 s", f"Is the link between {head} and {name} up? Run again."
    return "the transfer broke", "Run again: it goes on where it stopped."


def disk_full(said: str, worker: Node, path: str) -> tuple[str, str] | None:
    if "No space left" in said or "Disk quota exceeded" in said:
        return "the disk is full", f"Make room on {worker.name}: df -h {shlex.quote(path)}"
    return None


def ownership(worker: Node, path: str) -> str:
    quoted = shlex.quote(path)
    return (
        f"On {worker.name}: sudo mkdir -p {quoted} && sudo chown -R {worker.user} {quoted}\n"
        f"(files that {worker.user} cannot read on the head are the other possible cause)"
    )
