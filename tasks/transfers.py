"""Sending from the head to a worker over the fabric: the ssh between them, and how far it is."""

import logging
import re
import time
from collections.abc import Callable
from types import TracebackType

from blocks import Cluster, Node
from tasks.artifacts import Bar
from tasks.errors import HostKeyRefused, LoginRefused, NodeUnreachable, SparkrailError

SSH_OPTIONS = (
    "BatchMode=yes",
    "StrictHostKeyChecking=yes",
    "ConnectTimeout=10",
    "ServerAliveInterval=15",
    "ServerAliveCountMax=4",
)
SSH_FAILED = 255
# How ssh's own last words begin or end, whatever exit code its caller makes of them.
SSH_SAID = re.compile(
    r"Host key verification failed|Permission denied \([a-z]|^ssh: |^kex_exchange_identification: "
    r"|^(Connection|Timeout, server|client_loop:|Received disconnect) ",
    re.MULTILINE,
)
LOG_EVERY = 10.0
SHOW_EVERY = 1.0
log = logging.getLogger("sparkrail")


def ssh_command(worker: Node) -> tuple[str, ...]:
    """The head's own ssh, up to the options; it takes the key and known_hosts of its user."""
    options = (word for option in SSH_OPTIONS for word in ("-o", option))
    return ("ssh", "-p", str(worker.port), *options)


def target(worker: Node) -> str:
    return f"{worker.user}@{worker.fabric_address}"


def ssh_failed(cluster: Cluster, worker: Node, said: str) -> SparkrailError:
    """Why the head's ssh to a worker failed, by what it said, and what to do there."""
    head, address, port = cluster.head, worker.fabric_address, worker.port
    at_head = f"on {head.name}, as {head.user}:\n"
    said = "\n".join(line for line in said.splitlines() if line.strip() and line[0] != "@")
    where = f"{head.name} -> {target(worker)}:{port}"
    if "IDENTIFICATION HAS CHANGED" in said:
        name = address if port == 22 else f"[{address}]:{port}"
        return HostKeyRefused(
            f"{where}: its host key is not the one that {head.name} knows",
            node=worker.name,
            details=said,
            remedy=f"If {worker.name} was installed anew, {at_head}ssh-keygen -R '{name}'\n"
            f"{_keyscan(worker)}",
        )
    if "Host key verification failed" in said:
        return HostKeyRefused(
            f"{where}: {head.name} does not know its host key",
            node=worker.name,
            details=said,
            remedy=f"Trust it, {at_head}{_keyscan(worker)}\n"
            f"and compare it with /etc/ssh/ssh_host_*_key.pub on {worker.name}.",
        )
    if "Permission denied" in said:
        return LoginRefused(
            f"{where}: {worker.name} accepts none of {head.name}'s keys",
            node=worker.name,
            details=said,
            remedy=f"Let it in, {at_head}ssh-copy-id -p {port} {target(worker)}\n"
            "It needs a key without a passphrase there (ssh-keygen makes one).",
        )
    return NodeUnreachable(
        f"{where}: no connection over the fabric, or it broke",
        node=worker.name,
        details=said,
        remedy=f"Is the link up at both ends? Try, {at_head}"
        f"ssh -p {port} -o BatchMode=yes {target(worker)} true",
    )


def _keyscan(worker: Node) -> str:
    return f"ssh-keyscan -p {worker.port} {worker.fabric_address} >> ~/.ssh/known_hosts"


def amount(size: float) -> str:
    """Bytes for people: 999 B, 12.3 MB, 119.0 GB."""
    if size < 1000:
        return f"{size:.0f} B"
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.95:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} TB"


def rate(size: float, seconds: float) -> str:
    """How much, and how fast where that means something."""
    if size < 1_000_000:
        return amount(size)
    return f"{amount(size)} at {amount(size / max(seconds, 0.001))}/s"


def log_progress(what: str, node: Node, done: int, of: int, pace: str = "") -> None:
    log.info("%s on %s: %s%s", what, node.name, share(done, of), pace)


def pace(done: int, of: int, speed: float) -> str:
    """How fast it goes, and how long it will still take."""
    text = f" at {amount(speed)}/s"
    if speed <= 0 or of <= done:
        return text
    left = (of - done) / speed
    return f"{text}, {left / 60:.0f} min left" if left >= 100 else f"{text}, {left:.0f} s left"


def share(done: int, of: int) -> str:
    """How much of how much; where more came than was thought, only how much."""
    return amount(done) + (f" of {amount(of)} ({done / of:.0%})" if of >= done > 0 else "")


class Progress:
    """Around a transfer: a line in the log now and then, and a bar in the Prefect UI."""

    def __init__(
        self,
        step: str,
        cluster: Cluster,
        node: Node,
        of: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bar = Bar(f"{step.replace(' ', '-')}-{cluster.name}-{node.name}")
        self._step = step
        self._node = node
        self._of = of
        self._clock = clock
        self._began = self._logged = self._shown = clock()
        self._done = self._seen = 0
        self._pace = ""

    def __enter__(self) -> "Progress":
        return self

    def told(self, done: int) -> None:
        """So many bytes have gone; to be called as often as one likes."""
        self._done = done
        now = self._clock()
        if now - self._shown >= SHOW_EVERY:
            speed = max(0, done - self._seen) / (now - self._shown)
            self._pace = pace(done, self._of, speed)
            self._show(f"{share(done, self._of)}{self._pace}")
            self._shown, self._seen = now, done
        if now - self._logged >= LOG_EVERY:
            self._logged = now
            log_progress(self._step, self._node, done, self._of, self._pace)

    def finished(self, size: int) -> None:
        """All has arrived."""
        seconds = self._clock() - self._began
        self._done = self._of = size
        self._show(f"{rate(size, seconds)}, in {seconds:.0f} s")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.stopped()

    def stopped(self) -> None:
        """No more will arrive."""
        self._show(f"stopped after {share(self._done, self._of)}")

    def _show(self, text: str) -> None:
        percent = min(100.0, 100 * self._done / self._of) if self._of else 0.0
        self._bar.show(round(percent, 1), text)
