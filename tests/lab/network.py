"""The lab's wires: namespaces, bridges in a switch of their own, and the cables between them."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

from tests.lab.command import run
from tests.lab.errors import LabError
from tests.lab.layout import (
    CONTROL_ADDRESS,
    CONTROL_INTERFACE,
    FABRIC_GATEWAY,
    HEAD_ADDRESS,
    MANAGEMENT_GATEWAY,
    MANAGEMENT_INTERFACE,
    Lab,
    Node,
    Shape,
    nodes,
)

NAMESPACES = Path("/run/netns")
FABRIC_MTU = 9000
LINK_SECONDS = 10


def path(lab: Lab, who: str) -> Path:
    return NAMESPACES / lab.namespace(who)


def inside(lab: Lab, who: str) -> list[str]:
    """The prefix that runs a command in a namespace; the file system stays the host's.

    Not `ip netns exec`: it mounts a /sys of its own and so hides the control groups from dockerd.
    """
    return ["nsenter", f"--net={path(lab, who)}"]


def members(shape: Shape) -> list[str]:
    return ["switch", "control", *(node.name for node in nodes(shape))]


def is_up(lab: Lab, shape: Shape) -> bool:
    return all(is_mounted(path(lab, who)) for who in members(shape)) and marker(lab).exists()


def marker(lab: Lab) -> Path:
    """Written once all cables are in: namespaces alone may stem from an interrupted `up`."""
    return lab.folder / "network-complete"


def build(lab: Lab, shape: Shape) -> None:
    """Everything is made inside the lab's namespaces: the host never has an address or a link."""
    for who in members(shape):
        run(["ip", "netns", "add", lab.namespace(who)])
    _batch(lab, "switch", switch_lines(lab, shape))
    _batch(lab, "control", control_lines())
    for node in nodes(shape):
        _batch(lab, node.name, node_lines(node))
    for who in members(shape):
        # A new namespace inherits the host's setting; nobody here may forward for the control.
        run([*inside(lab, who), "sh", "-c", "echo 0 > /proc/sys/net/ipv4/ip_forward"])
    if shape.fabric_rate:
        limit(lab, shape, shape.fabric_rate)
    marker(lab).touch()


def switch_lines(lab: Lab, shape: Shape) -> Iterator[str]:
    yield "link set lo up"
    yield "link add management type bridge"
    yield f"link add fabric mtu {FABRIC_MTU} type bridge"
    yield from _cable("to-control", CONTROL_INTERFACE, lab.namespace("control"), "management")
    for node in nodes(shape):
        namespace = lab.namespace(node.name)
        if node.is_head:
            yield from _cable(management_port(), MANAGEMENT_INTERFACE, namespace, "management")
        yield from _cable(fabric_port(node), node.fabric_interface, namespace, "fabric", FABRIC_MTU)
    yield f"addr add {MANAGEMENT_GATEWAY}/24 dev management"
    yield f"addr add {FABRIC_GATEWAY}/24 dev fabric"
    yield "link set management up"
    yield "link set fabric up"


def control_lines() -> Iterator[str]:
    yield "link set lo up"
    yield f"link set {CONTROL_INTERFACE} up"
    # A peer address: the only route of the control is the one to the head.
    yield f"addr add {CONTROL_ADDRESS} peer {HEAD_ADDRESS}/32 dev {CONTROL_INTERFACE}"


def node_lines(node: Node) -> Iterator[str]:
    yield "link set lo up"
    yield f"link set {node.fabric_interface} up"
    yield f"addr add {node.fabric_address}/24 dev {node.fabric_interface}"
    if node.is_head:
        yield f"link set {MANAGEMENT_INTERFACE} up"
        yield f"addr add {HEAD_ADDRESS}/24 dev {MANAGEMENT_INTERFACE}"
    # It leads nowhere, but programs that ask the kernel for "my address" get the one on its side:
    # on the head the wrong one, as on real clusters.
    gateway = MANAGEMENT_GATEWAY if node.is_head else FABRIC_GATEWAY
    yield f"route add default via {gateway}"


