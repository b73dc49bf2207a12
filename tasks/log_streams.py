"""The logs of what runs on a node, line by line as they come; read-only, and ended with us."""

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from blocks import Cluster, Node
from tasks import containers, remote
from tasks.containers import Container
from tasks.engines import engine
from tasks.errors import CommandFailed, CommandTimedOut, NodeUnreachable
from tasks.redaction import hide_secrets_of
from tasks.remote import Remote, connect
from tasks.topology import ray_container, serve_container

EVERY = 2.0  # Seconds between two looks at what has no end that we could wait for.
READ_SECONDS = 300.0
CODES = range(-1, 256)
# docker hands what a container said on its standard error to ours; order matters more.
LOGS = 'exec docker logs "$@" 2>&1'
# $1: how many of the last lines of a file that is not known yet; further words: FILE=SIZE of those
# that are. Each part begins with a mark that no log has.
RANKS = r"""
lines=$1
shift
cd /tmp/ray/session_latest/logs 2>/dev/null || exit 0
for file in $(ls -tr worker-*.err worker-*.out 2>/dev/null | tail -n 64); do
    size=$(wc -c <"$file")
    from=
    for known in "$@"; do [ "${known%=*}" != "$file" ] || from=${known#*=}; done
    [ "$size" -gt "${from:-0}" ] || continue
    printf '\036%s %s\n' "$file" "$size"
    if [ -n "$from" ]; then tail -c "+$((from + 1))" "$file" | head -c "$((size - from))"
    else head -c "$size" "$file" | tail -n "$lines"; fi
done
"""
# Of a container that has ended: docker still has its /tmp, and hands it out as an archive.
ENDED_RANKS = r"""
docker cp -L "$1:/tmp/ray/session_latest/logs" - 2>/dev/null |
    lines=$2 tar -xf - --wildcards --to-command='
        text=$(tail -n "$lines"; echo x)
        [ "$text" = x ] || printf "\036%s 0\n%s" "${TAR_FILENAME##*/}" "${text%x}"
    ' '*/worker-*.err' '*/worker-*.out' 2>/dev/null || true
"""
PID = re.compile(r"-(\d+)\.(?:err|out)$")

Say = Callable[[str, str], None]  # What it is of, and a line of it.


@dataclass(frozen=True)
class Wanted:
    """How many of the last lines of each log, and whether those that come."""

    lines: int
    follow: bool = False


class Lines:
    """Whole lines of a text that comes in parts."""

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take = take
        self._rest = ""

    def add(self, text: str) -> None:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._take(line.removesuffix("\r"))

    def end(self) -> None:
        if self._rest:
            self._take(self._rest)
        self._rest = ""


def know_secrets(cluster: Cluster, node: Node) -> str:
    """The node.env of a node; what is secret in it shows nowhere from now on."""
    script = 'cat -- "$HOME/.sparkrail/$1/run/node.env" 2>/dev/null || true'
    text = connect(cluster, node).run(("sh", "-c", script, "sh", cluster.name)).stdout
    hide_secrets_of(text)
    return text


class Stream:
    """One log of one node, looked at once or, to follow it, again and again."""

    def __init__(self, cluster: Cluster, node: Node, name: str, wanted: Wanted) -> None:
        self.node = node
        self.name = name
        self.wanted = wanted
        self._cluster = cluster
        self._say: Say = lambda _what, _line: None
        self._remark = ""
        self._first = True

    @property
    def what(self) -> str:
        """What its lines are of, in a word."""
        return self.name.rpartition("-")[2]

    def run(self, say: Say) -> None:
        """Say all that is wanted; whoever follows is told of errors, and goes on."""
        self._say = say
        while True:
            try:
                if self._first:
                    know_secrets(self._cluster, self.node)
                with engine(self._cluster, self.node) as client:
                    found = containers.observe(client, (self.name,)).get(self.name)
                self.look(found)
                self._first = False
            except (NodeUnreachable, CommandFailed, CommandTimedOut) as error:
                if not self.wanted.follow:
                    raise
                self.remark(f"{error.brief}; trying again")
            if not self.wanted.follow or remote.STOP.wait(EVERY):
                return

    def look(self, found: Container | None) -> None:
        """Say what is new, of a container that is there or not."""
        raise NotImplementedError

    def remark(self, text: str) -> None:
        """Our own words among the lines; what holds on is said once."""
        if text and text != self._remark:
            self._say(self.what, f"[{text}]")
        self._remark = text

    def connect(self) -> Remote:
        return connect(self._cluster, self.node)


