"""What can break on a node, and how it is mended."""

from collections.abc import Callable, Iterable

from tests.lab import cgroups, network, node
from tests.lab.errors import LabError
from tests.lab.layout import Lab, Node

Fault = Callable[[Lab, Node], None]

FILLER = "/models/.filled-by-the-lab"
FILL = f"""
fallocate --length "$(df --output=avail --block-size=1 /models | tail -n 1)" {FILLER} || true
dd if=/dev/zero of={FILLER}.rest bs=64K 2>/dev/null || true
sync -f /models
"""
# Only the listener: open sessions go on, as with `systemctl stop ssh`.
STOP_SSHD = """
test -e /run/sshd.pid || exit 0
pid=$(cat /run/sshd.pid)
kill "$pid" 2>/dev/null || exit 0
while kill -0 "$pid" 2>/dev/null; do sleep 0.02; done
"""
START_SSHD = """
kill -0 "$(cat /run/sshd.pid 2>/dev/null)" 2>/dev/null && exit 0
exec /usr/sbin/sshd -E /var/log/sshd.log
"""


def link_down(lab: Lab, where: Node) -> None:
    network.set_fabric_link(lab, where, up=False)


def link_up(lab: Lab, where: Node) -> None:
    network.set_fabric_link(lab, where, up=True)


def stop_sshd(lab: Lab, where: Node) -> None:
    node.execute(lab, where, "sh", "-c", STOP_SSHD)


def start_sshd(lab: Lab, where: Node) -> None:
    node.execute(lab, where, "sh", "-c", START_SSHD)
    node.wait_sshd(lab, where)


def freeze(lab: Lab, where: Node) -> None:
    if node.init(lab, where) is None:
        raise LabError(f"{where.name} is down")
    cgroups.freeze(node.group(lab, where))


def thaw(lab: Lab, where: Node) -> None:
    cgroups.thaw(node.group(lab, where))


def fill_disk(lab: Lab, where: Node) -> None:
    """Fills /models, which has a disk image of its own: never the host's disk."""
    node.execute(lab, where, "sh", "-c", FILL)


def free_disk(lab: Lab, where: Node) -> None:
    node.execute(lab, where, "rm", "-f", FILLER, f"{FILLER}.rest")


def hold_gpu(lab: Lab, where: Node, mib: int) -> str:
    """The pid, on the node, of the process that nvidia-smi now lists."""
    return node.execute(lab, where, "/usr/local/bin/hold-gpu", str(mib)).strip()


def release_gpu(lab: Lab, where: Node) -> None:
    node.execute(lab, where, "/usr/local/bin/hold-gpu", "release")


# `kill`, `boot` and `hold-gpu` need more than the node: see `tests.lab.lab.break_node`.
SIMPLE: dict[str, Fault] = {
    "link-down": link_down,
    "link-up": link_up,
    "stop-sshd": stop_sshd,
    "start-sshd": start_sshd,
    "freeze": freeze,
    "thaw": thaw,
    "kill": node.power_off,
    "fill-disk": fill_disk,
    "free-disk": free_disk,
    "release-gpu": release_gpu,
}
NAMES = (*SIMPLE, "boot", "hold-gpu")


def mend(lab: Lab, where: Node, wanted: Iterable[str] = ("thaw", "link-up", "start-sshd")) -> None:
    """Takes back what keeps a node that is up from being reached."""
    for name in wanted:
        SIMPLE[name](lab, where)
