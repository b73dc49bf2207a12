"""The relayed lock program, run for real: the kernel frees a lock with the process that has it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.locks import PROGRAM, Answer
from tests.ssh.sshd import poll

OWNER = {"run": "run-1", "who": "ada@control"}
LONG = 60.0


class Holder:
    """A process that wants the lock."""

    def __init__(self, folder: Path, run: str, silence: float) -> None:
        owner = json.dumps(OWNER | {"run": run})
        argv = (sys.executable, "-IS", "-c", PROGRAM, str(folder), owner, f"{silence:g}")
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.answer: dict[str, Any] = json.loads(self.out.readline())

    @property
    def out(self) -> Any:
        assert self.process.stdout
        return self.process.stdout

    @property
    def into(self) -> Any:
        assert self.process.stdin
        return self.process.stdin

    def beat(self, beats: bytes = b".") -> bytes:
        self.into.write(beats)
        self.into.flush()
        return os.read(self.out.fileno(), 100)

    def end(self) -> int:
        self.into.close()
        return self.process.wait(10)


Take = Callable[..., Holder]


@pytest.fixture
def take(tmp_path: Path) -> Iterator[Take]:
    holders: list[Holder] = []

    def begin(run: str = "run-1", silence: float = LONG) -> Holder:
        holders.append(Holder(tmp_path / "state" / "lock", run, silence))
        return holders[-1]

    yield begin
    for holder in holders:
        holder.process.kill()
        holder.process.wait()
        holder.into.close()
        holder.out.close()


def test_the_first_one_holds_it(take: Take, tmp_path: Path) -> None:
    holder = take()
    assert holder.answer == {"held": True, "left": None}
    owner = json.loads((tmp_path / "state" / "lock" / "owner.json").read_text())
    assert owner == OWNER | {"since": owner["since"], "pid": holder.process.pid}


def test_the_second_one_is_refused_and_told_who_has_it(take: Take) -> None:
    first, second = take("run-1"), take("run-2")
    told = Answer.model_validate(second.answer)
    assert not told.held
    assert told.owner is not None
    assert (told.owner.run, told.owner.who) == ("run-1", "ada@control")
    assert second.process.wait(10) == 0
    assert first.process.poll() is None


def test_it_is_free_when_its_input_ends(take: Take) -> None:
    assert take("run-1").end() == 0
    assert take("run-2").answer == {"held": True, "left": None}


def test_nothing_of_it_is_left(take: Take, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "releases.json").touch()
    assert take().end() == 0
    assert list((tmp_path / "state").iterdir()) == [tmp_path / "state" / "releases.json"]
    (tmp_path / "state" / "releases.json").unlink()
    assert take().end() == 0
    assert not (tmp_path / "state").exists()


def test_a_run_that_was_killed_is_named_to_the_next(take: Take) -> None:
    first = take("run-1")
    first.process.send_signal(signal.SIGKILL)
    first.process.wait()
    second = take("run-2")
    assert second.answer["held"] is True
    assert second.answer["left"] == OWNER | {
        "since": second.answer["left"]["since"],
        "pid": first.process.pid,
    }


def test_it_is_free_after_silence(take: Take) -> None:
    first = take("run-1", silence=0.2)
    assert first.process.wait(10) == 0
    assert take("run-2").answer == {"held": True, "left": None}


def test_each_beat_is_answered_and_keeps_it(take: Take, tmp_path: Path) -> None:
    holder = take(silence=0.5)
    owner = tmp_path / "state" / "lock" / "owner.json"
    os.utime(owner, (0, 0))
    for _ in range(3):
        assert holder.beat() == b"."
    poll(lambda: owner.stat().st_mtime > 0, "the beat shows on the owner's file")
    assert holder.process.wait(10) == 0


def test_beats_that_come_late_are_all_answered(take: Take) -> None:
    assert take().beat(b"...") == b"..."


def test_it_ends_when_nobody_reads_its_answers(take: Take) -> None:
    holder = take()
    holder.out.close()
    holder.into.write(b".")
    holder.into.flush()
    assert holder.process.wait(10) == 0


def test_the_folder_may_be_taken_away_while_it_is_held(take: Take, tmp_path: Path) -> None:
    first = take("run-1")
    folder = tmp_path / "state" / "lock"
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    assert first.beat() == b"."
    second = take("run-2")
    assert second.answer == {"held": True, "left": None}
    assert first.end() == 0
    assert take("run-3").answer["held"] is False
    assert second.end() == 0


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"run": "run-0"}'], ids=["empty", "cut", "list", "bare", "half"]
)
def test_a_damaged_owner_file_is_nobody(text: str, take: Take, tmp_path: Path) -> None:
    folder = tmp_path / "state" / "lock"
    folder.mkdir(parents=True)
    (folder / "owner.json").write_text(text)
    assert take().answer == {"held": True, "left": None}
