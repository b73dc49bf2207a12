"""The relayed programs that end processes, remember what is ours, and release page cache."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.page_caches import Released
from tasks.relayed import end_processes, outliving

PROGRAMS = Path(end_processes.__file__).parent


def relayed(name: str, *arguments: str) -> Any:
    said = subprocess.run(
        [sys.executable, "-IS", "-", name, *arguments],
        input=(PROGRAMS / f"{name}.py").read_bytes(),
        capture_output=True,
        check=True,
    )
    return json.loads(said.stdout)


# --- ending processes ----------------------------------------------------------------------------


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["/bin/sleep", "62"]) as process:
        yield process
        process.kill()


def started(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def ended(*processes: tuple[int, int, str], grace: float = 5) -> list[str]:
    wanted = [{"pid": p, "started": s, "command": c} for p, s, c in processes]
    argument = json.dumps({"processes": wanted, "grace": grace})
    return [str(each["said"]) for each in relayed("end_processes", argument)]


def test_one_that_takes_term(sleeper: "subprocess.Popen[bytes]") -> None:
    pid = sleeper.pid
    assert ended((pid, started(pid), "/bin/sleep 62")) == ["ended on TERM"]
    assert sleeper.wait() == -15


def test_one_that_ignores_term() -> None:
    script = "trap '' TERM; echo; read x <&0"
    argv = ["/bin/sh", "-c", script]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stubborn:
        assert stubborn.stdout and stubborn.stdout.readline()
        pid = stubborn.pid
        said = ended((pid, started(pid), " ".join(argv)), grace=0.2)
        assert (said, stubborn.wait()) == (["killed, as it did not end within 0.2 s"], -9)


@pytest.mark.parametrize(
    ("later", "command"),
    [
        pytest.param(1, "/bin/sleep 62", id="started at another time"),
        pytest.param(0, "/bin/sleep 63", id="another command"),
    ],
)
def test_a_reused_pid_is_never_touched(
    sleeper: "subprocess.Popen[bytes]", later: int, command: str
) -> None:
    pid = sleeper.pid
    assert ended((pid, started(pid) + later, command)) == [
        "another process has its pid now, not touched"
    ]
    assert sleeper.poll() is None


def test_one_that_is_gone_or_a_zombie() -> None:
    with subprocess.Popen(["/bin/true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert ended((process.pid, started(process.pid), "")) == ["gone already"]
        process.wait()
        assert ended((process.pid, 1, "/bin/true")) == ["gone already"]


def test_without_pidfds_too(
    sleeper: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.8 has none."""
    monkeypatch.delattr(os, "pidfd_open")
    pid = sleeper.pid
    wanted = {"pid": pid, "started": started(pid), "command": "/bin/sleep 62"}
    assert end_processes.end([wanted], 5) == [{"pid": pid, "said": "ended on TERM"}]


# --- what is ours --------------------------------------------------------------------------------


ID = "f" * 64


def tree(root: Path, monkeypatch: pytest.MonkeyPatch, boot: str = "one") -> None:
    """A made-up /proc with one process in a container of ours and one of nobody's."""
    monkeypatch.setattr(outliving, "PROC", str(root / "proc"))
    monkeypatch.setattr(outliving, "SHM", f"{root}/shm/")
    for pid, cgroup in ((7, f"0::/docker/{ID}"), (8, "0::/")):
        folder = root / "proc" / str(pid)
        (folder / "fd").mkdir(parents=True, exist_ok=True)
        (folder / "cgroup").write_text(cgroup)
        (folder / "stat").write_text(f"{pid} (a) b) S " + " ".join(["1"] * 18) + f" {pid}00 ")
        (folder / "maps").write_text("")
        if not (folder / "root").exists():
            (folder / "root").symlink_to("/")
    (root / "proc/sys/kernel/random").mkdir(parents=True, exist_ok=True)
    (root / "proc/sys/kernel/random/boot_id").write_text(boot)
    (root / "shm").mkdir(exist_ok=True)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    outliving.main("outliving", *arguments)
    return json.loads(capsys.readouterr().out)


