"""What there is on a node, printed as one JSON document: `python3 -IS - ARGUMENTS < facts.py`.

Standard library of Python 3.8 only: it runs on whatever python3 the node has. It writes nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

RUN = b"SPARKRAIL_RUN="
CONTAINER = re.compile(r"docker[-/]([0-9a-f]{64})")
# Newer drivers tell it as "CUDA UMD Version".
CUDA = re.compile(r"CUDA (?:UMD )?Version *: *([0-9.]+)")
UNIT = re.compile(r"/([^/]+\.service)(?:/|$)", re.M)
LISTEN = "0A"
CONFIGS = ("config.json", "tokenizer_config.json", "preprocessor_config.json")
GPU_FIELDS = ("index", "name", "uuid", "driver_version", "memory.total", "memory.free")
IDENTITY_FIELDS = GPU_FIELDS[:4]
HOLDER_FIELDS = ("pid", "process_name", "used_memory")
# A login without a shell may lack these, where `ip` is for an ordinary user.
PATH = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"


def read(*parts: str) -> str:
    """A file of /proc or /sys; they may vanish, and some exist only to fail with EINVAL."""
    try:
        with open(os.path.join(*parts), errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def names(*parts: str) -> list[str]:
    try:
        return sorted(os.listdir(os.path.join(*parts)))
    except OSError:
        return []


class Asked:
    """A program that was started; `answer` waits for what it says, and what went wrong."""

    def __init__(self, *argv: str, timeout: float) -> None:
        self.argv = argv
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout
        self.process: subprocess.Popen[bytes] | None = None
        found = shutil.which(argv[0], path=PATH)
        if found:
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(
                [found, *argv[1:]], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe
            )

    def answer(self) -> tuple[str, str]:
        if self.process is None:
            return "", f"{self.argv[0]} is not installed"
        try:
            out, err = self.process.communicate(timeout=max(0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            # Not waited for: a process that hangs in the driver does not even die of SIGKILL.
            self.process.kill()
            return "", f"{self.argv[0]} gave no answer within {self.timeout:g} s"
        text = out.decode(errors="replace").strip()
        if self.process.returncode:
            said = err.decode(errors="replace").strip() or text
            return "", f"{self.argv[0]}: exit code {self.process.returncode}: {said}"
        return text, ""


# --- network -----------------------------------------------------------------------------------


def interfaces(sys_root: str, asked: Asked) -> tuple[list[dict[str, Any]], str]:
    text, error = asked.answer()
    try:
        rows = json.loads(text) if text else []
    except ValueError:
        return [], f"ip: no JSON: {text[:200]}"
    ports = rdma_ports(sys_root)
    return [interface(sys_root, row, ports) for row in rows if row.get("ifname")], error


def interface(sys_root: str, row: dict[str, Any], ports: list[dict[str, Any]]) -> dict[str, Any]:
    name = row["ifname"]
    # Behind a link that is down there is EINVAL, behind one without a speed -1.
    speed = read(sys_root, "class/net", name, "speed")
    return {
        "name": name,
        "state": row.get("operstate", "UNKNOWN"),
        "mtu": row.get("mtu", 0),
        "speed": int(speed) if speed.isdigit() and speed != "0" else None,
        "addresses": [
            {"address": entry["local"], "prefix": entry["prefixlen"]}
            for entry in row.get("addr_info", [])
            if entry.get("family") == "inet"
        ],
        "rdma": [port for port in ports if name in port["interfaces"]],
    }


def rdma_ports(sys_root: str) -> list[dict[str, Any]]:
    root = os.path.join(sys_root, "class/infiniband")
    return [
        rdma_port(os.path.join(root, device), device, port)
        for device in names(root)
        for port in names(root, device, "ports")
    ]


def rdma_port(root: str, device: str, port: str) -> dict[str, Any]:
    folder = os.path.join(root, "ports", port)
    used_by = set()
    roce_v2 = {}
    for index in names(folder, "gids"):
        address = mapped_ipv4(read(folder, "gids", index))
        used_by.add(read(folder, "gid_attrs/ndevs", index))
        if address and read(folder, "gid_attrs/types", index) == "RoCE v2":
            roce_v2[address] = int(index)
    return {
        "device": device,
        "port": int(port),
        "state": read(folder, "state").rpartition(": ")[2],
        "link_layer": read(folder, "link_layer"),
        "rate": read(folder, "rate"),
        # An InfiniBand port lists no interfaces with its GIDs.
        "interfaces": sorted(used_by - {""}) or names(root, "device/net"),
        "roce_v2": roce_v2,
    }


def mapped_ipv4(gid: str) -> str:
    """The IPv4 address that a GID such as 0000:...:ffff:c0a8:6401 stands for, or nothing."""
    packed = bytes.fromhex(gid.replace(":", "")) if len(gid) == 39 else b""
    return socket.inet_ntoa(packed[12:]) if packed[:12] == bytes(10) + b"\xff\xff" else ""


def listeners(proc: str) -> list[dict[str, Any]]:
    found = []
    for table in ("tcp", "tcp6"):
        for line in read(proc, "net", table).splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN:
                address, _, port = fields[1].partition(":")
                found.append(
                    {
                        "port": int(port, 16),
                        "address": ip_address(address),
                        "uid": int(fields[7]),
                        "inode": fields[9],
                    }
                )
    return found


def ip_address(text: str) -> str:
    """The kernel prints 32-bit words in the machine's byte order."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))