def fabric_port(node: Node) -> str:
    return f"fab-{node.name}"


def management_port() -> str:
    return "mgmt-head"


def limit(lab: Lab, shape: Shape, rate: str) -> None:
    """Each port limits what it sends to its node, so that both directions are limited."""
    for node in nodes(shape):
        shaper = f"tbf rate {rate} burst 1mb latency 50ms".split()
        port = ["dev", fabric_port(node), "root", *shaper]
        run(["tc", "-n", lab.namespace("switch"), "qdisc", "add", *port])


def set_fabric_link(lab: Lab, node: Node, *, up: bool) -> None:
    """Pulls or plugs the cable at the switch: the node sees its carrier go and come."""
    _set_ports(lab, [fabric_port(node)], up=up)


def set_all_links(lab: Lab, node: Node, *, up: bool) -> None:
    ports = [fabric_port(node), *([management_port()] if node.is_head else [])]
    _set_ports(lab, ports, up=up)


def fabric_link_is_up(lab: Lab, node: Node) -> bool:
    return _has_carrier(lab.namespace("switch"), fabric_port(node))


def remove(lab: Lab) -> None:
    """Takes every namespace of this lab away, and with them their links."""
    for file in namespace_files(lab):
        if is_mounted(file):
            _unmount(file)
        file.unlink()
    marker(lab).unlink(missing_ok=True)


def namespace_files(lab: Lab) -> list[Path]:
    who = "(switch|control|head|worker[0-9]+)"
    pattern = re.compile(f"{re.escape(lab.namespace(''))}{who}")
    return [file for file in _listed() if pattern.fullmatch(file.name)]


def lab_names() -> set[str]:
    """The labs that have a namespace on this machine."""
    pattern = re.compile(r"sparkrail-(lab(-[a-z0-9]+)*)-(switch|control|head|worker[0-9]+)")
    found = (pattern.fullmatch(file.name) for file in _listed())
    return {match[1] for match in found if match}


def inodes(lab: Lab) -> set[int]:
    return {file.stat().st_ino for file in namespace_files(lab) if is_mounted(file)}


def is_mounted(file: Path) -> bool:
    """Whether a namespace is there; an interrupted `ip netns add` leaves an empty file."""
    try:
        return file.stat().st_dev == Path("/proc/self/ns/net").stat().st_dev
    except OSError:
        return False


def _listed() -> list[Path]:
    return sorted(NAMESPACES.iterdir()) if NAMESPACES.is_dir() else []


def _cable(port: str, interface: str, namespace: str, bridge: str, mtu: int = 1500) -> list[str]:
    return [
        f"link add {port} mtu {mtu} type veth peer name {interface} mtu {mtu} netns {namespace}",
        f"link set {port} master {bridge} up",
    ]


def _batch(lab: Lab, who: str, lines: Iterator[str]) -> None:
    run(["ip", "-n", lab.namespace(who), "-batch", "-"], stdin="\n".join(lines) + "\n")


def _set_ports(lab: Lab, ports: list[str], *, up: bool) -> None:
    switch = lab.namespace("switch")
    for port in ports:
        run(["ip", "-n", switch, "link", "set", port, "up" if up else "down"])
    deadline = time.monotonic() + LINK_SECONDS
    # The kernel tells the other end up to a second later; until then packets are refused there.
    while any(_has_carrier(switch, port) != up for port in ports):
        if time.monotonic() > deadline:
            raise LabError(f"{', '.join(ports)}: no carrier change within {LINK_SECONDS} s")
        time.sleep(0.02)


def _has_carrier(switch: str, port: str) -> bool:
    return " state UP " in run(["ip", "-n", switch, "link", "show", port])


def _unmount(file: Path) -> None:
    run(["umount", "--lazy", str(file)])
