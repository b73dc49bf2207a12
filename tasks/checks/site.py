"""What a check sees, and what it says."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from blocks import Cluster, Node
from tasks.containers import CLUSTER_LABEL, Container
from tasks.engine_verdicts import Verdict
from tasks.manifests import Manifest, differing
from tasks.node_facts import GpuHolder, NodeFacts, Process

Level = Literal["ready", "slow", "blocked"]


@dataclass(frozen=True)
class Site:
    """One node to judge, beside the facts of all nodes that answered."""

    cluster: Cluster
    node: Node
    facts: Mapping[str, NodeFacts]
    engine: Verdict | None = None  # Of the engine on its own arguments.

    @property
    def here(self) -> NodeFacts:
        return self.facts[self.node.name]

    @property
    def is_head(self) -> bool:
        return self.node == self.cluster.head

    @property
    def head(self) -> NodeFacts | None:
        return self.facts.get(self.cluster.head.name)

    @property
    def reference(self) -> Node:
        """The node that the others are compared with: the head if it answered."""
        return next(node for node in self.cluster.nodes if node.name in self.facts)

    @property
    def there(self) -> NodeFacts:
        return self.facts[self.reference.name]

    @property
    def wanted_weights(self) -> Manifest:
        """What lies on the head, and so must lie on every node."""
        return self.head.weights if self.head else Manifest()

    @property
    def model(self) -> Mapping[str, Any]:
        """What config.json on the head says."""
        return self.head.model.config if self.head else {}

    @property
    def runs(self) -> bool:
        """Whether a release of ours runs on this node."""
        docker = self.here.docker
        found = docker.containers if docker else ()
        return any(container.running and self.is_ours(container) for container in found)

    @property
    def needs_weights(self) -> bool:
        """Whether weights have to be sent to this node."""
        return bool(differing(self.wanted_weights, self.here.weights))

    def container_of(self, process: Process | None) -> Container | None:
        if process is None or self.here.docker is None:
            return None
        return self.here.docker.container(process.container)

    def is_ours(self, container: Container | None) -> bool:
        return container is not None and container.label(CLUSTER_LABEL) == self.cluster.name

    def is_ours_holder(self, held: GpuHolder) -> bool:
        return self.is_ours(self.container_of(held.process))


class Finding(NamedTuple):
    """What a check found on a node, and what to do about it."""

    verdict: Level
    detail: str
    remedy: str = ""


Check = Callable[[Site], Finding | None]  # None: it does not apply to this node, or cannot be told.


def ready(detail: str) -> Finding:
    return Finding("ready", detail)


def slow(detail: str, remedy: str) -> Finding:
    return Finding("slow", detail, remedy)


def blocked(detail: str, remedy: str) -> Finding:
    return Finding("blocked", detail, remedy)


def gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def age(seconds: float) -> str:
    """Such as: 3 hours."""
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0, seconds):.0f} seconds"


def named(site: Site, process: Process) -> str:
    """A process as a person would look for it."""
    words = f"pid {process.pid} of {process.user} ({process.command[:80]})"
    container = site.container_of(process)
    if container:
        return f"{words} in container {container.name}"
    return f"{words} of {process.unit}" if process.unit else words


def how_to_end(site: Site, process: Process | None) -> str:
    """The command that ends a process for good: one that is kept alive comes back from a kill."""
    container = site.container_of(process)
    if container:
        return f"docker stop {container.name}"
    if process and process.unit and not process.unit.startswith("user@"):
        return f"sudo systemctl stop {process.unit}"
    return f"kill {process.pid}" if process else "end it"
