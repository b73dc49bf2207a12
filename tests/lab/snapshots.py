"""What stands and runs on the nodes, to be compared before and after."""

import json
from pathlib import Path
from typing import Any

from tests.lab.product import Product, poll

# What belongs to whom on a node: the homes, the models, and where programs leave what they forget.
ROOTS = ("/root", "/home/op", "/models", "/tmp", "/var/tmp", "/dev/shm")
PROGRAM = """
import hashlib, json, os, subprocess, sys

def docker(*words):
    said = subprocess.run(("docker", *words), stdout=subprocess.PIPE, check=True).stdout.decode()
    return sorted(said.splitlines())

def entry(path):
    stat = os.lstat(path)
    kept = [oct(stat.st_mode), stat.st_uid, stat.st_gid, stat.st_mtime_ns]
    if os.path.islink(path):
        return [*kept, os.readlink(path)]
    if not os.path.isfile(path):
        return kept
    with open(path, "rb") as file:
        return [*kept, stat.st_size, hashlib.sha256(file.read()).hexdigest()]

files = {}
for root in sys.argv[1:]:
    # Not the root itself: its time changes with each `docker exec`, which has a file in /tmp.
    for folder, folders, names in os.walk(root):
        for name in folders + names:
            path = os.path.join(folder, name)
            files[path] = entry(path)
ids = docker("ps", "--all", "--quiet", "--no-trunc")
state = "{{.Name}} {{.Id}} {{.State.Status}} {{.State.StartedAt}} {{.RestartCount}}"
tagged = "{{.Repository}}:{{.Tag}} {{.ID}}"
print(json.dumps({
    "files": files,
    "containers": docker("inspect", "--format", state, *ids) if ids else [],
    "images": docker("images", "--all", "--no-trunc", "--format", tagged),
    "volumes": docker("volume", "ls", "--quiet"),
}))
"""
Snapshot = dict[str, dict[str, Any]]


def take(product: Product) -> Snapshot:
    """Files with their content and times, docker's objects and processes, by node."""
    poll(lambda: not product.of_runs())
    return {name: _of_node(product, name) for name in product.nodes}


def _of_node(product: Product, name: str) -> dict[str, Any]:
    poll(lambda: not sessions(product, name))
    said = product.on(name, f"exec python3 - {' '.join(ROOTS)}", stdin=PROGRAM.encode())
    return {**json.loads(said), "processes": sorted(processes(product, name))}


def sessions(product: Product, name: str) -> list[str]:
    """Who is logged in."""
    return [line for line in processes(product, name) if "sshd: " in line and "@" in line]


def processes(product: Product, name: str) -> set[str]:
    """Process and command line; also those in containers."""
    found = set()
    for pid in product.pids(name):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
        except OSError:
            continue
        if words:
            found.add(f"{pid} {words}".replace("\0", " ").strip())
    return found


def differences(before: Snapshot, after: Snapshot) -> list[str]:
    """One line for each thing that is not as it was."""
    return [
        f"{name}: {what}: {line}"
        for name in sorted({*before, *after})
        for what in ("files", "containers", "images", "volumes", "processes")
        for line in _unlike(before[name][what], after[name][what])
    ]


def _unlike(before: Any, after: Any) -> list[str]:
    if isinstance(before, dict):
        before = {f"{path} {kept}" for path, kept in before.items()}
        after = {f"{path} {kept}" for path, kept in after.items()}
    gone, new = set(before) - set(after), set(after) - set(before)
    return [*(f"- {line}" for line in sorted(gone)), *(f"+ {line}" for line in sorted(new))]
