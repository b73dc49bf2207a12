"""Check of the variables that name a node's interfaces and RDMA devices."""

from collections.abc import Iterator, Sequence

from blocks import Node
from tasks.checks.site import Finding, Site, blocked, ready, slow
from tasks.node_facts import Interface
from tasks.topology import environment

SHOWN = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX")


def variables(site: Site) -> Finding | None:
    """Ours are derived; one from the spec must name what this node has."""
    found = list(_judged(site))
    for verdict in (blocked, slow):
        worse = [each for each in found if each.verdict == verdict.__name__]
        if worse:
            remedies = dict.fromkeys(each.remedy for each in worse)
            return verdict("; ".join(each.detail for each in worse), "\n".join(remedies))
    fabric = site.here.fabric(site.node.fabric_address)
    if fabric is None:
        return None
    values = environment(site.cluster, site.node, fabric)
    return ready(", ".join(f"{name}={values[name]}" for name in SHOWN if name in values))


def _judged(site: Site) -> Iterator[Finding]:
    for name, value in site.node.environment.items():
        rule = RULES.get(name)
        finding = rule(site, name, value) if rule and value else None
        if finding:
            yield finding


def _one_interface(site: Site, name: str, value: str) -> Finding | None:
    """For Gloo and the tensor-parallel sockets: exactly one name, on one network for all nodes."""
    if _is_address(value):
        return blocked(f"{name} is {value}, an address; it takes a name", _instead(site, name))
    if value[0] in "^=" or "," in value:
        return blocked(
            f"{name} is {value}; it takes one whole name, without ^, = and commas",
            _instead(site, name),
        )
    interface = site.here.interface(value)
    if interface is None:
        return blocked(_unknown(site, name, value), _instead(site, name))
    network = _network(interface)
    if network is None:
        return blocked(
            f"{name} is {value}, which has no IPv4 address that others reach", _instead(site, name)
        )
    for other in site.cluster.nodes:
        there = _chosen(site, other.name, name)
        if there and _network(there) != network:
            return blocked(
                f"{name} is {value}, in {network}, but {other.name}'s is {there.name}, in "
                f"{_network(there)}",
                _instead(site, name),
            )
    return _leaves_the_fabric(site, name, value, [interface.name])


def _chosen(site: Site, node: str, name: str) -> Interface | None:
    """What a variable names on another node: by the spec, or by the fabric address there."""
    facts = site.facts.get(node)
    other = next(each for each in site.cluster.nodes if each.name == node)
    if facts is None or other == site.node:
        return None
    own = other.environment.get(name)
    return facts.interface(own) if own else facts.interface_of(other.fabric_address)


def _network(interface: Interface) -> str | None:
    usable = [own.address for own in interface.addresses if not own.address.startswith("127.")]
    return interface.network_of(usable[0]) if usable else None


def _nccl_interfaces(site: Site, name: str, value: str) -> Finding | None:
    """NCCL takes beginnings of names; = before whole ones, ^ before those to leave out."""
    if _is_address(value.lstrip("^=")):
        return blocked(f"{name} is {value}, an address; it takes names", _instead(site, name))
    found = _matching(value, [interface.name for interface in site.here.interfaces])
    if not found:
        return blocked(_unknown(site, name, value), _instead(site, name))
    return _leaves_the_fabric(site, name, value, found)


def _leaves_the_fabric(site: Site, name: str, value: str, found: Sequence[str]) -> Finding | None:
    fabric = site.here.interface_of(site.node.fabric_address)
    if fabric is None or fabric.name in found:
        return None
    return slow(
        f"{name} is {value}, which is not the interface of {site.node.fabric_address}",
        _instead(site, name),
    )


def _hca(site: Site, name: str, value: str) -> Finding | None:
    devices = site.here.rdma_devices
    if _matching(value, devices, port=True):
        return None
    return blocked(
        f"{name} is {value}, which matches no RDMA device of {site.node.name}; it has "
        f"{', '.join(devices) or 'none'}",
        _instead(site, name),
    )


def _gid_index(site: Site, name: str, value: str) -> Finding | None:
    address = site.node.fabric_address
    interface = site.here.interface_of(address)
    if interface is None or value == "-1":
        return None
    ports = [rdma for rdma in interface.rdma if rdma.link_layer == "Ethernet"]
    if not value.isdigit():
        return blocked(f"{name} is {value}; it takes a number", _instead(site, name))
    wrong = [rdma for rdma in ports if rdma.roce_v2.get(address) != int(value)]
    if not wrong:
        return None
    right = wrong[0].roce_v2.get(address)
    where = f"of {address} on {wrong[0].device}"
    if right is None:
        return blocked(
            f"{name} is {value}, but there is no RoCE v2 GID {where}", _leave_out(site, name)
        )
    return blocked(
        f"{name} is {value}, but the RoCE v2 GID {where} has the index {right}",
        f"{_leave_out(site, name)}: NCCL finds it. Or set it to {right}; it may move when the link "
        "does.",
    )


def _devices(site: Site, name: str, value: str) -> Finding | None:
    known = {*site.here.rdma_devices, *(each.name for each in site.here.interfaces), "all"}
    absent = [word for word in value.lstrip("^").split(",") if word.partition(":")[0] not in known]
    if not absent:
        return None
    return blocked(
        f"{name} names {', '.join(absent)}, which {site.node.name} does not have",
        _instead(site, name),
    )


def _matching(value: str, names: Sequence[str], *, port: bool = False) -> list[str]:
    """What NCCL takes of these names."""
    body = value.removeprefix("^")
    exact = body.startswith("=")
    words = [word for word in body.removeprefix("=").split(",") if word]
    if port:
        words = [word.partition(":")[0] for word in words]
    hits = [
        name
        for name in names
        if any(name == word if exact else name.startswith(word) for word in words)
    ]
    return [name for name in names if name not in hits] if value.startswith("^") else hits


def _is_address(value: str) -> bool:
    return value.replace(".", "").replace(":", "").isdigit() and ("." in value or ":" in value)


def _unknown(site: Site, name: str, value: str) -> str:
    has = ", ".join(interface.name for interface in site.here.interfaces)
    return f"{name} is {value}, which {site.node.name} does not have; it has {has}"


def _leave_out(site: Site, name: str) -> str:
    return f"Leave {name} of {site.node.name} out of the spec"


def _instead(site: Site, name: str) -> str:
    fabric = site.here.fabric(site.node.fabric_address)
    if fabric is None:
        return f"{_leave_out(site, name)}: it follows from fabric_address."
    right = environment(site.cluster, _bare(site), fabric).get(name)
    return f"{_leave_out(site, name)}: it follows from fabric_address" + (
        f" (here {right})." if right else "."
    )


def _bare(site: Site) -> Node:
    return site.node.model_copy(update={"environment": {}})


RULES = {
    "GLOO_SOCKET_IFNAME": _one_interface,
    "TP_SOCKET_IFNAME": _one_interface,
    "NCCL_SOCKET_IFNAME": _nccl_interfaces,
    "NCCL_IB_HCA": _hca,
    "NCCL_IB_GID_INDEX": _gid_index,
    "UCX_NET_DEVICES": _devices,
}
