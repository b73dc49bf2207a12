"""One image from the head to any number of workers: each passes it on while it loads it.

The head sends every byte once. A worker that fails is left out and named; those behind it, which
lost the stream with it, get it in a further round.
"""

import contextvars
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from blocks import Cluster, Node
from tasks.errors import Cancelled, NodeUnreachable, SparkrailError
from tasks.image_streams import (
    LOAD,
    STALL,
    Moved,
    deadline,
    load_problem,
    refuses_part,
    save_problem,
)
from tasks.programs import run_program
from tasks.remote import connect
from tasks.transfers import Progress

PROGRAM = "image_stream"
CALL_SECONDS = 120.0  # So long a worker waits for the machine before it.

Ended = Moved | SparkrailError


@dataclass
class Round:
    """How one stream through a chain ended, for everybody in it."""

    loaded: dict[str, Moved] = field(default_factory=dict)
    failed: dict[str, SparkrailError] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # The layers alone, with why.
    cut_off: dict[str, str] = field(default_factory=dict)  # By another's fault, with why.


def judge(head: Node, chain: Sequence[Node], ended: Mapping[str, Ended]) -> Round:
    """Who got the image, who failed, and who only stood behind one that failed.

    `chain` holds the workers in their order. Raises when nothing came out of the head.
    """
    source = ended[head.name]
    if isinstance(source, SparkrailError):
        raise source
    # A chain of which nobody took any more ends its source.
    problem = None if source.next_failed else save_problem(head.name, source)
    if problem:
        raise problem
    found = Round()
    for before, node in zip((head, *chain), chain, strict=False):
        own, sender = ended[node.name], ended[before.name]
        if isinstance(own, SparkrailError):
            found.failed[node.name] = own
        elif not own.broken:
            about = {
                "left_out": source.left_out,
                "sent_anyway": source.sent_anyway,
                "from_store": source.from_store,
                "unread": source.unread,
            }
            own = own.model_copy(update={**about, "legacy": source.legacy})
            wrong = load_problem(head.name, node, own)
            if wrong is None:
                found.loaded[node.name] = own
            elif refuses_part(own):
                found.refused[node.name] = own.load_said.rpartition("\n")[2]
            else:
                found.failed[node.name] = wrong
        elif isinstance(sender, Moved) and sender.next_failed:
            found.failed[node.name] = lost(before, node, f"{sender.next_failed}; {own.broken}")
        else:
            found.cut_off[node.name] = own.broken
    return found


def lost(before: Node, node: Node, why: str) -> NodeUnreachable:
    return NodeUnreachable(
        f"{before.name} -> {node.fabric_address}: the image did not get there over the fabric",
        node=node.name,
        details=why,
        remedy="Is the link up at both ends, and does no firewall keep them from each other there? "
        "Then run again.",
    )


def stream(
    cluster: Cluster,
    chain: Sequence[Node],
    orders: Mapping[str, Any],
    size: int,
    bars: Mapping[str, Progress],
) -> Round:
    """One stream through these workers; `orders` tell the head what to save and to leave out."""
    head = cluster.head
    with ThreadPoolExecutor(len(chain), "image chain") as pool:
        members: list[_Member] = []
        dead: dict[str, SparkrailError] = {}
        # From the end: each must know where the one behind it listens.
        for node in reversed(chain):
            member = _Member(cluster, node, members[0].where if members else None, size, bars)
            member.begin(pool)
            if member.where:
                members.insert(0, member)
            else:
                dead[node.name] = member.error()
        if not members:
            return Round(failed=dead)
        try:
            ended: dict[str, Ended] = {
                head.name: _run(
                    cluster,
                    head,
                    {**orders, "load": None, "next": members[0].where, "stall": STALL},
                    size,
                    lambda _now: None,
                )
            }
        except SparkrailError as error:
            ended = {head.name: error}
        ended |= {member.node.name: member.ended() for member in members}
    found = judge(head, [member.node for member in members], ended)
    found.failed |= dead
    return found


def _run(
    cluster: Cluster, node: Node, orders: Any, size: int, on_progress: Callable[[Any], None]
) -> Moved:
    said = run_program(
        connect(cluster, node),
        PROGRAM,
        orders=orders,
        timeout=deadline(size),
        on_progress=on_progress,
    )
    return Moved.model_validate(said)


class _Member:
    """A worker of the chain, and the program that runs on it."""

    def __init__(
        self, cluster: Cluster, node: Node, behind: Any, size: int, bars: Mapping[str, Progress]
    ) -> None:
        self.cluster = cluster
        self.node = node
        self.where: dict[str, Any] | None = None
        self._behind = behind
        self._size = size
        self._bars = bars
        self._token = secrets.token_hex(32)
        self._known = threading.Event()
        self._future: Future[Moved] | None = None

    def begin(self, pool: ThreadPoolExecutor) -> None:
        """Returns once it listens, or has ended; the program's own deadlines bound that."""
        # The bars of the Prefect UI belong to the task run that we are in.
        context = contextvars.copy_context()
        self._future = pool.submit(context.run, self._run)
        self._future.add_done_callback(lambda _future: self._known.set())
        self._known.wait()

    def _run(self) -> Moved:
        orders = {
            "listen": self.node.fabric_address,
            "token": self._token,
            "wait": CALL_SECONDS,
            "load": LOAD,
            "next": self._behind,
            "stall": STALL,
        }
        return _run(self.cluster, self.node, orders, self._size, self._heard)

    def _heard(self, now: Any) -> None:
        if "port" in now:
            self.where = {
                "address": self.node.fabric_address,
                "port": now["port"],
                "token": self._token,
            }
            self._known.set()
        else:
            self._bars[self.node.name].told(now["bytes"])

    def error(self) -> SparkrailError:
        """Why it does not listen."""
        found = self.ended()
        if isinstance(found, SparkrailError):
            return found
        return lost(self.cluster.head, self.node, found.broken or "its program ended at once")

    def ended(self) -> Ended:
        assert self._future is not None
        try:
            return self._future.result()
        except Cancelled:
            raise
        except SparkrailError as error:
            return error
