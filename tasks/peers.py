"""What a node reaches of its peers over the fabric: by TCP, by packets of full size, by ssh."""

import json
from collections.abc import Iterator, Mapping

from pydantic import BaseModel

from blocks import Cluster, Node
from blocks.cluster import RAY_OWN_PORTS
from tasks.programs import run_program
from tasks.remote import Remote
from tasks.transfers import ssh_command, target

AGENT_PORT = next(port for port, purpose in RAY_OWN_PORTS.items() if purpose == "Ray's agent")
ARRIVED = "arrived"
REACHED = ("open", "refused")  # Who refuses, answers.
TIMEOUT = 4.0


class Login(BaseModel, frozen=True):
    """How ssh from the head to a worker ended, and what the login printed unasked."""

    code: int
    said: str = ""
    printed: int = 0
    first_line: str = ""


class Peer(BaseModel, frozen=True):
    """Another node, as a node sees it over the fabric."""

    node: str
    address: str
    port: int
    tcp: str
    packets: Mapping[int, str] = {}  # By size; empty where it cannot be told.
    login: Login | None = None

    @property
    def reached(self) -> bool:
        return self.tcp in REACHED

    @property
    def lost(self) -> tuple[int, ...]:
        """The sizes of packets that do not arrive."""
        return tuple(size for size, fate in self.packets.items() if fate != ARRIVED)


def peers_of(cluster: Cluster, node: Node) -> Iterator[tuple[Node, int]]:
    """Whom a node must reach, and at which port: all from the head; the head, and a ring."""
    if node == cluster.head:
        yield from ((worker, AGENT_PORT) for worker in cluster.workers)
        return
    yield cluster.head, cluster.ray.port
    place = cluster.nodes.index(node)
    following = cluster.nodes[(place + 1) % len(cluster.nodes)]
    if following != cluster.head:
        yield following, AGENT_PORT


def question(cluster: Cluster, node: Node) -> str:
    """What the relayed program is asked."""
    from_head = node == cluster.head
    return json.dumps(
        {
            "source": node.fabric_address,
            "timeout": TIMEOUT,
            "peers": [
                {
                    "node": peer.name,
                    "address": peer.fabric_address,
                    "port": port,
                    # As image and weights are sent.
                    "login": [*ssh_command(peer), target(peer), "true"] if from_head else None,
                }
                for peer, port in peers_of(cluster, node)
            ],
        }
    )


def observe_peers(cluster: Cluster, node: Node, remote: Remote) -> tuple[Peer, ...]:
    """Ask a node for its peers, all at once."""
    if not cluster.workers:
        return ()
    said = run_program(remote, "peers", question(cluster, node), timeout=5 * TIMEOUT)
    return tuple(map(Peer.model_validate, said))