# --- processes ---------------------------------------------------------------------------------


def pids(proc: str) -> list[int]:
    return sorted(int(name) for name in names(proc) if name.isdigit())


def process(proc: str, pid: int) -> dict[str, Any] | None:
    """None when it is gone, also when only its parent has not noticed yet."""
    folder = os.path.join(proc, str(pid))
    # The name, in brackets, may hold anything.
    fields = read(folder, "stat").rpartition(")")[2].split()
    if not fields or fields[0] in "ZX":
        return None
    cgroup = read(folder, "cgroup")
    containers = CONTAINER.findall(cgroup)
    units = UNIT.findall(cgroup)
    words = read(folder, "cmdline").replace("\0", " ").strip()
    return {
        "pid": pid,
        "pgid": int(fields[2]),
        "user": owner(folder),
        "command": words[:200] or f"[{read(folder, 'comm')}]",
        "started": since_boot(proc, int(fields[19])),
        "container": containers[-1] if containers else "",
        "unit": units[-1] if units else "",
    }


def owner(path: str) -> str:
    try:
        uid = os.stat(path).st_uid
    except OSError:
        return ""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def since_boot(proc: str, ticks: int) -> float:
    boot = re.search(r"^btime (\d+)", read(proc, "stat"), re.M)
    return (int(boot.group(1)) if boot else 0) + ticks / os.sysconf("SC_CLK_TCK")


def holders_of(proc: str, inodes: set[str]) -> dict[str, int]:
    """The first process that holds each socket; only root sees those of other users."""
    found: dict[str, int] = {}
    for pid in pids(proc):
        folder = os.path.join(proc, str(pid), "fd")
        for name in names(folder):
            with contextlib.suppress(OSError):
                target = os.readlink(os.path.join(folder, name))
                if target.startswith("socket:[") and target[8:-1] in inodes:
                    found.setdefault(target[8:-1], pid)
    return found


def ports(proc: str) -> list[dict[str, Any]]:
    found = listeners(proc)
    held_by = holders_of(proc, {listener["inode"] for listener in found})
    for listener in found:
        pid = held_by.get(listener.pop("inode"))
        listener["owner"] = process(proc, pid) if pid else None
    return found


def leftovers(proc: str, own_group: int) -> Iterator[dict[str, Any]]:
    """Processes that a run of ours started, without this one."""
    for pid in pids(proc):
        try:
            with open(os.path.join(proc, str(pid), "environ"), "rb") as file:
                marks = [word for word in file.read().split(b"\0") if word.startswith(RUN)]
        except OSError:
            continue
        found = process(proc, pid) if marks else None
        if found and found["pgid"] != own_group:
            yield {**found, "run": marks[0][len(RUN) :].decode(errors="replace")}


# --- GPUs --------------------------------------------------------------------------------------


def smi(query: str, fields: tuple[str, ...], timeout: float) -> Asked:
    words = (f"--query-{query}={','.join(fields)}", "--format=csv,noheader,nounits")
    return Asked("nvidia-smi", *words, timeout=timeout)


def gpus(asked: Asked) -> tuple[list[dict[str, Any]], str]:
    text, error = asked.answer()
    fields: tuple[str, ...] = GPU_FIELDS
    if asked.process and asked.process.returncode:
        # A driver without a number for the memory may refuse the whole query for it.
        fields = IDENTITY_FIELDS
        text, error = smi("gpu", fields, asked.timeout).answer()
    rows = [dict(zip(fields, csv(line, len(fields) - 1, 0))) for line in text.splitlines()]  # noqa: B905 - Python 3.8 has no strict
    return [
        {
            "index": int(row["index"]),
            "name": row["name"],
            "uuid": row.get("uuid", ""),
            "driver": row.get("driver_version", ""),
            "memory_mib": number(row.get("memory.total", "")),
            "free_mib": number(row.get("memory.free", "")),
        }
        for row in rows
        if row["index"].isdigit()
    ], error or ("" if rows else "nvidia-smi lists no GPU")


def cuda(asked: Asked) -> str:
    """The newest CUDA that the driver can serve."""
    found = CUDA.search(asked.answer()[0])
    return found.group(1) if found else ""


def gpu_holders(proc: str, asked: Asked) -> tuple[list[dict[str, Any]], str]:
    text, error = asked.answer()
    found = []
    for line in text.splitlines():
        pid, name, used = csv(line, 1, 1)
        if pid.isdigit():
            found_process = process(proc, int(pid))
            # An ended process that nobody has reaped holds no memory, but is listed for a while.
            if found_process or not os.path.exists(os.path.join(proc, pid)):
                found.append(
                    {
                        "pid": int(pid),
                        "name": name,
                        "used_mib": number(used),
                        "process": found_process,
                    }
                )
    return found, error


