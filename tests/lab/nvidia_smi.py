#!/usr/bin/python3 -IS
"""The lab's one pretence: nvidia-smi as a GB10 prints it, with real processes as holders.

It is copied onto the node as /usr/bin/nvidia-smi, so it imports nothing of ours. A holder is a file
/run/gpu-holders/PID with {"mib": .., "started": ..}; files of ended processes do not count. With a
number of MiB in /run/gpu-memory it prints a GPU with memory of its own, of which they hold a part;
in /run/unified-memory it has that much unified memory: what is left stands in /run/meminfo.
"""

import hashlib
import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

HOLDERS = Path("/run/gpu-holders")
OWN_MEMORY = Path("/run/gpu-memory")
UNIFIED_MEMORY = Path("/run/unified-memory")
MEMINFO = Path("/run/meminfo")
VERSION = "580.95.05"
CUDA = "13.0"
# Unified memory: the driver has no number of its own for it.
UNKNOWN = "[N/A]"
UNITS = {
    "memory.total": "MiB",
    "memory.used": "MiB",
    "memory.free": "MiB",
    "memory.reserved": "MiB",
    "used_gpu_memory": "MiB",
    "used_memory": "MiB",
    "utilization.gpu": "%",
    "utilization.memory": "%",
    "power.draw": "W",
    "power.limit": "W",
}
GPU_FIELDS = {
    "index": "0",
    "count": "1",
    "name": "NVIDIA GB10",
    "gpu_name": "NVIDIA GB10",
    "driver_version": VERSION,
    "memory.total": UNKNOWN,
    "memory.used": UNKNOWN,
    "memory.free": UNKNOWN,
    "memory.reserved": UNKNOWN,
    "utilization.gpu": "0",
    "utilization.memory": "0",
    "temperature.gpu": "35",
    "power.draw": "11.17",
    "power.limit": UNKNOWN,
    "compute_cap": "12.1",
    "compute_mode": "Default",
    "persistence_mode": "Enabled",
    "pci.bus_id": "0000000F:01:00.0",
    "gpu_bus_id": "0000000F:01:00.0",
    "mig.mode.current": UNKNOWN,
    "pstate": "P8",
}
TABLE = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI {version:<18}     Driver Version: {version:<14} CUDA Version: {cuda:<9}|
+-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
|   0  NVIDIA GB10                    On  |   0000000F:01:00.0 Off |                  N/A |
| N/A   35C    P8             11W /  N/A  | Not Supported          |      0%      Default |
|                                         |                        |                  N/A |
+-----------------------------------------+------------------------+----------------------+

+-----------------------------------------------------------------------------------------+
| Processes:                                                                              |
|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |
|        ID   ID                                                               Usage      |
|=========================================================================================|"""
TABLE_END = f"+{'-' * 89}+"


def uuid() -> str:
    digest = hashlib.md5(socket.gethostname().encode(), usedforsecurity=False).hexdigest()
    parts = (digest[:8], digest[8:12], digest[12:16], digest[16:20], digest[20:])
    return f"GPU-{'-'.join(parts)}"


def started(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def process_name(pid: int) -> str:
    """What nvidia-smi shows: the first word of the command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode() or "[Not Found]"
    except OSError:
        return "[Not Found]"


def holders() -> Iterator[tuple[int, str, int]]:
    """Pid, name and MiB of each registered process that still lives."""
    for file in sorted(HOLDERS.glob("[0-9]*"), key=lambda file: int(file.name)):
        record = json.loads(file.read_text())
        pid = int(file.name)
        if started(pid) == record["started"]:
            yield pid, process_name(pid), record["mib"]


def gpu_rows() -> list[dict[str, str]]:
    return [{**GPU_FIELDS, **own_memory(), "uuid": uuid(), "gpu_uuid": uuid()}]


def own_memory() -> dict[str, str]:
    if not OWN_MEMORY.exists():
        return {}
    total, used = int(OWN_MEMORY.read_text()), sum(mib for _, _, mib in holders())
    sizes = {"total": total, "used": used, "free": total - used}
    return {f"memory.{name}": str(mib) for name, mib in sizes.items()}


def tell_unified_memory() -> None:
    """For a test that mounts this file over /proc/meminfo."""
    if UNIFIED_MEMORY.exists():
        total, used = int(UNIFIED_MEMORY.read_text()), sum(mib for _, _, mib in holders())
        sizes = {"MemTotal": total, "MemFree": total - used, "MemAvailable": total - used}
        MEMINFO.write_text("".join(f"{key}: {mib * 1024} kB\n" for key, mib in sizes.items()))


def process_rows() -> list[dict[str, str]]:
    gpu = {
        "gpu_uuid": uuid(),
        "gpu_name": GPU_FIELDS["name"],
        "gpu_bus_id": GPU_FIELDS["pci.bus_id"],
    }
    return [
        {
            **gpu,
            "pid": str(pid),
            "process_name": name,
            "name": name,
            "used_memory": str(mib),
            "used_gpu_memory": str(mib),
        }
        for pid, name, mib in holders()
    ]


def query(fields: list[str], rows: list[dict[str, str]], known: set[str], words: set[str]) -> str:
    """The csv form; an unknown field is an error, as with the real program."""
    for field in fields:
        if field not in known:
            sys.exit(f'Field "{field}" is not a valid field to query.\n')
    lines = []
    if "noheader" not in words:
        lines.append(", ".join(_heading(field) for field in fields))
    lines += [", ".join(_value(field, row[field], words) for field in fields) for row in rows]
    return "\n".join(lines)


def _heading(field: str) -> str:
    unit = UNITS.get(field)
    # The heading keeps the unit with nounits: only values lose it.
    shown = "used_gpu_memory" if field == "used_memory" else field
    return f"{shown} [{unit}]" if unit else shown


def _value(field: str, value: str, words: set[str]) -> str:
    unit = UNITS.get(field)
    return f"{value} {unit}" if unit and value != UNKNOWN and "nounits" not in words else value


def table() -> str:
    lines = [TABLE.format(version=VERSION, cuda=CUDA)]
    rows = [
        f"|    0   N/A  N/A {pid:>16}      C   {name[-36:]:<36} {f'{mib}MiB':>10} |"
        for pid, name, mib in holders()
    ]
    lines += rows or [f"|  {'No running processes found':<87}|"]
    return "\n".join([*lines, TABLE_END])


def main(arguments: list[str]) -> None:
    tell_unified_memory()
    options = dict(argument.partition("=")[::2] for argument in arguments)
    words = set(options.get("--format", "").split(","))
    if "-L" in options or "--list-gpus" in options:
        print(f"GPU 0: {GPU_FIELDS['name']} (UUID: {uuid()})")
        return
    for option, rows, extra in (
        ("--query-gpu", gpu_rows(), {"uuid", "gpu_uuid", *GPU_FIELDS}),
        (
            "--query-compute-apps",
            process_rows(),
            {"pid", "process_name", "name", "gpu_uuid", "gpu_name", "gpu_bus_id"}
            | {"used_memory", "used_gpu_memory"},
        ),
    ):
        if option in options:
            if "csv" not in words:
                sys.exit('Error: --format=csv needs to be specified with "--query" options.')
            text = query(options[option].split(","), rows, extra, words)
            if text:
                print(text)
            return
    unknown = [name for name in options if name not in ("-i", "--id", "-q", "")]
    if unknown:
        sys.exit("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.")
    print(table())


if __name__ == "__main__":
    main(sys.argv[1:])
