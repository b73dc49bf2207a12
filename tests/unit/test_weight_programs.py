"""Weights from node to node: the relayed programs as real processes, over real connections."""

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.manifests import Manifest, differing
from tasks.relayed.pieces import PIECE, identity, settle
from tasks.relayed.wire import ANSWER, DATA, GREETING, NONCE, REFUSED
from tests.unit.streams import Site

CONTENT = {
    "config.json": b"{}",
    "empty": b"",
    "sub/odd name's.txt": b"x",
    "a.bin": os.urandom(3 * PIECE + 17),
    "b.bin": os.urandom(2 * PIECE),
}
SIZE = sum(map(len, CONTENT.values()))


class Sites:
    """A head with a model, and as many workers as are asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.all: list[Site] = []
        self.head = self.make()

    def make(self) -> Site:
        site = Site(self.root, len(self.all))
        self.all.append(site)
        return site

    def workers(self, count: int) -> list[Site]:
        return [self.make() for _ in range(count)]

    def fill(self) -> Manifest:
        for name, content in CONTENT.items():
            self.head.write(name, content)
        return self.head.manifest()

    def close(self) -> None:
        for site in self.all:
            site.close()


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[Sites]:
    found = Sites(tmp_path)
    yield found
    found.close()


@pytest.fixture
def want(sites: Sites) -> Manifest:
    found = sites.fill()
    sites.head.send(found)
    return found


def test_a_worker_gets_the_model(sites: Sites, want: Manifest) -> None:
    [worker] = sites.workers(1)
    worker.receive(want, [sites.head])
    worker.listening()
    assert worker.done() == {"bytes": SIZE, "fetched": SIZE, "damaged": 0, "without": []}
    assert worker.files() == CONTENT
    assert worker.parts() == []
    for name, file in want.files.items():
        assert (worker.folder / name).stat().st_mtime_ns == file.mtime
    # It is remembered as read: "glance" reads no file to tell a digest.
    assert worker.manifest("glance").files == want.files


def test_only_what_is_lacking_is_fetched(sites: Sites, want: Manifest) -> None:
    [worker] = sites.workers(1)
    for name in ("a.bin", "config.json"):
        worker.write(name, CONTENT[name])
    worker.write("b.bin", b"older")
    worker.receive(want, [sites.head])
    assert worker.done()["fetched"] == len(CONTENT["b.bin"]) + len(CONTENT["sub/odd name's.txt"])
    assert worker.files() == CONTENT


def test_each_worker_serves_what_it_has(sites: Sites, want: Manifest) -> None:
    """The head gives every byte once, whoever is behind the first worker."""
    chain = sites.workers(4)
    with Relay(sites.head) as relay:
        before: list[Site] = [relay.site]
        for worker in chain:
            worker.receive(want, reversed(before))
            worker.listening()
            before.append(worker)
        for worker in chain:
            assert worker.done()["without"] == []
            assert worker.files() == CONTENT
        assert SIZE <= relay.passed < 1.01 * SIZE


def test_a_link_layout_is_followed(sites: Sites) -> None:
    blobs = sites.head.home / "blobs"
    blobs.mkdir()
    (blobs / "1").write_bytes(CONTENT["a.bin"])
    (sites.head.folder / "a.bin").symlink_to("../blobs/1")
    want = sites.head.manifest()
    sites.head.send(want)
    [worker] = sites.workers(1)
    (worker.folder / "a.bin").symlink_to("gone")
    worker.receive(want, [sites.head])
    worker.done()
    assert not (worker.folder / "a.bin").is_symlink()
    assert worker.files() == {"a.bin": CONTENT["a.bin"]}


def test_an_interrupted_transfer_goes_on_where_it_stopped(sites: Sites, want: Manifest) -> None:
    [worker] = sites.workers(1)
    with Relay(sites.head, stop_after=2 * PIECE) as relay:
        worker.receive(want, [relay.site], connections=1)
        worker.listening()
        worker.wait_for(PIECE)
        worker.program.kill()
    assert worker.files() == {}
    assert worker.parts() != []
    worker.receive(want, [sites.head])
    done = worker.done()
    assert 0 < done["fetched"] <= SIZE - PIECE
    assert done["bytes"] == SIZE
    assert worker.files() == CONTENT


def test_a_part_that_was_damaged_meanwhile_is_fetched_again(sites: Sites, want: Manifest) -> None:
    [worker] = sites.workers(1)
    with Relay(sites.head, stop_after=2 * PIECE) as relay:
        worker.receive(want, [relay.site], connections=1)
        worker.listening()
        worker.wait_for(PIECE)
        worker.program.kill()
    for name in worker.parts():
        part = worker.folder / ".sparkrail-part" / name
        if not name.endswith(".marks"):
            part.write_bytes(bytes(part.stat().st_size))
    worker.receive(want, [sites.head])
    assert worker.done()["fetched"] == SIZE
    assert worker.files() == CONTENT


def test_parts_of_an_older_version_are_not_mixed_in(sites: Sites, want: Manifest) -> None:
    [worker] = sites.workers(1)
    with Relay(sites.head, stop_after=2 * PIECE) as relay:
        worker.receive(want, [relay.site], connections=1)
        worker.listening()
        worker.wait_for(PIECE)
        worker.program.kill()
    newer = sites.head.write("a.bin", os.urandom(len(CONTENT["a.bin"]))).read_bytes()
    want = sites.head.manifest()
    sites.head.send(want)
    worker.receive(want, [sites.head])
    assert worker.done()["fetched"] == SIZE
    assert worker.files() == {**CONTENT, "a.bin": newer}


def test_a_chain_goes_on_without_its_dead_middle(sites: Sites, want: Manifest) -> None:
    first, middle, last = sites.workers(3)
    first.receive(want, [sites.head])
    first.listening()
    with Relay(first, stop_after=2 * PIECE) as relay:
        middle.receive(want, [relay.site, sites.head], connections=1)
        middle.listening()
        last.receive(want, [middle, first, sites.head], connections=1)
        last.listening()
        last.wait_for(PIECE)
        middle.program.kill()
    assert first.done()["without"] == []
    [reason] = last.done()["without"]
    assert reason.startswith("worker2: ")
    assert last.files() == CONTENT
    assert middle.files() == {}


def test_a_frozen_source_is_gone_after_some_seconds(sites: Sites, want: Manifest) -> None:
    [last] = sites.workers(1)
    with Relay(sites.head, stop_after=2 * PIECE) as relay:
        last.receive(want, [relay.site, sites.head], connections=1)
        assert last.done()["without"] == ["relay: nothing came for 10 s"]
    assert last.files() == CONTENT


def test_a_killed_sender(sites: Sites, want: Manifest) -> None:
    [worker] = sites.workers(1)
    with Relay(sites.head, stop_after=2 * PIECE) as relay:
        worker.receive(want, [relay.site], connections=1)
        worker.listening()
        worker.wait_for(PIECE)
    assert worker.failed() == {"kind": "sources", "text": "relay: Connection refused"}
    assert worker.files() == {}


def test_a_source_that_changes(sites: Sites, want: Manifest) -> None:
    [worker] = sites.workers(1)
    sites.head.write("b.bin", os.urandom(2 * PIECE))
    worker.receive(want, [sites.head])
    assert worker.failed() == {"kind": "changed", "text": "b.bin"}
    assert worker.files() == {}


def test_a_wrong_token(sites: Sites, want: Manifest) -> None:
    [worker] = sites.workers(1)
    worker.receive(want, [sites.head], token="00" * 32)
    assert worker.failed() == {"kind": "refused", "text": "it does not know our token"}
    assert worker.files() == {}


def test_who_does_not_know_the_token_learns_nothing(sites: Sites, want: Manifest) -> None:
    assert want.files
    with socket.create_connection((sites.head.address, sites.head.port), 5) as link:
        link.sendall(bytes(NONCE + len(REFUSED)))
        said = b""
        while data := link.recv(4096):
            said += data
    assert said[: len(GREETING)] == GREETING
    assert said[len(GREETING) + NONCE :] == REFUSED


def test_the_stream_is_on_the_given_address_only_and_ends_with_its_run(
    sites: Sites, want: Manifest
) -> None:
    assert want.files
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.99", sites.head.port), 5)
    assert sites.head.program.hang_up() == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((sites.head.address, sites.head.port), 5)


def test_a_byte_that_is_damaged_on_the_wire_is_fetched_again(sites: Sites, want: Manifest) -> None:
    [worker] = sites.workers(1)
    with Relay(sites.head, damage=1) as relay:
        worker.receive(want, [relay.site])
        assert worker.done()["damaged"] == 1
    assert worker.files() == CONTENT


def test_a_wire_that_always_damages(sites: Sites, want: Manifest) -> None:
    [worker] = sites.workers(1)
    with Relay(sites.head, damage=1000) as relay:
        worker.receive(want, [relay.site], connections=1)
        assert worker.failed()["kind"] == "damaged"
    assert worker.files() == {}


def test_a_source_in_the_chain_that_damages_is_left(sites: Sites, want: Manifest) -> None:
    first, last = sites.workers(2)
    first.receive(want, [sites.head])
    first.listening()
    with Relay(first, damage=1000) as relay:
        last.receive(want, [relay.site, sites.head], connections=1)
        assert last.done()["without"] == ["relay: what it sends is damaged"]
    assert last.files() == CONTENT


def test_a_file_larger_than_allowed_stands_for_a_full_disk(sites: Sites, want: Manifest) -> None:
    """The kernel refuses the write; a full disk is tried on the lab."""
    [worker] = sites.workers(1)
    limit = ("prlimit", f"--fsize={PIECE}", "--")
    worker.receive(want, [sites.head], prefix=limit)
    assert worker.failed()["kind"] == "write"
    assert worker.files() == {}


def test_a_folder_that_may_not_be_written(sites: Sites, want: Manifest) -> None:
    [worker] = sites.workers(1)
    worker.write(".sparkrail-part", b"in the way")
    worker.receive(want, [sites.head])
    assert worker.failed()["kind"] == "write"


def test_one_transfer_at_a_time_writes_there(sites: Sites, want: Manifest) -> None:
    """A program of a run that was cut off may live a little longer."""
    [worker] = sites.workers(1)
    with Relay(sites.head, stop_after=2 * PIECE) as relay:
        worker.receive(want, [relay.site], connections=1)
        worker.listening()
        worker.wait_for(PIECE)
        older = worker.program
        worker.receive(want, [sites.head])
        assert worker.parts() != []
        older.kill()
        assert worker.done()["fetched"] <= SIZE - PIECE
    assert worker.files() == CONTENT


def test_nothing_of_it_takes_much_memory(sites: Sites) -> None:
    with (sites.head.folder / "big.bin").open("wb") as file:
        file.truncate(256 << 20)
    want = sites.head.manifest()
    sites.head.send(want)
    [worker] = sites.workers(1)
    worker.receive(want, [sites.head])
    worker.done()
    assert differing(want, worker.manifest()) == ()
    for site in sites.all:
        status = Path(f"/proc/{site.program.process.pid}/status").read_text()
        peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        assert int(peak.split()[1]) < 100_000, f"{site.name}: {peak}"


def test_a_write_shows_once_a_file_has_settled(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for _ in range(20):
        file.write_bytes(b"before")
        before = file.stat()
        settle(before)
        file.write_bytes(b"after!")
        # As it is for one whose times are kept: only the ctime tells.
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert identity(file.stat()) != identity(before)


class Relay:
    """A wire between two nodes that damages some answers, or freezes after so many bytes."""

    def __init__(self, upstream: Site, *, damage: int = 0, stop_after: int = 1 << 60) -> None:
        self.upstream = upstream
        self.damage = damage
        self.stop_after = stop_after
        self.passed = 0
        self.frozen = threading.Event()
        self.links: list[socket.socket] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.site = RelaySite(self.listener.getsockname()[1])

    def __enter__(self) -> "Relay":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.frozen.set()
        for each in (self.listener, *self.links):
            # Whoever reads from it in a thread of ours wakes up.
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                ours, _ = self.listener.accept()
                theirs = socket.create_connection((self.upstream.address, self.upstream.port))
            except OSError:
                return
            self.links += [ours, theirs]
            threading.Thread(target=self._forward, args=(ours, theirs), daemon=True).start()
            threading.Thread(target=self._answer, args=(theirs, ours), daemon=True).start()

    @staticmethod
    def _forward(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)

    def _answer(self, source: socket.socket, target: socket.socket) -> None:
        try:
            for size in (len(GREETING) + NONCE, len(REFUSED)):
                target.sendall(_exactly(source, size))
            while True:
                header = _exactly(source, ANSWER.size)
                kind, size = ANSWER.unpack(header)
                data = bytearray(_exactly(source, size))
                # Digests are short; what is longer is a piece.
                if kind == DATA and size > PIECE // 2:
                    if self.damage > 0:
                        self.damage -= 1
                        data[size // 2] ^= 1
                    self.stop_after -= size
                    if self.stop_after < 0:
                        self.frozen.wait()
                        return
                self.passed += size
                target.sendall(header + data)
        except (OSError, struct.error):
            pass


class RelaySite(Site):
    """What a receiver is told of a relay."""

    def __init__(self, port: int) -> None:
        self.name, self.address, self.port = "relay", "127.0.0.1", port


def _exactly(source: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        got = source.recv(size - len(data))
        if not got:
            raise OSError("ended")
        data += got
    return data
