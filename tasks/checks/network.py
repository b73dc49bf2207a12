"""Checks of the fabric and of the ports."""

from blocks.cluster import RAY_OWN_PORTS
from tasks.checks.site import Finding, Site, blocked, how_to_end, named, ready, slow
from tasks.node_facts import Interface, Port
from tasks.peers import AGENT_PORT
from tasks.topology import ray_container, serve_container

DASHBOARD_PORT = 8265


def fabric_address(site: Site) -> Finding:
    address, here = site.node.fabric_address, site.here
    interface = here.interface_of(address)
    if interface:
        return ready(f"{address} on {interface.name}")
    if here.interfaces_error:
        return blocked(
            f"cannot tell which interface has {address}: {here.interfaces_error}",
            f"Install iproute2 on {site.node.name} (apt install iproute2).",
        )
    own = [
        f"{other.name} {entry.address}/{entry.prefix}"
        for other in here.interfaces
        for entry in other.addresses
        if not entry.address.startswith("127.")
    ]
    return blocked(
        f"no interface has {address}; {site.node.name} has {', '.join(own) or 'no address'}",
        "Give it to the fabric interface, in a way that survives a reboot, or correct "
        f"fabric_address of {site.node.name} in the spec.",
    )


def fabric_link(site: Site) -> Finding | None:
    address = site.node.fabric_address
    interface = site.here.interface_of(address)
    if interface is None:
        return None
    if not interface.works:
        return blocked(
            f"{interface.name} is {interface.state}",
            f"Plug the cable in, or: sudo ip link set {interface.name} up",
        )
    said = [f"{interface.name} {interface.state}"]
    if interface.speed:
        said.append(f"{interface.speed} Mbit/s")
    said += [f"{rdma.device} port {rdma.port} {rdma.state}" for rdma in interface.rdma]
    return _rdma(address, interface, ", ".join(said)) or ready(", ".join(said))


def _rdma(address: str, interface: Interface, said: str) -> Finding | None:
    """RDMA is not needed, but one that is there and does not work costs speed or hangs NCCL."""
    down = [rdma for rdma in interface.rdma if not rdma.active]
    if down:
        return slow(
            said,
            f"See `rdma link` for {down[0].device}; until it is ACTIVE the fabric runs over TCP.",
        )
    without = [
        rdma
        for rdma in interface.rdma
        if rdma.link_layer == "Ethernet" and address not in rdma.roce_v2
    ]
    if without:
        return slow(
            f"{said}; no RoCE v2 GID for {address}",
            f"Take {interface.name} down and up again, so that its driver registers the address.",
        )
    return None


def fabric_subnet(site: Site) -> Finding | None:
    pair = _pair(site)
    if pair is None:
        return None
    other = site.reference
    here = pair[0].network_of(site.node.fabric_address)
    there = pair[1].network_of(other.fabric_address)
    if here == there:
        return ready(here)
    return blocked(
        f"{site.node.fabric_address} is in {here}, {other.name}'s {other.fabric_address} "
        f"in {there}",
        "Put all fabric addresses into one subnet, with one prefix length.",
    )


def _pair(site: Site) -> tuple[Interface, Interface] | None:
    here = site.here.interface_of(site.node.fabric_address)
    there = site.there.interface_of(site.reference.fabric_address)
    return (here, there) if here and there else None


def wanted_ports(site: Site) -> dict[int, tuple[str, str]]:
    """What each port is for, and the container of ours that listens on it."""
    ray, serve = ray_container(site.cluster), serve_container(site.cluster)
    wanted = {AGENT_PORT: (RAY_OWN_PORTS[AGENT_PORT], ray)}
    if site.is_head:
        wanted |= {
            site.cluster.serve.port: ("serve.port", serve),
            site.cluster.ray.port: ("ray.port", ray),
            DASHBOARD_PORT: (RAY_OWN_PORTS[DASHBOARD_PORT], ray),
        }
    return dict(sorted(wanted.items()))


def ports(site: Site) -> Finding:
    wanted = wanted_ports(site)
    said: dict[int, str] = dict.fromkeys(wanted, "free")
    taken: dict[str, str] = {}
    for port in site.here.ports:
        if port.port not in wanted or said[port.port] == "taken":
            continue
        purpose, container = wanted[port.port]
        if _is_ours(site, port, container):
            said[port.port] = "ours"
        else:
            said[port.port] = "taken"
            taken[f"{port.port} ({purpose}) is held by {_owner(site, port)}"] = _remedy(site, port)
    if taken:
        return blocked("; ".join(taken), "\n".join(dict.fromkeys(taken.values())))
    return ready(", ".join(f"{port} {state}" for port, state in said.items()))


def _is_ours(site: Site, port: Port, name: str) -> bool:
    if port.owner:
        return site.is_ours(site.container_of(port.owner))
    # Only root sees the sockets of other users: then a running container of ours explains it.
    docker = site.here.docker
    return docker is not None and any(
        container.name == name and container.running and site.is_ours(container)
        for container in docker.containers
    )


def _owner(site: Site, port: Port) -> str:
    if port.owner:
        return named(site, port.owner)
    return f"a process of uid {port.uid}, which {site.here.user} may not look at"


def _remedy(site: Site, port: Port) -> str:
    if port.owner is None:
        return f"On {site.node.name}: sudo ss -ltnp 'sport = :{port.port}' tells whose it is."
    end = f"On {site.node.name}: {how_to_end(site, port.owner)}"
    chosen = (site.cluster.serve.port, site.cluster.ray.port)
    return f"{end}; or choose another port in the spec." if port.port in chosen else end
