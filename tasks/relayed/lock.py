"""Holds a cluster's lock on the head for as long as the run at the other end is alive.

Relayed to the node; standard library only. Arguments: folder, owner as JSON, silence in seconds.
Prints one line of JSON: {"held": bool, "owner": who holds it, "left": who left it behind}, and then
each beat back that it gets. The kernel frees the lock with this process, so that it cannot go
stale: this process ends when its standard input ends (the run is over, or was killed) or is silent
for too long (it is cut off, or frozen). A run that is silent may still have commands on the nodes:
its connection is ended, which ends them, before the lock is free.
"""

import contextlib
import fcntl
import json
import os
import select
import signal
import sys
import time

ENDING = 4.0  # Commands get SIGTERM when their connection ends, and SIGKILL three seconds later.


def main(folder: str, owner: str, silence: str) -> None:
    folder = os.path.expanduser(folder)
    owner_file = os.path.join(folder, "owner.json")
    guard = take(folder)
    if guard is None:
        say({"held": False, "owner": read(owner_file)})
        return
    left = read(owner_file)
    write(owner_file, {**json.loads(owner), "since": time.time(), "pid": os.getpid()})
    say({"held": True, "left": left})
    if answer_beats(float(silence), owner_file) == "silent" and end_connection(os.getppid()):
        time.sleep(ENDING)
    give_back(folder, guard)


def take(folder: str) -> "int | None":
    """The open file that is our lock; None when another process has it."""
    path = os.path.join(folder, "held")
    while True:
        try:
            os.makedirs(folder, exist_ok=True)
            guard = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # Another run has just given the folder back.
            continue
        try:
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        # It may have been given back since we opened it: such a lock would keep nobody out.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(guard), os.stat(path)):
                return guard
        os.close(guard)


def give_back(folder: str, guard: int) -> None:
    """Leave nothing behind that we made, up to ~/.sparkrail where that holds nothing else."""
    path = os.path.join(folder, "held")
    # Nothing there, or what is no longer empty, is no error; and another run's lock is not ours.
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(guard), os.stat(path)):
            os.unlink(os.path.join(folder, "owner.json"))
            os.unlink(path)
            for _ in range(3):
                os.rmdir(folder)
                folder = os.path.dirname(folder)


def answer_beats(silence: float, owner_file: str) -> str:
    """Until the run is `over` or `silent`."""
    while True:
        ready, _, _ = select.select([0], [], [], silence)
        if not ready:
            return "silent"
        beats = os.read(0, 4096)
        if not beats:
            return "over"
        try:
            os.write(1, beats)
        except OSError:
            return "over"
        with contextlib.suppress(FileNotFoundError):
            os.utime(owner_file)  # The heartbeat, for people who look.


def end_connection(server: int) -> bool:
    """End the sshd process that our run is connected to; whatever else started us is spared."""
    try:
        with open(f"/proc/{server}/comm", encoding="utf-8") as file:
            if not file.read().startswith("sshd"):
                return False
        os.kill(server, signal.SIGTERM)
    except OSError:
        return False
    return True


def read(path: str) -> object:
    """The owner that stands in a file; nothing when it is absent or was damaged."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and {"run", "who"} <= found.keys() else None


def write(path: str, value: object) -> None:
    with open(f"{path}.tmp", "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.replace(f"{path}.tmp", path)


def say(value: object) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
