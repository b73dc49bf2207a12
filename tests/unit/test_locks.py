"""Our end of the lock: beats, answers, and what happens when they stop."""

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tasks import locks, remote
from tasks.errors import Cancelled, SparkrailError
from tasks.locks import Lock, Owner, released_at_end
from tests.ssh.sshd import poll
from tests.unit.specs import spec

CLUSTER = spec()


class Channel:
    """The head's end of a lock: it answers, keeps silent, ends, or takes nothing any more."""

    def __init__(self) -> None:
        self._said: queue.Queue[bytes | OSError] = queue.Queue()
        self.timeout = 60.0
        self.answers = True
        self.blocked = threading.Event()
        self.free = threading.Event()
        self.beats = 0
        self.closed = self.ended = False

    def settimeout(self, seconds: float) -> None:
        self.timeout = seconds

    def recv(self, _most: int) -> bytes:
        try:
            said = self._said.get(timeout=self.timeout)
        except queue.Empty:
            raise TimeoutError from None
        if isinstance(said, OSError):
            raise said
        return said

    def sendall(self, beat: bytes) -> None:
        if not self.answers and self.free.is_set():
            self.blocked.set()
            threading.Event().wait(5)
        self.beats += len(beat)
        if self.answers:
            self._said.put(beat)

    def shutdown_write(self) -> None:
        self.ended = True
        if self.answers:
            self._said.put(b"")

    def close(self) -> None:
        self.closed = True

    def say(self, what: bytes | OSError) -> None:
        self._said.put(what)


@pytest.fixture(autouse=True)
def not_cancelled() -> Iterator[None]:
    remote.STOP.clear()
    yield
    locks._held.clear()
    remote.STOP.clear()


def hold(channel: Channel, *, silence: float = 0.5) -> Lock:
    stream: Any = channel
    return Lock(stream, beat=0.02, silence=silence)


def test_a_lock_that_is_answered_stays_until_it_is_released() -> None:
    channel = Channel()
    lock = hold(channel)
    poll(lambda: channel.beats > 3, "beats")
    lock.release()
    assert (channel.ended, channel.closed, lock.lost) == (True, True, "")
    assert not remote.STOP.is_set()


def test_without_answers_it_is_lost_before_the_head_frees_it() -> None:
    channel = Channel()
    channel.answers = False
    started = time.monotonic()
    lock = hold(channel)
    assert remote.STOP.wait(5)
    assert time.monotonic() - started > 0.3
    assert lock.lost == "the head has not answered for 0.4 s"


def test_also_where_a_beat_blocks_in_the_middle_of_being_sent() -> None:
    channel = Channel()
    channel.answers = False
    channel.free.set()
    lock = hold(channel)
    assert remote.STOP.wait(2)
    assert channel.blocked.is_set()
    assert lock.lost == "the head has not answered for 0.4 s"


def test_an_answer_counts_from_when_its_beat_was_sent() -> None:
    """Not from when it came back: the head does not count from there either."""
    channel = Channel()
    channel.answers = False
    lock = hold(channel, silence=60)
    before = channel.timeout
    poll(lambda: channel.beats > 11, "ten beats, 0.02 s apart, after the first")
    channel.say(b".")
    poll(lambda: channel.timeout != before, "the answer is taken")
    assert channel.timeout < 60 * 0.8 - 10 * 0.02
    channel.say(b"")
    poll(lambda: lock.lost, "it is over")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        pytest.param(b"", "the process that holds it on the head has ended", id="ended"),
        pytest.param(
            OSError("Socket is closed"), "the connection to the head is lost", id="connection lost"
        ),
    ],
)
def test_it_is_lost_at_once_when_its_process_ends(said: bytes | OSError, why: str) -> None:
    channel = Channel()
    lock = hold(channel, silence=60)
    channel.say(said)
    assert remote.STOP.wait(5)
    assert lock.lost == why
    poll(lambda: channel.closed, "the channel is closed")


def test_releasing_over_a_dead_link_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "RELEASE", 0.1)
    channel = Channel()
    channel.answers = False
    lock = hold(channel, silence=60)
    started = time.monotonic()
    lock.release()
    assert time.monotonic() - started < 2
    assert not remote.STOP.is_set()
    channel.say(b"")


def test_what_fails_because_the_lock_is_lost_says_so() -> None:
    channel = Channel()
    lock = locks._held["sparks"] = hold(channel, silence=60)
    with pytest.raises(Cancelled) as caught, released_at_end(CLUSTER):
        channel.say(b"")
        poll(lambda: lock.lost, "it is lost")
        raise SparkrailError("cancelled during: rsync", node="worker1")
    assert str(caught.value) == (
        "head: this run was stopped, because its lock is lost: "
        "the process that holds it on the head has ended\n"
        "worker1: cancelled during: rsync\n"
        "Run again; what is already done stays done."
    )
    assert locks._held == {}


def test_other_failures_are_passed_on_and_the_lock_is_released() -> None:
    channel = Channel()
    locks._held["sparks"] = hold(channel)
    with pytest.raises(SparkrailError, match=r"^worker1: no disk$"), released_at_end(CLUSTER):
        raise SparkrailError("no disk", node="worker1")
    assert (channel.closed, locks._held) == (True, {})


def test_without_a_lock_there_is_nothing_to_release() -> None:
    with released_at_end(CLUSTER):
        pass


def test_an_owner_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Etc/UTC")
    time.tzset()
    try:
        owner = Owner(run="run-1", who="ada@control", since=0)
        assert str(owner) == "run run-1 of ada@control, since 1970-01-01 00:00:00"
    finally:
        monkeypatch.undo()
        time.tzset()
