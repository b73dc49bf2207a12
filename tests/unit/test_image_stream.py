"""The program that passes an image on: machines of a chain, each a process on this one."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tasks.image_chains import PROGRAM
from tasks.image_readers import PROGRAM as READER
from tasks.image_readers import START
from tasks.image_streams import Moved
from tasks.programs import program
from tests.unit.test_image_store import Store

NO_ARCHIVE = 3_000_001  # So many zeros: the end of an archive, passed on like any other byte.


def shell(command: str | None) -> list[str] | None:
    return None if command is None else ["sh", "-c", command]


def source(save: str) -> dict[str, Any]:
    return {"save": shell(save), "layers": [], "spare": [], "blobs": {}, "legacy": True}


class Machine:
    """One machine of a chain."""

    def __init__(self, orders: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdin
        self.process.stdin.write(program(PROGRAM, orders))
        self.process.stdin.close()

    def says(self) -> Any:
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())

    def report(self) -> Moved:
        found: Any = {"progress": {}}
        while "progress" in found:
            found = self.says()
        assert self.process.wait(10) == 0
        return Moved.model_validate(found)


class Chain:
    """Machines in a row, the first of them with a source."""

    def __init__(self) -> None:
        self.machines: list[Machine] = []

    def start(self, save: str, loads: Sequence[str | None], **more: Any) -> list[Machine]:
        where = None
        for load in reversed(loads):
            where = self.receiver(load, where, **more)
        self.machines.insert(0, Machine({**source(save), "next": where, "stall": 60, **more}))
        return self.machines

    def receiver(self, load: str | None, behind: Any, **more: Any) -> dict[str, Any]:
        token = secrets.token_hex(32)
        orders = {
            "listen": "127.0.0.1",
            "token": token,
            "wait": 20,
            "load": shell(load),
            "next": behind,
            "stall": 60,
        }
        machine = Machine({**orders, **more})
        self.machines.insert(0, machine)
        port = machine.says()["progress"]["port"]
        return {"address": "127.0.0.1", "port": port, "token": token}


@pytest.fixture
def chain() -> Iterator[Chain]:
    found = Chain()
    yield found
    for machine in found.machines:
        machine.process.kill()
        machine.process.wait()
        assert machine.process.stdout
        machine.process.stdout.close()


def test_every_byte_gets_to_every_machine(chain: Chain, tmp_path: Path) -> None:
    files = [tmp_path / name for name in "abc"]
    machines = chain.start(
        f"head -c {NO_ARCHIVE} /dev/zero; echo saved >&2",
        [f"cat >{file}; echo loaded {file.name}" for file in files],
    )
    head, *others = [machine.report() for machine in machines]
    assert (head.source_code, head.source_said, head.read) == (0, "saved", NO_ARCHIVE)
    for moved, file in zip(others, files, strict=True):
        assert file.stat().st_size == moved.bytes == NO_ARCHIVE
        assert (moved.load_code, moved.load_said) == (0, f"loaded {file.name}")
        assert not moved.broken
        assert not moved.next_failed


def test_what_the_engine_keeps_gets_to_every_machine(chain: Chain, tmp_path: Path) -> None:
    """All layers, of which some are small and one is large, and no docker save."""
    store, file = Store(tmp_path), tmp_path / "copy"
    place = {"root": str(tmp_path), "id": store.image_id, "name": "app:1"}
    head, first = [
        machine.report()
        for machine in chain.start(
            "exit 9", [f"cat >{file}"], layers=store.layers, spare=[], store=place
        )
    ]
    assert (head.from_store, head.left_out, first.broken) == (True, 0, "")
    assert file.read_bytes() == store.archived(*store.layers)
    moved = chain.start(
        "exit 9", ["cat >/dev/null"], layers=store.layers, spare=store.layers[:1], store=place
    )[0].report()
    assert (moved.from_store, moved.left_out) == (True, 1)


def read_by(store: Store, before: str = "", **changes: Any) -> dict[str, Any]:
    """A store that only the reader can find; it runs as its container would run it."""
    place = {"root": str(store.root), "id": store.image_id, "name": "app:1"}
    orders = {**place, "layers": store.layers, "wanted": store.layers, **changes}
    text = program(READER, orders)
    words = [sys.executable, "-I", "-S", "-c", START, str(len(text))]
    command = ["sh", "-c", f'{before}\nexec "$@"', "docker", *words]
    return {
        "layers": store.layers,
        "store": {**place, "root": "/nonesuch"},
        "reader": {"command": command, "program": text.decode()},
    }


def test_a_container_reads_what_we_may_not(chain: Chain, tmp_path: Path) -> None:
    store, file = Store(tmp_path), tmp_path / "copy"
    machines = chain.start("exit 9", [f"cat >{file}"], **read_by(store))
    head, first = [machine.report() for machine in machines]
    assert (head.from_store, head.left_out, head.unread, first.broken) == (True, 0, "", "")
    assert file.read_bytes() == store.archived(*store.layers)
    some = {**read_by(store, wanted=store.layers[1:2]), "spare": store.layers[:1]}
    moved = chain.start("exit 9", ["cat >/dev/null"], **some)[0].report()
    assert (moved.from_store, moved.left_out) == (True, 1)


@pytest.mark.parametrize(
    ("before", "changes", "why"),
    [
        pytest.param("exit 127", {}, "the image has no python3", id="no python3"),
        pytest.param(
            "echo docker: it is forbidden >&2; echo more >&2; exit 125",
            {},
            "docker: it is forbidden",
            id="docker refuses",
        ),
        pytest.param("exit 126", {}, "exit code 126", id="without a word"),
        pytest.param("echo hello; exit 0", {}, "exit code 0", id="something else answers"),
        pytest.param("", {"id": "sha256:0"}, "it is not to be read there either", id="unreadable"),
    ],
)
def test_docker_saves_what_no_container_can_read(
    chain: Chain, tmp_path: Path, before: str, changes: dict[str, Any], why: str
) -> None:
    reader = read_by(Store(tmp_path), before, **changes)
    machines = chain.start("head -c 1024 /dev/zero", ["cat >/dev/null"], **reader)
    head, _ = [machine.report() for machine in machines]
    assert (head.from_store, head.read, head.broken) == (False, 1024, "")
    assert head.unread == f"no container can read docker's folder: {why}"


def test_a_container_that_cannot_read_on_cuts_the_stream_off(chain: Chain, tmp_path: Path) -> None:
    store = Store(tmp_path)
    for file in store.root.glob("overlay2/*/diff/etc/file"):
        file.write_bytes(b"x")
    machines = chain.start("exit 9", ["cat >/dev/null"], **read_by(store))
    head, first = [machine.report() for machine in machines]
    assert head.from_store
    assert head.broken == (
        "the container that read docker's folder ended: etc/file is shorter than it was"
    )
    assert first.broken.startswith("the machine before ")


def test_a_container_that_stands_is_given_up(chain: Chain, tmp_path: Path) -> None:
    store = Store(tmp_path)
    for file in store.root.glob("overlay2/*/diff/etc/file"):
        file.unlink()
        os.mkfifo(file)  # Nobody writes to it.
    machines = chain.start("exit 9", ["cat >/dev/null"], **read_by(store), stall=0.5)
    head, first = [machine.report() for machine in machines]
    assert head.from_store
    assert head.broken.startswith("the container that read docker's folder ")
    assert first.broken.startswith("the machine before ")


def test_a_reader_ends_with_whoever_holds_it(chain: Chain, tmp_path: Path) -> None:
    """Also while nobody takes what it writes."""
    store, begun = Store(tmp_path), tmp_path / "begun"
    loads = [f"head -c 99 >/dev/null; touch {begun}; exec sleep 60"]
    reader = read_by(store, f"echo $$ >{tmp_path / 'pid'}; trap '' TERM")
    head, _ = chain.start("exit 9", loads, **reader)
    wait_until(begun.exists)
    pid = int((tmp_path / "pid").read_text())
    head.process.kill()
    wait_until(lambda: not Path(f"/proc/{pid}/cmdline").exists())


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_docker_saves_what_cannot_be_read(chain: Chain, tmp_path: Path) -> None:
    place = {"root": str(tmp_path), "id": "sha256:0", "name": "app:1"}
    head, _ = [
        machine.report()
        for machine in chain.start("head -c 1024 /dev/zero", ["cat >/dev/null"], store=place)
    ]
    assert (head.from_store, head.read) == (False, 1024)


def test_a_failing_load_keeps_nobody_from_the_stream(chain: Chain, tmp_path: Path) -> None:
    machines = chain.start(
        f"head -c {NO_ARCHIVE} /dev/zero",
        ["head -c 99999 >/dev/null; echo full >&2; exit 4", f"cat >{tmp_path / 'copy'}"],
    )
    head, first, second = [machine.report() for machine in machines]
    assert (first.load_code, first.load_said, first.refused) == (4, "full", True)
    assert (first.next_failed, head.next_failed) == ("", "")
    assert second.load_code == 0
    assert (tmp_path / "copy").stat().st_size == NO_ARCHIVE


@pytest.mark.parametrize(
    ("save", "code", "broken"),
    [
        pytest.param("head -c 99999 /dev/zero; exit 3", 3, "docker save failed", id="it failed"),
        pytest.param("exec nonesuch", 127, "docker save failed", id="there is none"),
        pytest.param(
            "printf 'half a header'", 0, "docker save ended in the midst of a file", id="cut off"
        ),
    ],
)
def test_what_was_cut_off_is_not_loaded(
    chain: Chain, tmp_path: Path, save: str, code: int, broken: str
) -> None:
    load = f"cat >/dev/null; touch {tmp_path / 'loaded'}"
    head, *others = [machine.report() for machine in chain.start(save, [load, load])]
    assert (head.source_code, head.broken, head.next_failed) == (code, broken, "")
    for moved in others:
        assert moved.broken.startswith("the machine before ")
        assert moved.load_code == -signal.SIGKILL
        assert not moved.next_failed
    assert not (tmp_path / "loaded").exists()


def test_a_machine_that_dies_cuts_off_those_behind_it_only(chain: Chain, tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    machines = chain.start(
        f"head -c {NO_ARCHIVE} /dev/zero; until [ -e {go_on} ]; do sleep 0.05; done; "
        f"head -c {NO_ARCHIVE} /dev/zero",
        [f"cat >{tmp_path / name}" for name in "abc"],
    )
    deadline = time.monotonic() + 20
    while not ((tmp_path / "c").exists() and (tmp_path / "c").stat().st_size == NO_ARCHIVE):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    machines[2].process.kill()
    assert machines[3].report().broken.startswith("the machine before ")
    go_on.touch()
    head, first = [machine.report() for machine in machines[:2]]
    assert not head.next_failed
    assert first.next_failed
    assert (first.load_code, first.bytes) == (0, 2 * NO_ARCHIVE)
    assert (tmp_path / "a").stat().st_size == 2 * NO_ARCHIVE


def test_a_dead_source_is_noticed_while_a_load_takes_nothing(chain: Chain, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    head, first, second = chain.start(
        f"head -c {40 * NO_ARCHIVE} /dev/zero",
        [f"head -c 99999 >/dev/null; touch {begun}; exec sleep 60", "cat >/dev/null"],
    )
    deadline = time.monotonic() + 20
    while not begun.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    head.process.kill()
    for machine in (first, second):
        moved = machine.report()
        assert moved.broken.startswith("the machine before ")
        assert (moved.load_code, moved.load_stalled) == (-signal.SIGKILL, False)


def test_a_load_that_takes_nothing_is_given_up(chain: Chain, tmp_path: Path) -> None:
    machines = chain.start(
        f"head -c {40 * NO_ARCHIVE} /dev/zero",
        ["exec sleep 60", f"cat >{tmp_path / 'copy'}"],
        stall=0.5,
    )
    _, first, second = [machine.report() for machine in machines]
    assert (first.load_stalled, first.load_code) == (True, -signal.SIGKILL)
    assert not first.broken
    assert (second.load_code, second.load_stalled) == (0, False)
    assert (tmp_path / "copy").stat().st_size == 40 * NO_ARCHIVE


def test_a_source_that_stops_is_given_up(chain: Chain) -> None:
    machines = chain.start("printf x; exec sleep 60", ["cat >/dev/null"], stall=0.5)
    head, first = [machine.report() for machine in machines]
    assert (head.source_stalled, head.source_code) == (True, -signal.SIGKILL)
    assert first.broken


def test_a_silent_start_is_no_stall(chain: Chain) -> None:
    """Older engines gather the whole image before the first byte."""
    machines = chain.start("sleep 1.2; head -c 1024 /dev/zero", ["cat >/dev/null"], stall=0.5)
    head, first = [machine.report() for machine in machines]
    assert not head.source_stalled
    assert (first.broken, first.load_code) == ("", 0)


@pytest.mark.parametrize(
    "said",
    [pytest.param(b"0" * 64, id="a wrong token"), pytest.param(b"", id="not a word")],
)
def test_strangers_are_not_listened_to(chain: Chain, tmp_path: Path, said: bytes) -> None:
    where = chain.receiver(f"cat >{tmp_path / 'copy'}", None)
    with socket.create_connection((where["address"], where["port"]), 10) as stranger:
        stranger.sendall(said)
        if not said:
            stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(1) == b""
    head = {**source("head -c 1024 /dev/zero"), "next": where, "stall": 60}
    chain.machines.append(Machine(head))
    assert [machine.report().broken for machine in chain.machines] == ["", ""]
    assert (tmp_path / "copy").stat().st_size == 1024


def test_nobody_calls(chain: Chain) -> None:
    chain.receiver("cat", None, wait=0.2)
    assert chain.machines[0].report().broken == "nobody with the token called"


def test_the_token_shows_in_no_command_line(chain: Chain) -> None:
    where = chain.receiver("cat", None, wait=1)
    shown = Path(f"/proc/{chain.machines[0].process.pid}/cmdline").read_bytes()
    assert where["token"].encode() not in shown
    assert PROGRAM.encode() in shown


def test_memory_stays_small(chain: Chain, tmp_path: Path) -> None:
    loaded, go_on = tmp_path / "loaded", tmp_path / "go-on"
    load = f"cat >/dev/null; touch {loaded}; until [ -e {go_on} ]; do sleep 0.05; done"
    machines = chain.start("head -c 300000000 /dev/zero", [load, "cat >/dev/null"])
    deadline = time.monotonic() + 60
    while not loaded.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    # Not by its resource usage, which begins with that of the process that forked it.
    status = Path(f"/proc/{machines[1].process.pid}/status").read_text()
    peak_kib = int(status.partition("VmHWM:")[2].split()[0])
    go_on.touch()
    assert machines[1].report().bytes == 300_000_000
    assert peak_kib < 100_000
