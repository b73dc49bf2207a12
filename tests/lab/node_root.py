"""Run in a node's fresh namespaces: builds its root, moves into it and becomes its init.

Started by path with the host's python, so it imports nothing of ours.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

INIT = "/usr/local/sbin/node-init"
# name: (mode, major, minor)
DEVICES = {
    "null": (0o666, 1, 3),
    "zero": (0o666, 1, 5),
    "full": (0o666, 1, 7),
    "random": (0o666, 1, 8),
    "urandom": (0o666, 1, 9),
    "tty": (0o666, 5, 0),
}
DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}


def mount(kind: str, options: str, source: str, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", kind, "-o", options, source, target], check=True)


def bind(source: str, target: Path) -> None:
    if not target.exists():
        target.mkdir(parents=True)
    subprocess.run(["mount", "--bind", source, target], check=True)


def remember_init(file: str) -> None:
    """Our pid as the host counts; it can be seen only until the node's own /proc is mounted."""
    stat = Path("/proc/self/stat").read_text()
    started = stat.rpartition(")")[2].split()[19]
    record = {"pid": int(Path("/proc/self").readlink().name), "started": int(started)}
    aside = Path(f"{file}.new")
    aside.write_text(json.dumps(record))
    aside.rename(file)


def mount_devices(root: Path) -> None:
    devices = root / "dev"
    mount("tmpfs", "mode=755", "dev", devices)
    for name, (mode, major, minor) in DEVICES.items():
        os.mknod(devices / name, 0o020000 | mode, os.makedev(major, minor))
        (devices / name).chmod(mode)
    for name, target in DEVICE_LINKS.items():
        (devices / name).symlink_to(target)
    mount("devpts", "newinstance,ptmxmode=0666,mode=620,gid=5", "devpts", devices / "pts")
    mount("tmpfs", "nosuid,nodev,mode=1777", "shm", devices / "shm")
    mount("mqueue", "nosuid,nodev", "mqueue", devices / "mqueue")


def mount_cgroups(root: Path, hierarchies: list[dict[str, str]]) -> None:
    """The same hierarchies as on the host, each seen from the node's own group downwards."""
    top = "/sys/fs/cgroup"
    if all(hierarchy["mountpoint"] != top for hierarchy in hierarchies):
        mount("tmpfs", "mode=755", "cgroup", root / top.lstrip("/"))
    for hierarchy in hierarchies:
        target = root / hierarchy["mountpoint"].lstrip("/")
        mount(hierarchy["kind"], hierarchy["options"], "cgroup", target)


def mount_root(root: Path, config: dict[str, Any]) -> None:
    layers = f"lowerdir={config['base']},upperdir={config['upper']},workdir={config['work']}"
    mount("overlay", layers, "overlay", root)
    mount("proc", "nosuid,nodev,noexec", "proc", root / "proc")
    # All nodes share the host's kernel, and with it its boot id.
    bind(config["boot_id"], root / "proc/sys/kernel/random/boot_id")
    mount("sysfs", "nosuid,nodev,noexec", "sysfs", root / "sys")
    mount_cgroups(root, config["hierarchies"])
    mount_devices(root)
    mount("tmpfs", "nosuid,nodev,mode=755", "run", root / "run")
    mount("tmpfs", "nosuid,nodev,mode=1777", "tmp", root / "tmp")
    bind(config["docker_data"], root / "var/lib/docker")
    # The kernel gives the loop device back when the last mount of it is gone.
    mount("ext4", "loop", config["models"], root / "models")


def main(config: dict[str, Any]) -> None:
    os.umask(0o022)
    remember_init(config["init"])
    socket.sethostname(config["hostname"])
    root = Path(config["root"])
    mount_root(root, config)
    os.chdir(root)
    subprocess.run(["pivot_root", ".", "mnt"], check=True)
    os.chdir("/")
    subprocess.run(["/usr/bin/umount", "--lazy", "/mnt"], check=True)
    environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    os.execve("/usr/bin/python3", ["init", "-I", "-S", INIT, *config["services"]], environment)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
