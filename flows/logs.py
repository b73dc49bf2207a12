"""The logs of what runs on the nodes, as they come: read-only, and no flow run."""

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence

from blocks import Cluster, Node
from tasks import hidden, remote
from tasks.errors import InvalidSpec, SparkrailError
from tasks.inventory import load_cluster
from tasks.log_streams import Say, Stream, Wanted, streams

GRACE = 3.0  # Seconds for what runs on the nodes to be ended.
Show = Callable[[str], None]


def logs(name: str, wanted: Wanted, node: str | None = None, show: Show | None = None) -> int:
    """Show the logs of one node or all; the exit code is 1 when a node could not tell its own.

    Ctrl-C is the end that a person who follows has asked for.
    """
    try:
        cluster = load_cluster(name)
        nodes = chosen(cluster, node)
    except InvalidSpec as error:
        print(error, file=sys.stderr)
        return 2
    remote.STOP.clear()
    try:
        return show_all(cluster, nodes, wanted, show or _print)
    except SparkrailError as error:
        print(hidden.shown(str(error)), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0 if wanted.follow else 1
    except BrokenPipeError:  # Who reads us has enough.
        _close_output()
        return 0
    finally:
        remote.disconnect()


def chosen(cluster: Cluster, node: str | None) -> list[Node]:
    """The nodes to look at."""
    found = [each for each in cluster.nodes if node in (None, each.name)]
    if not found:
        names = ", ".join(each.name for each in cluster.nodes)
        raise InvalidSpec(f"{cluster.name} has no node {node}; it has {names}")
    return found


def show_all(cluster: Cluster, nodes: Sequence[Node], wanted: Wanted, show: Show) -> int:
    """Every log of every node, each line with the name of its node where there are several."""
    lock = threading.Lock()

    def say_of(node: Node) -> Say:
        place = f"{node.name} " if len(nodes) > 1 else ""

        def say(what: str, line: str) -> None:
            with lock:
                show(f"{place}{what} | {hidden.shown(line)}")

        return say

    every = [(stream, say_of(node)) for node in nodes for stream in streams(cluster, node, wanted)]
    return follow(every) if wanted.follow else read(every)


def read(every: Sequence[tuple[Stream, Say]]) -> int:
    """One log after the other; a node that cannot tell one is told, and the others go on."""
    failed: set[str] = set()
    for stream, say in every:
        if stream.node.name in failed:
            continue
        try:
            stream.run(say)
        except SparkrailError as error:
            failed.add(stream.node.name)
            print(hidden.shown(str(error)), file=sys.stderr)
    return 1 if failed else 0


def follow(every: Sequence[tuple[Stream, Say]]) -> int:
    """All side by side, until somebody ends us."""
    ends: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run(stream: Stream, say: Say) -> None:
        try:
            stream.run(say)
            ends.put(None)
        except BaseException as error:
            ends.put(error)

    # Daemons: one that is logging in on a node that is silent must not hold up our end.
    threads = [threading.Thread(target=run, args=each, daemon=True) for each in every]
    for thread in threads:
        thread.start()
    try:
        for _ in threads:
            error = ends.get()
            if error is not None:
                raise error
    finally:
        # What they run on the nodes is ended before the connection is.
        remote.cancel()
        deadline = time.monotonic() + GRACE
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    return 0


def _print(line: str) -> None:
    print(line, flush=True)


def _close_output() -> None:
    """Python would complain of the closed pipe at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