def test_what_was_in_our_containers_is_known_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tree(tmp_path, monkeypatch)
    record = str(tmp_path / "state" / "holders.json")
    names = ("mapped", "open", "shared", "theirs")
    mapped, opened, shared, theirs = (str(tmp_path / "shm" / name) for name in names)
    for path in (mapped, opened, shared, theirs):
        Path(path).write_text("x")
    proc = tmp_path / "proc"
    (proc / "7/maps").write_text(f"7f00-7f01 rw-s 00000000 00:17 9    {mapped}\n")
    (proc / "7/fd/3").symlink_to(opened)
    (proc / "7/fd/4").symlink_to(shared)
    (proc / "8/fd/3").symlink_to(shared)
    (proc / "8/fd/4").symlink_to(theirs)
    assert said(capsys, "look", record) == {"processes": [], "shm": []}
    found = {"processes": [[7, 700]], "shm": [mapped, opened]}
    assert said(capsys, "keep", record, ID) == found
    assert said(capsys, "keep", record) == found, "an earlier run did not come to clear it away"
    assert said(capsys, "look", record) == found

    (proc / "7/stat").write_text("7 (other) S " + " ".join(["1"] * 18) + " 701 ")
    assert said(capsys, "look", record)["processes"] == [], "another process has its pid"
    Path(mapped).unlink()
    said(capsys, "remove", record)
    assert sorted(path.name for path in (tmp_path / "shm").iterdir()) == [
        "open",
        "shared",
        "theirs",
    ]
    (proc / "7/fd/3").unlink()
    said(capsys, "remove", record)
    assert sorted(path.name for path in (tmp_path / "shm").iterdir()) == ["shared", "theirs"]


def test_a_record_of_another_boot_or_no_record_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "holders.json"
    tree(tmp_path, monkeypatch)
    said(capsys, "keep", str(record), ID)
    tree(tmp_path, monkeypatch, boot="two")
    assert said(capsys, "look", str(record)) == {"processes": [], "shm": []}
    record.write_text('{"boot": ')
    assert said(capsys, "look", str(record)) == {"processes": [], "shm": []}


# --- page cache ----------------------------------------------------------------------------------


MIB = 1 << 20


def test_page_cache_of_a_folder_is_released(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "model", tmp_path / "blobs"
    folder.mkdir()
    elsewhere.mkdir()
    (folder / "a").write_bytes(bytes(3 * MIB))
    (elsewhere / "b").write_bytes(bytes(2 * MIB))
    (folder / "b").symlink_to(elsewhere / "b")
    (folder / "same").symlink_to("a")
    (folder / "broken").symlink_to("gone")
    (folder / "empty").touch()
    looked = Released.model_validate(relayed("page_cache", "look", str(folder)))
    assert (looked.files, looked.before, looked.after) == (3, 5 * MIB, 5 * MIB)
    released = Released.model_validate(relayed("page_cache", "release", str(folder)))
    assert (released.before, released.after) == (5 * MIB, 0)
    assert (folder / "a").read_bytes() == bytes(3 * MIB)


def test_a_folder_that_is_not_there_has_no_page_cache(tmp_path: Path) -> None:
    released = Released.model_validate(relayed("page_cache", "release", str(tmp_path / "absent")))
    assert (released.files, str(released)) == (0, "")


def test_the_effect_in_words() -> None:
    released = Released(
        files=4, unknown=0, before=900 * MIB, after=0, free_before=10 * MIB, free_after=905 * MIB
    )
    assert str(released) == (
        "page cache of the model: 900 of 900 MiB released, free memory 10 -> 905 MiB"
    )
    kept = released.model_copy(update={"after": 100 * MIB})
    assert str(kept) == (
        "page cache of the model: 800 of 900 MiB released, 100 MiB stay (in use), "
        "free memory 10 -> 905 MiB"
    )
