"""One run at a time on a cluster: a lock that a process on the head holds for us.

The process ends with our connection, or ends that after some seconds of silence, and the kernel
frees its lock: a killed run, a run that is cut off and a rebooted head never leave a lock behind.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from blocks import Cluster, Node
from tasks import remote
from tasks.converge import Outcome, Run, log, step
from tasks.errors import Cancelled, CommandFailed, Locked, NodeUnreachable, SparkrailError
from tasks.remote import Stream, connect

PROGRAM = (Path(__file__).parent / "relayed" / "lock.py").read_text()
BEAT = 3.0
SILENCE = 15.0  # After which the head ends our connection, and then frees it.
ENDING = 5.0
LEAD = 3.0  # How long before that we take it for lost: two runs must never both hold it.
RELEASE = 5.0
ANSWER = 20.0


class Owner(BaseModel, frozen=True):
    """Who holds a lock."""

    run: str
    who: str
    since: float = 0.0

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"run {self.run} of {self.who}, since {since}"


class Answer(BaseModel, frozen=True):
    """What the relayed program says."""

    held: bool
    owner: Owner | None = None
    left: Owner | None = None


class Lock:
    """A lock that we hold for as long as the head answers our beats.

    One thread sends and another listens: where the link is down, a send may block for ever.
    """

    def __init__(self, channel: Stream, *, beat: float = BEAT, silence: float = SILENCE) -> None:
        self.lost = ""  # Why, once it is.
        self._channel = channel
        self._beat = beat
        self._lease = silence - LEAD * silence / SILENCE
        self._sent: deque[float] = deque()
        self._over = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="lock listener", daemon=True)
        self._listener.start()
        threading.Thread(target=self._send, name="lock sender", daemon=True).start()

    def release(self) -> None:
        """Free it, and wait until it is free; over a dead link the head frees it by itself."""
        self._over.set()
        self._listener.join(RELEASE)

    def _send(self) -> None:
        # When sending fails, the listener finds out why.
        with contextlib.suppress(OSError, EOFError):
            while not self._over.wait(self._beat):
                self._sent.append(time.monotonic())
                self._channel.sendall(b".")
            self._channel.shutdown_write()

    def _listen(self) -> None:
        # The head counts from when a beat came, which is later than when it was sent.
        beaten = time.monotonic()
        why = ""
        while not why:
            try:
                self._channel.settimeout(max(0.01, beaten + self._lease - time.monotonic()))
                answers = self._channel.recv(1024)
            except TimeoutError:
                why = f"the head has not answered for {self._lease:g} s"
            except (OSError, EOFError):
                why = "the connection to the head is lost"
            else:
                for _ in answers:
                    beaten = self._sent.popleft()
                if not answers:
                    why = "the process that holds it on the head has ended"
        if not self._over.is_set():
            # From here on another run may hold it: whatever we still do must stop.
            self.lost = why
            log.error("the lock is lost, stopping this run: %s", why)
            remote.cancel()
        self._channel.close()


_held: dict[str, Lock] = {}


@step("lock")
def take_lock(cluster: Cluster, node: Node, run: Run) -> Outcome:
    """Hold the cluster's lock on the head until `release_lock`, or refuse and say who has it."""
    if run.dry_run:
        return Outcome(step="lock", node=node.name, status="unchanged", detail="not needed")
    deadline = time.monotonic() + SILENCE + ENDING + BEAT
    while True:
        channel = _start(cluster, node, run)
        try:
            answer = _answer(channel, node)
        except BaseException:
            channel.close()
            raise
        if answer.held:
            break
        channel.close()
        # An attempt of this run that was cut off holds it for a few seconds yet.
        ours = answer.owner is not None and answer.owner.run == run.id
        if not ours or time.monotonic() > deadline or remote.STOP.wait(0.5):
            raise Locked(
                f"{cluster.name} is worked on by {answer.owner or 'another run'}",
                node=node.name,
                remedy="Wait until it has ended, or end it; a run that died frees its lock within "
                f"{SILENCE + ENDING:g} s.",
            )
    _held[cluster.name] = Lock(channel)
    detail = f"taken over from {answer.left}, which died" if answer.left else ""
    return Outcome(step="lock", node=node.name, status="unchanged", detail=detail)


def release_lock(cluster: Cluster) -> None:
    """Free the lock if we hold it."""
    lock = _held.pop(cluster.name, None)
    if lock is not None:
        lock.release()


@contextlib.contextmanager
def released_at_end(cluster: Cluster) -> Iterator[None]:
    """Around everything that happens under the lock; what fails because it was lost says so."""
    try:
        yield
    except SparkrailError as error:
        lock = _held.get(cluster.name)
        if lock is None or not lock.lost:
            raise
        raise Cancelled(
            f"this run was stopped, because its lock is lost: {lock.lost}",
            node=cluster.head.name,
            details=str(error),
            remedy="Run again; what is already done stays done.",
        ) from error
    finally:
        release_lock(cluster)


def _start(cluster: Cluster, node: Node, run: Run) -> Stream:
    owner = Owner(run=run.id, who=run.who).model_dump_json(exclude={"since"})
    folder = f"~/.sparkrail/{cluster.name}/lock"
    # Isolated: a json.py in the home folder, or PYTHON variables, must not change what it does.
    argv = ("python3", "-IS", "-c", PROGRAM, folder, owner, f"{SILENCE:g}")
    return connect(cluster, node).start(argv, shown="take the lock")


def _answer(channel: Stream, node: Node) -> Answer:
    channel.settimeout(ANSWER)
    said = b""
    try:
        while not said.endswith(b"\n"):
            data = channel.recv(4096)
            if not data:
                raise _ended(channel, node)
            said += data
        return Answer.model_validate_json(said)
    except (OSError, EOFError, ValueError) as error:
        raise NodeUnreachable(
            f"no answer about the lock: {said.decode(errors='replace')!r} {error}", node=node.name
        ) from error


def _ended(channel: Stream, node: Node) -> CommandFailed | NodeUnreachable:
    """It ended without an answer: no python3, no space, a folder that is not ours."""
    said = b""
    while data := channel.recv_stderr(4096):
        said += data
    told = channel.status_event.wait(ANSWER)
    code = channel.recv_exit_status() if told else -1
    if code < 0:
        return NodeUnreachable("connection lost during: take the lock", node=node.name)
    lines = said.decode(errors="replace").strip().splitlines()
    return CommandFailed(
        f"exit code {code}: take the lock", node=node.name, details="\n".join(lines[-3:])
    )
