"""One node: booted, powered off, entered, and asked whether it is ready."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from tests.lab import cgroups, network
from tests.lab.command import run
from tests.lab.errors import LabError, log_tail
from tests.lab.layout import Lab, Node, Shape
from tests.lab.processes import Process, end_all, recall

PYTHON = str(Path(sys.executable).resolve())
HERE = Path(__file__).parent
MODELS_MIB = 3072
BOOT_SECONDS = 20
SSHD_SECONDS = 30
DOCKERD_SECONDS = 90
POLL_SECONDS = 0.05


def group(lab: Lab, node: Node) -> str:
    return f"{lab.cgroup}/{node.name}"


def init(lab: Lab, node: Node) -> Process | None:
    """The node's first process as the host sees it; None when the node is down."""
    return recall(lab.places(node).init)


def is_frozen(lab: Lab, node: Node) -> bool:
    return cgroups.frozen(group(lab, node))


def enter(lab: Lab, node: Node) -> list[str]:
    """The prefix that runs a command in all of the node's namespaces."""
    process = init(lab, node)
    if process is None:
        raise LabError(f"{node.name} is down; `break {node.name} boot` boots it")
    if is_frozen(lab, node):
        raise LabError(f"{node.name} is frozen; `break {node.name} thaw` thaws it")
    kinds = ("mount", "uts", "ipc", "net", "pid", "cgroup")
    namespaces = ["nsenter", f"--target={process.pid}", *(f"--{kind}" for kind in kinds)]
    home, path = "HOME=/root", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    terminal = f"TERM={os.environ.get('TERM', 'dumb')}"
    clean = ["env", "--ignore-environment", home, path, "LANG=C.UTF-8", "USER=root", terminal]
    return [*cgroups.joining(group(lab, node)), *namespaces, *clean]


def execute(lab: Lab, node: Node, *command: str, timeout: float = 120) -> str:
    return run([*enter(lab, node), *command], timeout=timeout)


def boot(lab: Lab, shape: Shape, node: Node, base: Path) -> None:
    """Starts the node as if its power had come back: what is on its disks stays."""
    power_off(lab, node)
    places = lab.places(node)
    for folder in (places.upper, places.work, places.root, places.docker):
        folder.mkdir(parents=True, exist_ok=True)
    if not places.models.exists():
        _make_disk(places.models)
    places.boot_id.write_text(Path("/proc/sys/kernel/random/uuid").read_text())
    cgroups.prepare(group(lab, node))
    network.set_all_links(lab, node, up=True)
    config = {
        "hostname": node.name,
        "base": str(base),
        "upper": str(places.upper),
        "work": str(places.work),
        "root": str(places.root),
        "docker_data": str(places.docker),
        "models": str(places.models),
        "boot_id": str(places.boot_id),
        "init": str(places.init),
        "services": ["sshd", *(["dockerd"] if shape.docker else [])],
        "hierarchies": [
            {**asdict(hierarchy), "mountpoint": str(hierarchy.mountpoint)}
            for hierarchy in cgroups.hierarchies()
        ],
    }
    # The supervisor stays outside of the node's control group: on cgroup v2, a group whose children
    # are to have controllers must hold no process itself.
    supervisor = [*network.inside(lab, node.name), "unshare", "--pid", "--fork", "--kill-child"]
    isolated = ["unshare", "--mount", "--uts", "--ipc", "--cgroup"]
    program = [PYTHON, "-I", "-S", str(HERE / "node_root.py"), json.dumps(config)]
    with places.boot_log.open("wb") as log:
        machine = subprocess.Popen(
            [*supervisor, *cgroups.joining(group(lab, node)), *isolated, *program],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
        )
    _wait(
        lambda: init(lab, node) is not None,
        lambda: machine.poll() is not None,
        f"{node.name} did not boot",
        BOOT_SECONDS,
        places.boot_log,
    )


def power_off(lab: Lab, node: Node) -> None:
    """Ends all of the node at once, as when its power fails; the cables go dead with it."""
    if network.is_mounted(network.path(lab, "switch")):
        network.set_all_links(lab, node, up=False)
    process = init(lab, node)
    if process:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    # A frozen process ends only once it is thawed.
    cgroups.thaw_all(group(lab, node))
    end_all(lambda: cgroups.pids(group(lab, node)))
    cgroups.remove(group(lab, node))
    lab.places(node).init.unlink(missing_ok=True)


def shut_down(lab: Lab, node: Node) -> None:
    """Ends the node the orderly way, so that its dockerd closes its files."""
    process = init(lab, node)
    if process:
        os.kill(process.pid, signal.SIGTERM)
        log = lab.places(node).boot_log
        _wait(lambda: not process.alive, _never, f"{node.name} did not shut down", 30, log)
    power_off(lab, node)


def wait_ready(lab: Lab, shape: Shape, node: Node) -> None:
    """Returns when sshd and dockerd answer on this node."""
    wait_sshd(lab, node)
    if shape.docker:
        what = f"dockerd on {node.name} does not answer"
        _wait_up(lab, node, dockerd_answers, what, DOCKERD_SECONDS, "dockerd")


def wait_sshd(lab: Lab, node: Node) -> None:
    what = f"sshd on {node.name} does not answer"
    _wait_up(lab, node, sshd_answers, what, SSHD_SECONDS, "sshd")


def sshd_answers(lab: Lab, node: Node) -> bool:
    """Whether the node greets on port 22, asked from its own network namespace."""
    dial = [PYTHON, "-I", "-S", str(HERE / "dial.py"), "127.0.0.1", "22"]
    try:
        done = subprocess.run(
            [*network.inside(lab, node.name), *dial],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=2,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.stdout.startswith(b"SSH-")


def dockerd_answers(lab: Lab, node: Node) -> bool:
    process = init(lab, node)
    if process is None:
        return False
    with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):
        connection.settimeout(2)
        connection.connect(f"/proc/{process.pid}/root/run/docker.sock")
        connection.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
        return connection.recv(32).startswith(b"HTTP/1.0 200 ")
    return False


def _make_disk(image: Path) -> None:
    aside = image.with_suffix(".new")
    with aside.open("wb") as file:
        file.truncate(MODELS_MIB * 1024 * 1024)
    run(["mkfs.ext4", "-q", "-F", "-m", "0", "-E", "root_owner=0:0", str(aside)])
    aside.rename(image)


def _wait_up(
    lab: Lab,
    node: Node,
    answers: Callable[[Lab, Node], bool],
    failure: str,
    seconds: float,
    service: str,
) -> None:
    _wait(
        lambda: answers(lab, node),
        lambda: init(lab, node) is None,
        failure,
        seconds,
        lab.places(node).log(service),
    )


def _never() -> bool:
    return False


def _wait(
    done: Callable[[], bool],
    hopeless: Callable[[], bool],
    failure: str,
    seconds: float,
    log: Path,
) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if hopeless():
            raise LabError(
                f"{failure}: it ended\n{log_tail(log)}\n{log_tail(log.parent / 'boot.log')}"
            )
        if time.monotonic() > deadline:
            raise LabError(f"{failure} within {seconds:.0f} s\n{log_tail(log)}")
        time.sleep(POLL_SECONDS)