def csv(line: str, left: int, right: int) -> list[str]:
    """Split from both ends: a process name may hold commas."""
    head = line.split(", ", left)
    tail = head.pop().rsplit(", ", right)
    return [*head, *tail] + [""] * (left + right + 1 - len(head) - len(tail))


def number(text: str) -> str | None:
    """[N/A], Not Supported and their like are no number; they are never 0."""
    return text if text.isdigit() else None


# --- machine -----------------------------------------------------------------------------------


def memory(proc: str) -> dict[str, Any]:
    rows = dict(re.findall(r"^(\w+):\s+(\d+) kB", read(proc, "meminfo"), re.M))
    keys = {"total": "MemTotal", "free": "MemFree", "available": "MemAvailable"}
    return {key: int(rows.get(name, 0)) * 1024 for key, name in keys.items()}


def disk(path: str) -> dict[str, Any]:
    """The mount that holds a path, which need not exist yet."""
    nearest = path
    while not os.path.exists(nearest):
        nearest = os.path.dirname(nearest)
    found = os.statvfs(nearest)
    return {
        "path": path,
        "nearest": nearest,
        "writable": os.access(nearest, os.W_OK | os.X_OK),
        "device": os.stat(nearest).st_dev,
        "total": found.f_blocks * found.f_frsize,
        "free": found.f_bavail * found.f_frsize,
    }


def model(path: str, keys: list[str]) -> dict[str, Any]:
    """What a model's configs say."""
    return {
        "config": config(path, keys),
        "own_code": [name for name in CONFIGS if "auto_map" in document(path, name)],
    }


def config(path: str, keys: list[str]) -> dict[str, Any]:
    """These keys of config.json; those of the language part of a model of several."""
    whole = document(path, CONFIGS[0])
    part = whole.get("text_config")
    merged = {**whole, **part} if isinstance(part, dict) else whole
    return {key: merged[key] for key in keys if key in merged}


def document(*parts: str) -> dict[str, Any]:
    try:
        found = json.loads(read(*parts) or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def removes_ipc(etc: str) -> bool:
    """Whether logind clears /dev/shm of a user who has logged out, which is its default."""
    folder = os.path.join(etc, "systemd/logind.conf.d")
    files = [os.path.join(etc, "systemd/logind.conf")]
    files += [os.path.join(folder, name) for name in names(folder) if name.endswith(".conf")]
    said = [
        word for file in files for word in re.findall(r"^ *RemoveIPC *= *(\w+)", read(file), re.M)
    ]
    return not said or said[-1].lower() in ("yes", "true", "on", "1")


def docker_socket(path: str = "/var/run/docker.sock") -> str:
    if not os.path.exists(path):
        return "absent"
    return "open" if os.access(path, os.R_OK | os.W_OK) else "denied"


def facts(wanted: dict[str, Any]) -> dict[str, Any]:
    proc = wanted.get("proc", "/proc")
    sys_root = wanted.get("sys", "/sys")
    timeout = wanted.get("timeout", 10)
    addresses = Asked("ip", "-j", "addr", timeout=timeout)
    devices = smi("gpu", GPU_FIELDS, timeout)
    holders = smi("compute-apps", HOLDER_FIELDS, timeout)
    table = Asked("nvidia-smi", timeout=timeout)
    kernel = os.uname()
    user = pwd.getpwuid(os.getuid())
    result: dict[str, Any] = {
        "hostname": kernel.nodename,
        "user": user.pw_name,
        "uid": user.pw_uid,
        "home": user.pw_dir,
        "boot_id": read(proc, "sys/kernel/random/boot_id"),
        "architecture": kernel.machine,
        "kernel": kernel.release,
        "python": sys.version.split()[0],
        "memory": memory(proc),
        "disks": [disk(path) for path in wanted.get("paths", [])],
        "model": model(wanted["model"], wanted.get("config", [])),
        "programs": {name: shutil.which(name) or "" for name in wanted.get("programs", [])},
        "docker_socket": docker_socket(),
        "removes_ipc": removes_ipc(wanted.get("etc", "/etc")),
        "rdma_devices": names(sys_root, "class/infiniband"),
        "ports": ports(proc),
        "leftovers": list(leftovers(proc, os.getpgrp())),
    }
    result["interfaces"], result["interfaces_error"] = interfaces(sys_root, addresses)
    result["gpus"], result["gpus_error"] = gpus(devices)
    result["cuda"] = cuda(table)
    result["gpu_holders"], result["gpu_holders_error"] = gpu_holders(proc, holders)
    # Last, so that it is as fresh as can be where it is compared with other clocks.
    return {**result, "time": time.time()}


def main(arguments: list[str]) -> None:
    print(json.dumps(facts(json.loads(arguments[0]))))


if __name__ == "__main__":
    main(sys.argv[1:])
