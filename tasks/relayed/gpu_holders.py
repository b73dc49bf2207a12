"""Who holds GPU memory on a node, printed as one JSON document.

Relayed to the node; standard library of Python 3.8 only. It changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

GPU_FIELDS = ("index", "uuid", "memory.total", "memory.used", "memory.free", "mig.mode.current")
PLAIN_FIELDS = GPU_FIELDS[:2]
ROW_FIELDS = ("gpu_uuid", "pid", "process_name", "used_memory")
# A name may hold anything, commas too; the other columns hold no comma.
ROW = re.compile(r"([^,]+), (\d+), (.*), ([^,]*)")
NOBODY = re.compile(r"no running \w*\s*processes found", re.I)
NUMBER = re.compile(r"(\d+)(?: MiB)?")
# A login without a shell may lack these, where some drivers put nvidia-smi.
PATH = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
LARGEST = 5


def read(*parts: str) -> str:
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


# --- nvidia-smi --------------------------------------------------------------------------------


def smi(query: str, fields: tuple[str, ...], timeout: float) -> tuple[str, str, int]:
    """(what it printed, what went wrong, its exit code)."""
    found = shutil.which("nvidia-smi", path=PATH)
    if not found:
        return "", "nvidia-smi is not installed", 127
    argv = (found, f"--query-{query}={','.join(fields)}", "--format=csv,noheader,nounits")
    pipe = subprocess.PIPE
    asked = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)
    try:
        out, err = asked.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # Not waited for: a process that hangs in the driver does not even die of SIGKILL.
        asked.kill()
        return "", f"nvidia-smi gave no answer within {timeout:g} s", -9
    text = out.decode(errors="replace").strip()
    if asked.returncode:
        said = err.decode(errors="replace").strip() or text
        return "", f"nvidia-smi: exit code {asked.returncode}: {said}", asked.returncode
    return text, "", 0


def number(text: str) -> int | None:
    """[N/A], Not Supported and their like are no number; they are never 0."""
    found = NUMBER.fullmatch(text.strip())
    return int(found.group(1)) if found else None


def rows(text: str) -> tuple[list[dict[str, Any]], str]:
    """One for each process and GPU; and the first line that is no row."""
    found, odd = [], ""
    for line in text.splitlines():
        row = ROW.fullmatch(line.strip())
        if row:
            gpu, pid, name, used = row.groups()
            found.append({"gpu": gpu, "pid": int(pid), "name": name, "used_mib": number(used)})
        elif line.strip() and not NOBODY.search(line):
            odd = odd or f"nvidia-smi: no row: {line.strip()[:200]}"
    return found, odd


def gpus(text: str, fields: tuple[str, ...]) -> tuple[list[dict[str, Any]], str]:
    found, odd = [], ""
    for line in text.splitlines():
        cells = dict(zip(fields, line.split(", ")))  # noqa: B905 - Python 3.8 has no strict
        if not cells.get("index", "").isdigit() or "uuid" not in cells:
            odd = odd or f"nvidia-smi: no row: {line.strip()[:200]}"
            continue
        found.append(
            {
                "index": int(cells["index"]),
                "uuid": cells["uuid"],
                "total_mib": number(cells.get("memory.total", "")),
                "used_mib": number(cells.get("memory.used", "")),
                "free_mib": number(cells.get("memory.free", "")),
                "mig": cells.get("mig.mode.current") == "Enabled",
            }
        )
    return found, odd


def ask_gpus(timeout: float) -> tuple[list[dict[str, Any]], str]:
    text, error, code = smi("gpu", GPU_FIELDS, timeout)
    fields: tuple[str, ...] = GPU_FIELDS
    if code > 0 and code != 127:
        # A driver that has no number for the memory may refuse the whole query for it.
        fields = PLAIN_FIELDS
        text, error, _ = smi("gpu", fields, timeout)
    found, odd = gpus(text, fields)
    return found, error or odd


# --- processes ---------------------------------------------------------------------------------


def process(proc: str, pid: int) -> dict[str, Any] | None:
    folder = os.path.join(proc, str(pid))
    # The name, in brackets, may hold anything.
    fields = read(folder, "stat").rpartition(")")[2].split()
    if not fields:
        return None
    return {
        "pid": pid,
        "parent": int(fields[1]),
        "started": int(fields[19]),
        "state": fields[0],
        "user": owner(folder),
        "command": command(proc, pid),
        "name": read(folder, "comm"),
        "cgroup": read(folder, "cgroup"),
        "rss_mib": int(fields[21]) * os.sysconf("SC_PAGE_SIZE") // 2**20,
    }


def command(proc: str, pid: int) -> str:
    return " ".join(word for word in read(proc, str(pid), "cmdline").split("\0") if word)


def owner(path: str) -> str:
    try:
        uid = os.stat(path).st_uid
    except OSError:
        return ""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def chain(proc: str, pid: int) -> Iterator[dict[str, Any]]:
    """A process and those that started it, up to but without the first of all."""
    seen: set[int] = set()
    while pid > 1 and pid not in seen:
        seen.add(pid)
        found = process(proc, pid)
        if found is None:
            return
        yield found
        pid = found["parent"]


def pids(proc: str) -> list[int]:
    return sorted(int(name) for name in names(proc) if name.isdigit())


def openers(proc: str, device: str) -> list[int]:
    """Who has a device of that name open; of other users' processes only root sees it."""
    return [pid for pid in pids(proc) if opens(os.path.join(proc, str(pid), "fd"), device)]


