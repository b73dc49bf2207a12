"""Ends processes, each only as long as it is the one that was meant.

Relayed to the node; standard library of Python 3.8 only. TERM, a wait, KILL. Before each signal its
start time is read again, and before the first one its command too; where Python and the kernel know
pidfds the signal goes through one, so that a pid that another process now has is never touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from typing import Any

POLL = 0.05
# Between KILL and giving up: one that hangs in a driver does not even die of that.
LAST = 5.0


def read(pid: int, name: str) -> str:
    try:
        with open(f"/proc/{pid}/{name}", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


class Target:
    """A process that is to end, held by a pidfd where there are any."""

    def __init__(self, pid: int, started: int, command: str) -> None:
        self.pid, self.started, self.command = pid, started, command
        self.said = ""
        self.handle: int | None = None
        # Opened before the look, so that what was looked at is what the signal goes to.
        if hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal"):
            with contextlib.suppress(OSError):
                self.handle = os.pidfd_open(pid)
        self.was_there = bool(self.state)
        if not self.was_there:
            self.said = "gone already"
        elif not self.is_same:
            self.said = "another process has its pid now, not touched"

    @property
    def fields(self) -> list[str]:
        # The name, in brackets, may hold anything.
        return read(self.pid, "stat").rpartition(")")[2].split()

    @property
    def state(self) -> str:
        fields = self.fields
        return fields[0] if fields and fields[0] not in "ZX" else ""

    @property
    def is_same(self) -> bool:
        fields = self.fields
        if not fields or int(fields[19]) != self.started:
            return False
        words = " ".join(word for word in read(self.pid, "cmdline").split("\0") if word)
        return words == self.command

    @property
    def runs(self) -> bool:
        fields = self.fields
        return bool(fields) and fields[0] not in "ZX" and int(fields[19]) == self.started

    def send(self, number: int) -> None:
        # A process that names itself anew is still the one whose start time this is.
        if not self.runs:
            return
        try:
            if self.handle is not None:
                signal.pidfd_send_signal(self.handle, number)
            else:
                os.kill(self.pid, number)
        except ProcessLookupError:
            return
        except PermissionError:
            self.said = "not allowed"

    def wait(self, until: float) -> bool:
        """Whether it has ended by then; a zombie holds nothing any more."""
        while self.runs:
            left = until - time.monotonic()
            if left <= 0:
                return False
            if self.handle is not None:
                select.select([self.handle], [], [], min(left, 1.0))
            time.sleep(min(POLL, max(0.0, left)))
        return True


def end(wanted: list[dict[str, Any]], grace: float) -> list[dict[str, Any]]:
    targets = [Target(each["pid"], each["started"], each["command"]) for each in wanted]
    meant = [target for target in targets if not target.said]
    for number, seconds, said in (
        (signal.SIGTERM, grace, "ended on TERM"),
        (signal.SIGKILL, LAST, f"killed, as it did not end within {grace:g} s"),
    ):
        left = [target for target in meant if not target.said]
        for target in left:
            target.send(number)
        until = time.monotonic() + seconds
        for target in left:
            if not target.said and target.wait(until):
                target.said = said
    for target in meant:
        target.said = target.said or f"does not end (state {target.state})"
    return [{"pid": target.pid, "said": target.said} for target in targets]


def main(_program: str, said: str) -> None:
    wanted = json.loads(said)
    print(json.dumps(end(wanted["processes"], wanted["grace"])))


if __name__ == "__main__":
    main(*sys.argv[1:])
