"""Values for tests of the GPU residue: processes, rows and looks, made in one line each."""

from typing import Any

from tasks.containers import Container
from tasks.gpu_holders import Holders
from tasks.gpu_looks import Gpu, Look, Memory, Process, Row
from tasks.owners import Docked, group

ID = "b9b5e01d4f6d897faa6ca0f11b0edfd26b15f1f0867bd5c4a429dd637f4130ca"
OTHER = "c" * 64
UUID = "GPU-96e89a29-8e0a-9f46-9b9a-e458d6afae9f"
SLICE = "0::/system.slice"
SESSION = "0::/user.slice/user-1000.slice/session-7.scope"
SPARK = (Gpu(index=0, uuid=UUID),)
H200 = (Gpu(index=0, uuid=UUID, total_mib=143771, used_mib=0, free_mib=143161),)


def process(pid: int, command: str = "python3 job.py", **more: Any) -> Process:
    values = {"parent": 1, "started": 100 * pid, "user": "ada", "cgroup": "0::/", **more}
    return Process(pid=pid, command=command, **values)


def row(pid: int, mib: int | None = 1000, name: str = "python3", gpu: str = UUID) -> Row:
    return Row(gpu=gpu, pid=pid, name=name, used_mib=mib)


def look(*processes: Process, rows: tuple[Row, ...] | None = None, **more: Any) -> Look:
    """Each of the processes holds 1000 MiB unless the rows say otherwise."""
    values = {
        "user": "nvidia",
        "uid": 1000,
        "home": "/home/nvidia",
        "own_cgroup": "0::/user.slice/user-1001.slice/session-9.scope",
        "gpus": SPARK,
        "memory": Memory(total_mib=121_000, free_mib=20_000, available_mib=40_000),
        "rows": tuple(row(each.pid) for each in processes) if rows is None else rows,
        "processes": processes,
        "ticks": 100_000,
        **more,
    }
    return Look(**values)


def docked(id: str = ID, name: str = "reranker", restart: str = "always", **more: Any) -> Docked:
    labels = more.pop("labels", {})
    container = Container(id=id, name=name, state="running", labels=labels)
    return Docked(container=container, restart={"Name": restart}, **more)


def holders(seen: Look, *containers: Docked) -> Holders:
    known = {each.container.id: each for each in containers}
    return Holders(look=seen, held=group(seen, known), running=frozenset(known))