def opens(folder: str, prefix: str) -> bool:
    for name in names(folder):
        with contextlib.suppress(OSError):
            if os.readlink(os.path.join(folder, name)).startswith(prefix):
                return True
    return False


def largest(proc: str) -> list[int]:
    sizes = {}
    for pid in pids(proc):
        words = read(proc, str(pid), "statm").split()
        if words:
            sizes[pid] = int(words[1])
    return sorted(sizes, key=lambda pid: -sizes[pid])[:LARGEST]


def alike(proc: str, commands: list[str]) -> list[int]:
    """The processes that run one of these commands."""
    return [pid for pid in pids(proc) if commands and command(proc, pid) in commands]


def memory(proc: str) -> dict[str, int]:
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB", read(proc, "meminfo"), re.M))
    keys = {"total": "MemTotal", "free": "MemFree", "available": "MemAvailable"}
    return {f"{key}_mib": int(found.get(name, 0)) // 1024 for key, name in keys.items()}


# --- units -------------------------------------------------------------------------------------


def units(text: str, timeout: float) -> dict[str, str]:
    """What systemd does when a unit that these cgroups name ends, such as always."""
    wanted = sorted(set(re.findall(r"/([^/\n]+\.(?:service|scope))(?=/|$)", text, re.M)))
    found = shutil.which("systemctl", path=PATH)
    if not wanted or not found:
        return {}
    argv = [found, "--no-ask-password", "show", "--property=Id,Restart", "--", *wanted]
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return {}
    blocks = done.stdout.decode(errors="replace").split("\n\n")
    told = [dict(line.partition("=")[::2] for line in block.splitlines()) for block in blocks]
    return {each["Id"]: each.get("Restart", "") for each in told if each.get("Id")}


# --- all of it ---------------------------------------------------------------------------------


def look(wanted: dict[str, Any]) -> dict[str, Any]:
    proc, timeout = wanted.get("proc", "/proc"), wanted.get("timeout", 10)
    found_gpus, gpus_error = ask_gpus(timeout)
    text, rows_error, _ = smi("compute-apps", ROW_FIELDS, timeout)
    found, odd = rows(text)
    own = [each["pid"] for each in chain(proc, os.getpid())]
    devices = openers(proc, wanted.get("devices", "/dev/nvidia"))
    most = largest(proc)
    processes = {each["pid"]: each for row in found for each in chain(proc, row["pid"])}
    same = alike(proc, wanted.get("commands", []))
    for pid in {*devices, *most, *same, *wanted.get("also", [])} - set(processes):
        processes.update((each["pid"], each) for each in chain(proc, pid))
    cgroups = "\n".join(each["cgroup"] for each in processes.values())
    return {
        "user": owner(f"/proc/{os.getpid()}"),
        "uid": os.getuid(),
        "home": os.path.expanduser("~"),
        "own": own,
        "own_cgroup": read(proc, "self/cgroup"),
        "gpus": found_gpus,
        "gpus_error": gpus_error,
        "rows": found,
        "rows_error": rows_error or odd,
        "memory": memory(proc),
        "ticks": int(float(read(proc, "uptime").split()[0]) * os.sysconf("SC_CLK_TCK")),
        "processes": list(processes.values()),
        "openers": devices,
        "largest": most,
        "units": units(cgroups, timeout),
    }


def main(_program: str, wanted: str) -> None:
    print(json.dumps(look(json.loads(wanted))))


if __name__ == "__main__":
    main(*sys.argv[1:])
