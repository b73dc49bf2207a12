"""Fetches the files of a model that a node lacks, and serves what it has to the nodes behind it.

Relayed to a worker; standard library only. The first line of its input is a JSON document: address,
token, folder, state, files, lacking, sources, connections. The sources are asked in their order:
when one is gone, or sends what is damaged, the next one is; the last is the head, which has all.
Says {"listening": port}, each second its progress, and last {"done": ...} or {"failed": ...}, each
in a line of JSON; then it goes on serving until its input ends.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import hashlib
import os
import threading
import time
from typing import Any

from tasks.relayed.parts import Part, Parts, check
from tasks.relayed.pieces import PIECE, length, packed, read_state, settle, write_state
from tasks.relayed.talking import configuration, say, wait_for_the_end
from tasks.relayed.wire import DIGESTS, Broken, Link, Server, Told, read, read_into
from tasks.relayed.wire import PIECE as A_PIECE

SLICE = 512 << 10  # Hashed and written while it is still in the processor's cache.
STALL = 60.0
EVERY = 1.0
AGAIN = 4  # Times that the head is asked for the same before we give up.
PAUSE = 1.0
FULL = (errno.ENOSPC, errno.EDQUOT)

Job = tuple[int, int]  # The number of a file, and of a piece of it.


class Sources:
    """Whom we ask, and whom we do not any more."""

    def __init__(self, sources: list[tuple[str, str, int]], token: bytes) -> None:
        self.sources = sources
        self.token = token
        self.current = 0
        self.life = 0  # Another one when all connections are to be made anew.
        self.failures = 0
        self.not_before = 0.0
        self.without: list[str] = []
        self.lock = threading.Lock()

    @property
    def only_head_left(self) -> bool:
        return self.current == len(self.sources) - 1

    def open(self) -> tuple[Link, int]:
        """A connection to the one whom we ask just now, and which life it belongs to."""
        time.sleep(max(0.0, self.not_before - time.monotonic()))
        with self.lock:
            (_, address, port), life = self.sources[self.current], self.life
        try:
            return Link(address, port, self.token), life
        except Broken as error:
            self.lost(life, str(error))
            raise
        except Told as error:
            if self.only_head_left:
                raise
            self.lost(life, str(error))
            raise Broken(str(error)) from error

    def head(self) -> Link:
        _, address, port = self.sources[-1]
        return Link(address, port, self.token)

    def lost(self, life: int, why: str) -> None:
        """Go on with the next one; the head is asked again after a moment, some times."""
        with self.lock:
            if life != self.life:  # Another connection has noticed before.
                return
            self.life += 1
            said = f"{self.sources[self.current][0]}: {why}"
            if not self.only_head_left:
                self.without.append(said)
                self.current += 1
                return
            self.failures += 1
            self.not_before = time.monotonic() + PAUSE
            if self.failures >= AGAIN:
                raise Told("sources", "\n".join([*self.without, said]))

    def worked(self) -> None:
        self.failures = 0


class Fetch:
    """Some connections side by side, until every piece is there."""

    def __init__(self, parts: Parts, sources: Sources, connections: int) -> None:
        self.parts = parts
        self.sources = sources
        self.connections = connections
        self.jobs: collections.deque[Job] = collections.deque()
        self.tries: collections.Counter[Job] = collections.Counter()
        self.fetched = 0
        self.damaged = 0
        self.error: Exception | None = None

    def run(self) -> None:
        self.learn_digests()
        self.jobs.extend(self.parts.jobs(self.connections))
        threads = [threading.Thread(target=self.work, daemon=True) for _ in range(self.connections)]
        for thread in threads:
            thread.start()
        self.watch(threads)
        if self.error:
            raise self.error

    def learn_digests(self) -> None:
        """Of all pieces, from the head itself; the digests of whole files came another way."""
        for attempt in range(1, AGAIN + 1):
            try:
                link = self.sources.head()
                with contextlib.closing(link):
                    for number, part in self.parts.parts.items():
                        if not part.digests and not check(part, self.ask_digests(link, number)):
                            raise Broken(f"the digests of {part.path} arrive damaged")
                return
            except Broken as error:
                if attempt == AGAIN:
                    raise Told("sources", f"{self.sources.sources[-1][0]}: {error}") from error
            time.sleep(PAUSE)

    @staticmethod
    def ask_digests(link: Link, number: int) -> bytes:
        return read(link.socket, link.ask(DIGESTS, number))

    def watch(self, threads: list[threading.Thread]) -> None:
        """Find out when nothing moves any more."""
        seen, moved = -1, time.monotonic()
        while self.error is None and any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(EVERY / len(threads))
            if self.parts.bytes != seen:
                seen, moved = self.parts.bytes, time.monotonic()
            if time.monotonic() - moved > STALL:
                raise Told("stalled", f"nothing moved for {STALL:g} s")

    def work(self) -> None:
        buffer = memoryview(bytearray(SLICE))
        link: Link | None = None
        life = -1
        try:
            while self.error is None:
                try:
                    job = self.jobs.popleft()
                except IndexError:
                    return
                if self.parts.parts[job[0]].holds(job[1], buffer):
                    self.parts.got(*job)
                    continue
                try:
                    if link is not None and life != self.sources.life:
                        link.close()
                        link = None
                    if link is None:
                        link, life = self.sources.open()
                    self.fetch(link, life, job, buffer)
                except Broken as error:
                    self.jobs.appendleft(job)
                    if link is not None:
                        link.close()
                        link = None
                        self.sources.lost(life, str(error))
        except Exception as error:  # Whatever it is, the main thread tells it.
            self.error = self.error or error

    def fetch(self, link: Link, life: int, job: Job, buffer: memoryview) -> None:
        number, piece = job
        part = self.parts.parts[number]
        try:
            size = link.ask(A_PIECE, number, piece)
        except Told as error:
            if error.kind == "changed":
                raise
            raise Broken(str(error)) from error
        if size != length(part.size, piece):
            raise Broken("it sends something else")
        if self.take(link, part, piece, size, buffer) == part.digest(piece):
            self.parts.got(number, piece)
            self.fetched += size
            self.sources.worked()
            return
        self.damaged += 1
        self.tries[job] += 1
        if self.sources.only_head_left and self.tries[job] >= AGAIN:
            raise Told("damaged", part.path)
        self.jobs.appendleft(job)
        if not self.sources.only_head_left and self.tries[job] > 1:
            self.sources.lost(life, "what it sends is damaged")

    @staticmethod
    def take(link: Link, part: Part, piece: int, size: int, buffer: memoryview) -> bytes:
        """A piece from the wire to the disk; its digest, by which it counts or does not."""
        hashed, at = hashlib.sha256(), piece * PIECE
        end = at + size
        handle = os.open(part.place, os.O_WRONLY)
        try:
            while at < end:
                view = buffer[: end - at]
                read_into(link.socket, view)
                hashed.update(view)
                while view:
                    written = os.pwrite(handle, view, at)
                    at, view = at + written, view[written:]
        finally:
            os.close(handle)
        return hashed.digest()


def failure(error: Exception) -> dict[str, str]:
    if isinstance(error, Told):
        return {"kind": error.kind, "text": str(error)}
    if isinstance(error, OSError):
        kind = "disk" if error.errno in FULL else "write"
        return {"kind": kind, "text": str(error)}
    return {"kind": "program", "text": f"{type(error).__name__}: {error}"}


def remember(parts: Parts, folder: str, state: str) -> None:
    """That the published files are what they should be, so that nobody reads them again for it."""
    before = parts.records()
    settle(max((os.stat(os.path.join(folder, path)) for path in before), key=lambda s: s.st_ctime))
    known = {
        path: {**record, "pieces": packed(record["pieces"])}
        for path, record in parts.records().items()
        if record["identity"] == before[path]["identity"]
    }
    write_state(state, folder, {**read_state(state).get(folder, {}), **known})


def receive(config: Any, parts: Parts, token: bytes) -> dict[str, Any]:
    sources = Sources(config["sources"], token)
    fetch = Fetch(parts, sources, config["connections"])
    fetch.run()
    parts.publish()
    remember(parts, config["folder"], os.path.expanduser(config["state"]))
    parts.remembered.set()
    return {
        "bytes": parts.total,
        "fetched": fetch.fetched,
        "damaged": fetch.damaged,
        "without": sources.without,
    }


def tell_progress(parts: Parts) -> None:
    """Also while the last of it goes to the disk: whoever is silent counts as gone."""
    while not parts.remembered.wait(EVERY):
        say({"progress": {"bytes": parts.bytes, "of": parts.total}})


def main(config: Any) -> None:
    token = bytes.fromhex(config["token"])
    try:
        parts = Parts(config["folder"], config["files"], config["lacking"])
        parts.prepare()
        say({"listening": Server(config["address"], token, parts).port})
        threading.Thread(target=tell_progress, args=(parts,), daemon=True).start()
        say({"done": receive(config, parts, token)})
    except Exception as error:
        say({"failed": failure(error)})
        os._exit(0)  # Whoever waits for a piece of ours goes on without us.
    wait_for_the_end()


if __name__ == "__main__":
    main(configuration())
