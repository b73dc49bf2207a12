"""A node's first process: starts the services named in argv, reaps, and stops all on SIGTERM.

It is copied onto the node as /usr/local/sbin/node-init, so it imports nothing of ours.
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

STOP_SECONDS = 15
CGROUP_ROOT = Path("/sys/fs/cgroup")


def start_sshd() -> None:
    Path("/run/sshd").mkdir(exist_ok=True)
    subprocess.Popen(["/usr/sbin/sshd", "-D", "-E", "/var/log/sshd.log"], start_new_session=True)


def start_dockerd() -> None:
    # The node's network is the lab's business: containers here use the host's, that is the node's.
    network = ["--bridge=none", "--iptables=false", "--ip-forward=false"]
    with Path("/var/log/dockerd.log").open("ab") as log:
        subprocess.Popen(
            ["/usr/sbin/dockerd", *network, "--exec-opt=native.cgroupdriver=cgroupfs"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


SERVICES = {"sshd": start_sshd, "dockerd": start_dockerd}


def delegate_cgroup() -> None:
    """On cgroup v2 a group with processes of its own cannot give controllers to its children."""
    if not (CGROUP_ROOT / "cgroup.controllers").exists():
        return
    leaf = CGROUP_ROOT / "init"
    leaf.mkdir(exist_ok=True)
    for pid in (CGROUP_ROOT / "cgroup.procs").read_text().split():
        with contextlib.suppress(OSError):
            (leaf / "cgroup.procs").write_text(pid)
    for controller in (CGROUP_ROOT / "cgroup.controllers").read_text().split():
        with contextlib.suppress(OSError):
            (CGROUP_ROOT / "cgroup.subtree_control").write_text(f"+{controller}")


def reap() -> None:
    while True:
        try:
            os.wait()
        except ChildProcessError:
            signal.pause()


def stop_all() -> None:
    """Asks every process to end; what is left after that ends with us, as on a power-off."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
    signal.alarm(STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGTERM)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def main(services: list[str]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    delegate_cgroup()
    for service in services:
        SERVICES[service]()
    try:
        reap()
    except SystemExit:
        stop_all()


if __name__ == "__main__":
    main(sys.argv[1:])
