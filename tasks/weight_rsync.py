"""The model's files by rsync from the head to a worker, and what its exit codes mean."""

import contextvars
import re
import shlex
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from blocks import Cluster, Node
from tasks.errors import CommandFailed, NodeUnreachable, SparkrailError
from tasks.manifests import SHOWN, Manifest, Send
from tasks.page_caches import release_page_cache
from tasks.remote import Result, connect
from tasks.transfers import SSH_FAILED, SSH_SAID, Progress, ssh_command, ssh_failed, target
from tasks.weight_faults import disk_full, is_disk_full, ownership

# Preferred, not forced: ends without it, or without hardware for it, agree on another one.
CIPHER = "Ciphers=^aes128-gcm@openssh.com,aes256-gcm@openssh.com"
SLOWEST = 5_000_000  # Bytes a second; a link that is slower than this is broken.
PROGRESS = re.compile(r"([\d,]+) +\d+% ")
ANY_EXIT = range(256)
CANNOT_WRITE, BROKEN, TIMED_OUT, NOT_FOUND = 11, 12, 30, 127


def send_by_rsync(
    cluster: Cluster, worker: Node, want: Manifest, what: Send, progress: Progress
) -> None:
    """Several at once; that one fails is a failure, once all have ended."""
    _make_folder(cluster, worker)
    shares = shared_out(want, what.paths, cluster.weights.connections)
    done = [0] * len(shares)

    def send(place: int) -> Result:
        return connect(cluster, cluster.head).run(
            rsync_command(cluster, worker),
            stdin="".join(f"{path}\0" for path in shares[place]).encode(),
            timeout=900 + what.size / SLOWEST,
            ok=ANY_EXIT,
            on_output=lambda said: tell(place, said),
        )

    def tell(place: int, said: str) -> None:
        found = PROGRESS.findall(said)
        if found:
            done[place] = int(found[-1].replace(",", ""))
            progress.told(sum(done))

    with ThreadPoolExecutor(len(shares)) as pool:
        # Each with our context: what they tell is shown on the page of this run.
        futures = [
            pool.submit(contextvars.copy_context().run, send, place) for place in range(len(shares))
        ]
    for future in futures:
        if (result := future.result()).code != 0:
            raise rsync_failed(cluster, worker, result)
    for node in (cluster.head, worker):
        release_page_cache(cluster, node)


def _make_folder(cluster: Cluster, worker: Node) -> None:
    path = cluster.model.path
    made = connect(cluster, worker).run(("mkdir", "-p", "--", path), ok=(0, 1))
    if made.code != 0:
        why, remedy = "not allowed", ownership(worker, path)
        if is_disk_full(made.stderr):
            why, remedy = disk_full(worker, path)
        raise CommandFailed(
            f"cannot make {path}: {why}",
            node=worker.name,
            details=made.stderr.strip(),
            remedy=remedy,
        )


def shared_out(want: Manifest, paths: Sequence[str], most: int) -> list[list[str]]:
    """The files in shares of about the same size, the largest files first."""
    shares: list[list[str]] = [[] for _ in range(min(most, len(paths)))]
    sizes = [0] * len(shares)
    for path in sorted(paths, key=lambda each: -want.files[each].size):
        least = sizes.index(min(sizes))
        shares[least].append(path)
        # So that empty files are shared out too.
        sizes[least] += want.files[path].size + 1
    return shares


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
        f"--rsh={shlex.join((*ssh_command(worker), '-o', CIPHER))}",
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
    if is_disk_full(said):
        return disk_full(worker, path)
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
