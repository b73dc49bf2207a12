"""Checks of the way between the nodes: TCP, packets of full size, the head's ssh to a worker."""

from collections.abc import Iterator

from tasks.checks.site import Finding, Site, blocked, ready, slow
from tasks.node_facts import Interface
from tasks.peers import Peer
from tasks.transfers import ssh_failed, target


def fabric_path(site: Site) -> Finding | None:
    """TCP arrives at every peer: a refusal proves the way as well as an answer."""
    peers = list(_peers(site))
    if not peers:
        return None
    lost = [peer for peer in peers if not peer.reached]
    if lost:
        return blocked(
            "; ".join(
                f"{peer.address}:{peer.port} ({peer.node}) from {site.node.fabric_address}: "
                f"{peer.tcp}"
                for peer in lost
            ),
            f"Does a firewall on {' or '.join(peer.node for peer in lost)} let the other nodes in? "
            f"All TCP ports must be open between fabric addresses, such as: "
            f"sudo ufw allow from {_network(site)}",
        )
    return ready(", ".join(f"{peer.node} {peer.port} {_word(peer)}" for peer in peers))


def _word(peer: Peer) -> str:
    return "open" if peer.tcp == "open" else "reached, nobody listens yet"


def _network(site: Site) -> str:
    interface = site.here.interface_of(site.node.fabric_address)
    return interface.network_of(site.node.fabric_address) if interface else "the fabric"


def _peers(site: Site) -> Iterator[Peer]:
    """Peers that told their facts and have their address: else their own rows say what is wrong."""
    if site.here.interface_of(site.node.fabric_address) is None:
        return
    addresses = {node.name: node.fabric_address for node in site.cluster.nodes}
    for peer in site.here.peers:
        facts = site.facts.get(peer.node)
        interface = facts.interface_of(addresses[peer.node]) if facts else None
        if interface and interface.works:
            yield peer


def fabric_mtu(site: Site) -> Finding | None:
    """Equal at both ends, and what lies between lets packets of that size through."""
    here = site.here.interface_of(site.node.fabric_address)
    there = site.there.interface_of(site.reference.fabric_address)
    if here is None or there is None:
        return None
    if here.mtu != there.mtu:
        return slow(
            f"{here.name} has {here.mtu}, {site.reference.name}'s {there.name} has {there.mtu}",
            "Set the same MTU on both ends and on the switch between them, lastingly: "
            f"sudo ip link set {here.name} mtu {there.mtu}",
        )
    # Also to a node that told no facts: lost packets may be just what keeps our SSH from it.
    swallowed = [peer for peer in site.here.peers if peer.lost and peer.reached]
    if swallowed:
        return _swallowed(here, swallowed[0])
    proven = [peer.node for peer in _peers(site) if peer.packets]
    return ready(f"{here.mtu}" + (f", proven to {', '.join(proven)}" if proven else ""))


def _swallowed(here: Interface, peer: Peer) -> Finding:
    arrives = [str(size) for size, fate in peer.packets.items() if fate == "arrived"]
    less = f", those of {', '.join(arrives)} do" if arrives else ""
    return blocked(
        f"packets of {', '.join(map(str, peer.lost))} bytes from {here.name} do not arrive at "
        f"{peer.node}{less}",
        f"Something between them has a smaller MTU: raise it on the switch, or lower it on all "
        f"nodes, lastingly: sudo ip link set {here.name} mtu {min(peer.packets)}",
    )


def head_login(site: Site) -> Finding | None:
    """The head's own ssh, over which rsync sends the weights, with nothing printed unasked."""
    if site.cluster.weights.transport != "rsync":
        return None
    peers = site.head.peers if site.head and not site.is_head else ()
    login = next((peer.login for peer in peers if peer.node == site.node.name), None)
    if login is None:
        return None
    worse = blocked if site.needs_weights else slow
    later = "" if site.needs_weights else "; nothing is to be sent just now"
    if login.code != 0:
        error = ssh_failed(site.cluster, site.node, login.said)
        said = login.said.splitlines()[-1:] if login.said else []
        return worse("\n".join([error.brief, *said]) + later, error.remedy)
    if login.printed:
        return worse(
            f"the login of {target(site.node)} prints {login.printed} bytes unasked, which breaks "
            f"rsync: {login.first_line}{later}",
            f"On {site.node.name}, let ~/.bashrc and its like print only in interactive shells: "
            "[ -t 1 ] || return",
        )
    return ready(f"{site.cluster.head.name} -> {target(site.node)}")
