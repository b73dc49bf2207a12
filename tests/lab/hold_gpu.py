#!/usr/bin/python3 -IS
"""`hold-gpu MIB` starts a process that nvidia-smi lists as a holder; `hold-gpu release` ends them.

It is copied onto the node as /usr/local/bin/hold-gpu, so it imports nothing of ours. The process is
real and can be ended like any other; the memory is not: it stands in /run/gpu-holders only.
"""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

HOLDERS = Path("/run/gpu-holders")


def started(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def hold(mib: int) -> None:
    """Returns once the process is registered."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        signal.pause()
        os._exit(0)
    HOLDERS.mkdir(exist_ok=True)
    record = {"mib": mib, "started": started(pid), "made_by": "hold-gpu"}
    aside = HOLDERS / f".{pid}"
    aside.write_text(json.dumps(record))
    aside.rename(HOLDERS / str(pid))
    print(pid)


def release() -> None:
    for file in HOLDERS.glob("[0-9]*"):
        record = json.loads(file.read_text())
        if record.get("made_by") != "hold-gpu":
            continue
        if started(int(file.name)) == record["started"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(file.name), signal.SIGKILL)
        file.unlink()


if __name__ == "__main__":
    release() if sys.argv[1] == "release" else hold(int(sys.argv[1]))
