"""One look at who holds GPU memory on a node: what the relayed program tells, as values."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from tasks.errors import CommandFailed
from tasks.programs import run_program
from tasks.remote import Remote

SMI_TIMEOUT = 10  # Seconds; nvidia-smi hangs when the driver does.


class Gpu(BaseModel, frozen=True):
    """A GPU's memory; unified memory has no numbers of its own."""

    index: int
    uuid: str
    total_mib: int | None = None
    used_mib: int | None = None
    free_mib: int | None = None
    mig: bool = False


class Row(BaseModel, frozen=True):
    """What nvidia-smi says of one process on one GPU."""

    gpu: str
    pid: int
    name: str
    used_mib: int | None = None


class Process(BaseModel, frozen=True):
    """A process as /proc tells it; pid and start time together name it for ever."""

    pid: int
    parent: int
    started: int  # Ticks since boot.
    state: str = "S"
    user: str
    command: str
    name: str = ""
    cgroup: str = ""
    rss_mib: int = 0

    @property
    def ended(self) -> bool:
        return self.state in ("Z", "X")

    def __str__(self) -> str:
        return f"pid {self.pid} ({(self.command or f'[{self.name}]')[:80]})"


class Memory(BaseModel, frozen=True):
    """Of the node; what is available but not free is page cache, which nobody holds."""

    total_mib: int
    free_mib: int
    available_mib: int


class Look(BaseModel, frozen=True):
    """What the relayed program told of a node at one time."""

    user: str
    uid: int
    home: str = ""
    own: tuple[int, ...] = ()
    own_cgroup: str = ""
    gpus: tuple[Gpu, ...] = ()
    gpus_error: str = ""
    rows: tuple[Row, ...] = ()
    rows_error: str = ""
    memory: Memory
    ticks: int = 0  # Since boot, when this look was taken.
    processes: tuple[Process, ...] = ()
    openers: tuple[int, ...] = ()
    largest: tuple[int, ...] = ()
    units: Mapping[str, str] = {}

    def process(self, pid: int) -> Process | None:
        return next((each for each in self.processes if each.pid == pid), None)

    def ancestors(self, process: Process) -> list[Process]:
        """Those that started it, the nearest first."""
        found, at = [], self.process(process.parent)
        while at is not None:
            found.append(at)
            at = self.process(at.parent)
        return found


def parse_look(said: Any) -> Look:
    try:
        return Look.model_validate(said)
    except ValidationError as error:
        raise CommandFailed(
            "the program that looks for GPU holders printed something else", details=str(error)
        ) from error


def observe_look(remote: Remote, also: Sequence[int] = (), commands: Sequence[str] = ()) -> Look:
    """Beside the holders, those of these pids and these commands."""
    wanted = json.dumps({"timeout": SMI_TIMEOUT, "also": list(also), "commands": list(commands)})
    return parse_look(run_program(remote, "gpu_holders", wanted, timeout=6 * SMI_TIMEOUT))