class ContainerLog(Stream):
    """What docker keeps of a container."""

    _seen = ""
    _heard = 0.0

    def look(self, found: Container | None) -> None:
        if found is None:
            self.remark(f"there is no container {self.name}: not deployed, or removed")
            return
        if found.id != self._seen or found.running:
            self._copy(found, self._options(found))
        if not found.running:
            self.remark(f"{self.name} ({found.id[:12]}) has ended: it is {found.state}")

    def _options(self, found: Container) -> list[str]:
        follow = ["--follow"] if self.wanted.follow and found.running else []
        if found.id == self._seen:  # It was started again, or we lost it: go on.
            return [*follow, f"--since={time.monotonic() - self._heard + 1:.0f}s"]
        return [*follow, f"--tail={self.wanted.lines if self._first else 'all'}"]

    def _copy(self, found: Container, options: list[str]) -> None:
        self._seen, self._heard = found.id, time.monotonic()
        self.remark("")
        lines = Lines(self._take)
        self.connect().run(
            ("sh", "-c", LOGS, "sh", *options, found.id),
            timeout=math.inf if "--follow" in options else READ_SECONDS,
            ok=CODES,
            on_output=lines.add,
            keep=False,
        )
        lines.end()

    def _take(self, line: str) -> None:
        self._heard = time.monotonic()
        self._say(self.what, line)


class RankLogs(Stream):
    """What the ranks of a node wrote into Ray's logs, which the server repeats only in part."""

    what = "ranks"

    def __init__(self, cluster: Cluster, node: Node, wanted: Wanted) -> None:
        super().__init__(cluster, node, ray_container(cluster), wanted)
        self._sizes: dict[str, str] = {}

    def look(self, found: Container | None) -> None:
        if found is None:
            self.remark(f"there is no container {self.name}, and so no log of a rank")
        elif found.running:
            self._read(found)
        else:
            if self._first:
                argv = ("sh", "-c", ENDED_RANKS, "sh", found.id, str(self.wanted.lines))
                text = self.connect().run(argv, timeout=READ_SECONDS).stdout
                self._sizes |= tell_ranks(text, self._say)
            self.remark(f"the ranks ended with {self.name} ({found.id[:12]})")

    def _read(self, found: Container) -> None:
        # What follows in a container goes on there when we are gone: so it is only looked at.
        lines = str(self.wanted.lines) if self._first else "+1"
        known = (f"{file}={size}" for file, size in self._sizes.items())
        argv = ("docker", "exec", found.id, "sh", "-c", RANKS, "sh", lines, *known)
        result = self.connect().run(argv, timeout=READ_SECONDS, ok=CODES)
        if result.code == 0:  # Else it has just ended, which the next look tells.
            self._sizes |= tell_ranks(result.stdout, self._say)


def tell_ranks(text: str, say: Say) -> dict[str, str]:
    """Say what RANKS printed, by the pids of the ranks; the sizes of the files so far."""
    sizes = {}
    for part in text.split("\036")[1:]:
        head, _, content = part.partition("\n")
        file, _, size = head.partition(" ")
        sizes[file] = size
        pid = PID.search(file)
        for line in content.splitlines():
            say(f"rank {pid[1] if pid else file}", line)
    return sizes


def streams(cluster: Cluster, node: Node, wanted: Wanted) -> list[Stream]:
    """All logs of a node: the server's on the head, Ray's, and the ranks'."""
    serve = [serve_container(cluster)] if node == cluster.head else []
    names = (*serve, ray_container(cluster))
    logs = [ContainerLog(cluster, node, name, wanted) for name in names]
    return [*logs, RankLogs(cluster, node, wanted)]
