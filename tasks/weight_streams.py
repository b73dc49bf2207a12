"""The model's files by streams over the fabric: the head serves, workers serve those behind them.

A transfer is shared by the steps of all workers that are under way at the same time: the first of
them starts the program on the head, the last one to end hangs up on all. A worker asks those that
joined before it, the latest first, and the head last; whoever dies is left out by those behind it.
"""

import contextlib
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from blocks import Cluster, Node
from tasks.errors import CommandFailed, NodeUnreachable, SparkrailError
from tasks.manifests import Manifest, Send
from tasks.page_caches import release_page_cache
from tasks.remote import connect
from tasks.talks import Talk
from tasks.transfers import Progress
from tasks.weight_faults import disk_full, ownership, source_changed

START = 60.0
SILENCE = 30.0  # The program tells its progress each second.
SLOWEST = 5_000_000  # Bytes a second; a link that is slower than this is broken.


class Arrived(BaseModel, frozen=True):
    """How it went, in the words of the program on the worker."""

    bytes: int
    fetched: int
    damaged: int = 0  # Pieces that had to be fetched again.
    without: tuple[str, ...] = ()  # Whom it asked in vain, and why.


class Transfer:
    """One model on its way to any number of workers."""

    def __init__(self, cluster: Cluster, want: Manifest) -> None:
        self.users = 0
        self._cluster = cluster
        self._want = want
        self._paths = sorted(want.files)
        self._token = secrets.token_hex(32)
        self._joining = threading.Lock()
        self._talks: dict[str, Talk] = {}
        self._sources: dict[str, tuple[str, str, int]] = {}

    def fetch(self, worker: Node, what: Send, progress: Progress) -> Arrived:
        """Have a worker fetch what it lacks; it goes on serving until the transfer is over."""
        deadline = time.monotonic() + 900 + what.size / SLOWEST
        talk = self._join(worker, what)
        try:
            while "done" not in (said := _heard(talk, self._cluster, worker)):
                if "progress" in said:
                    progress.told(said["progress"]["bytes"])
                if time.monotonic() > deadline:
                    raise NodeUnreachable(
                        f"the model's files did not arrive in {900 + what.size / SLOWEST:.0f} s",
                        node=worker.name,
                        remedy="Is the link this slow? Run again: it goes on where it stopped.",
                    )
        except BaseException:
            self._leave(worker)
            raise
        return Arrived.model_validate(said["done"])

    def close(self) -> list[Node]:
        """Hang up on all; tells on which nodes it was still under way."""
        here = [node for node in self._cluster.nodes if node.name in self._talks]
        for talk in self._talks.values():
            talk.close()
        return here

    def _join(self, worker: Node, what: Send) -> Talk:
        connect(self._cluster, worker)
        # One after the other: each is told who listens before it.
        with self._joining:
            self._leave(worker)  # Its own earlier attempt.
            # The programs of the first worker and of the head get ready side by side.
            talk = Talk(connect(self._cluster, worker), "weights_receive")
            try:
                self._start_head()
                self._begin(worker, talk, self._wanted(what))
            except BaseException:
                talk.close()
                raise
            return talk

    def _start_head(self) -> None:
        head = self._cluster.head
        if head.name in self._talks and not self._talks[head.name].over:
            return
        talk = Talk(connect(self._cluster, head), "weights_send")
        try:
            self._begin(head, talk, {"paths": self._paths})
        except BaseException:
            talk.close()
            raise

    def _wanted(self, what: Send) -> dict[str, Any]:
        """What a worker is told: all files, which of them it lacks, and whom to ask."""
        head = self._cluster.head.name
        alive = [name for name in self._talks if not self._talks[name].over]
        behind = [name for name in reversed(alive) if name != head]
        files = [{"path": path, **self._want.files[path].model_dump()} for path in self._paths]
        return {
            "files": files,
            "lacking": [self._paths.index(path) for path in what.paths],
            "sources": [self._sources[name] for name in [*behind, head]],
            "connections": self._cluster.weights.connections,
        }

    def _begin(self, node: Node, talk: Talk, more: dict[str, Any]) -> None:
        """Tell a program what it needs, and note where it listens."""
        talk.tell(
            {
                "address": node.fabric_address,
                "token": self._token,
                "folder": self._cluster.model.path,
                "state": state_file(self._cluster),
                **more,
            }
        )
        port = _heard(talk, self._cluster, node, START)["listening"]
        self._talks[node.name] = talk
        self._sources[node.name] = (node.name, node.fabric_address, port)

    def _leave(self, node: Node) -> None:
        talk = self._talks.pop(node.name, None)
        if talk is not None:
            talk.close()


_transfers: dict[tuple[str, str], Transfer] = {}
_guard = threading.Lock()


@contextlib.contextmanager
def transfer(cluster: Cluster, want: Manifest) -> Iterator[Transfer]:
    """The transfer of this model that is under way, or a new one; the last to leave ends it."""
    key = (cluster.name, want.digest)
    with _guard:
        found = _transfers.setdefault(key, Transfer(cluster, want))
        found.users += 1
    try:
        yield found
    finally:
        with _guard:
            found.users -= 1
            over = not found.users
            if over:
                del _transfers[key]
        if over:
            # Not before: what is in a node's memory is sent on from there.
            for node in found.close():
                with contextlib.suppress(SparkrailError):
                    release_page_cache(cluster, node)


def state_file(cluster: Cluster) -> str:
    """Where a node remembers what it has read of the model."""
    return f"~/.sparkrail/{cluster.name}/weights.json"


def _heard(talk: Talk, cluster: Cluster, node: Node, silence: float = SILENCE) -> dict[str, Any]:
    said = talk.hear(silence)
    if "failed" in said:
        raise failed(cluster, node, **said["failed"])
    return said


def failed(cluster: Cluster, node: Node, kind: str, text: str) -> SparkrailError:
    """What a program could not do, and what to do about it."""
    head, path = cluster.head.name, cluster.model.path
    brief = f"the model's files did not arrive from {head}: "
    again = "Run again: it goes on where it stopped."
    if kind == "changed":
        return source_changed(cluster, node, text)
    if kind == "disk":
        why, remedy = disk_full(node, path)
        return CommandFailed(brief + why, node=node.name, details=text, remedy=remedy)
    if kind == "write":
        return CommandFailed(
            brief + "cannot be written",
            node=node.name,
            details=text,
            remedy=ownership(node, path),
        )
    if kind == "damaged":
        return CommandFailed(
            f"{brief}{text} arrives damaged, again and again",
            node=node.name,
            remedy=f"Nothing of it was kept. Something between {head} and {node.name} changes "
            "bytes: a cable, a network card, or memory. " + again,
        )
    if kind == "listen":
        return CommandFailed(
            f"cannot listen on its fabric address {node.fabric_address}: {text}",
            node=node.name,
            remedy=f"Is the address up? On {node.name}: ip address",
        )
    if kind in ("sources", "stalled", "refused"):
        return NodeUnreachable(
            brief + ("nobody serves them" if kind != "stalled" else text),
            node=node.name,
            details=text,
            remedy=f"Is the link between {head} and {node.name} up, and does no firewall keep "
            f"their TCP ports from each other? {again}\n"
            "Where only SSH may pass: weights.transport: rsync",
        )
    return CommandFailed(brief + text, node=node.name, remedy=again)
