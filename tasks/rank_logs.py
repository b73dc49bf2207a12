"""What the ranks said last: the cause of what the server says may lie on any node."""

import re
from collections.abc import Sequence

from blocks import Cluster, Node
from tasks import containers
from tasks.engines import engine
from tasks.errors import SparkrailError
from tasks.failures import ADDRESS, ANSI, SPEAKER, Hit
from tasks.remote import connect
from tasks.topology import ray_container

LINES = 15
WRONG = re.compile(r"\b(Error|ERROR|Exception|Traceback|FATAL|killed)\b|Error:")
# The newest log of a rank that holds an error, else the newest that holds anything.
NEWEST = r"""
cd /tmp/ray/session_latest/logs 2>/dev/null || exit 0
files=$(ls -t worker-*.err worker-*.out 2>/dev/null | head -n 40)
[ -n "$files" ] || exit 0
chosen=$(grep -lE 'Error|Traceback' $files | head -n 1)
[ -n "$chosen" ] || chosen=$(find $files -size +0 2>/dev/null | head -n 1)
[ -z "$chosen" ] || tail -n "$1" "$chosen"
"""


def speaker(cluster: Cluster, address: str) -> Node | None:
    """The node of a fabric address."""
    return next((node for node in cluster.nodes if node.fabric_address == address), None)


def culprit(cluster: Cluster, log: str, hit: Hit | None) -> Node:
    """The node at fault: whose rank said what we know, else what looks like an error."""
    if hit:
        return speaker(cluster, hit.address) or cluster.head
    for line in ANSI.sub("", log).splitlines():
        said = SPEAKER.match(line)
        address = ADDRESS.search(said[0]) if said else None
        if address and WRONG.search(line):
            return speaker(cluster, address[1]) or cluster.head
    return cluster.head


class Ranks:
    """The workers' side of a server that starts."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._name = ray_container(cluster)

    def lost(self) -> Node | None:
        """The first worker whose Ray has ended: its rank is lost, whatever the server says."""
        for node in self._cluster.workers:
            with engine(self._cluster, node) as client:
                found = containers.observe(client, (self._name,)).get(self._name)
            if found is None or not found.running:
                return node
        return None

    def last_words(self, nodes: Sequence[Node], lines: int = LINES) -> str:
        """The end of their ranks' logs, or of Ray's; a node that is away is no second error."""
        return "\n".join(filter(None, (self._of(node, lines) for node in nodes)))

    def _of(self, node: Node, lines: int) -> str:
        argv = ("docker", "exec", self._name, "sh", "-c", NEWEST, "sh", str(lines))
        try:
            result = connect(self._cluster, node).run(argv, timeout=20, ok=range(-1, 256))
            said = result.stdout if result.code == 0 else ""
            if not said.strip():
                with engine(self._cluster, node) as client:
                    said = containers.log_tail(client, self._name, lines)
        except SparkrailError as error:
            return f"{node.name} does not tell its log: {error.brief}"
        said = ANSI.sub("", said).strip()
        return f"last on {node.name}:\n{said}" if said else ""
