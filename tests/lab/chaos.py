"""The fault trial: each fault at each step, then one plain deploy. `make chaos` prints the matrix.

After each fault the deploy that it hit ends by itself, whatever its outcome; then one plain deploy
must complete, the model answer, nothing of the first be left, and nobody hold the lock. Before
`stop` the old release must have gone on answering, unless it was the fault itself that took it.
"""

import argparse
import contextlib
import itertools
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.lab import docker_engine, spec
from tests.lab.layout import Lab, Shape
from tests.lab.moments import (
    AFTER_AN_OUTAGE,
    BEFORE_STOP,
    FROM_STOP_ON,
    NODES,
    nothing_is_left,
    until_begun,
)
from tests.lab.product import (
    DONE,
    STUB_TAG,
    Product,
    Running,
    Said,
    lab_command,
    load_stub,
    poll,
    preload,
    use_stub,
)

SERVING = "serving"
STEPS = (
    "image transfer",
    "weights sync",
    "script relay",
    "stop",
    "Ray head start",
    "worker join",
    "cluster verification",
    "vLLM serve",
    SERVING,
)
ENDED = 600  # Seconds until a deploy that was hit must have ended by itself.
numbers = itertools.count(int(time.time()))


@dataclass(frozen=True)
class Fault:
    """What happens; with `lasting`, that is mended after so long."""

    strike: Callable[[Product, Running | None], object]
    mend: Callable[[Product], object] = lambda _: None
    lasting: bool = False
    spares_the_old: bool = False  # It takes nothing that serves.


def breaking(node: str, fault: str) -> Callable[..., object]:
    return lambda product, *_: lab_command(product.lab, "break", node, fault)


def kill_flow(_product: Product, running: Running | None) -> None:
    if running is not None:
        running.kill()


def reboot(node: str) -> Callable[[Product, Running | None], object]:
    def strike(product: Product, _running: Running | None) -> None:
        for fault in ("kill", "boot"):
            lab_command(product.lab, "break", node, fault)

    return strike


def kill_named(node: str, command: str) -> Callable[[Product, Running | None], object]:
    """All processes of that name on the node; where there is none now, that is no fault."""

    def strike(product: Product, _running: Running | None) -> None:
        for pid in product.named(node, command):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    return strike


FAULTS = {
    "flow killed": Fault(kill_flow, spares_the_old=True),
    "worker rebooted": Fault(reboot("worker1")),
    "head rebooted": Fault(reboot("head")),
    "Ray head killed": Fault(kill_named("head", "gcs_server")),
    # The fast engine has no rank of its own on the worker; its raylet stands for it.
    "rank killed": Fault(kill_named("worker1", "raylet")),
    "dockerd restarted": Fault(lambda product, _: docker_engine.restart(product, "worker1")),
    "sshd down": Fault(
        breaking("worker1", "stop-sshd"), breaking("worker1", "start-sshd"), True, True
    ),
    "fabric link down": Fault(
        breaking("worker1", "link-down"), breaking("worker1", "link-up"), True, True
    ),
    "disk full": Fault(
        breaking("worker1", "fill-disk"), breaking("worker1", "free-disk"), True, True
    ),
}
# For `make test`: before the stop, after it, and while it serves.
SHORT = (
    ("worker rebooted", "script relay"),
    ("Ray head killed", "worker join"),
    ("dockerd restarted", SERVING),
)
# For `make test-extended`: what lasts for a while, or costs a rollback.
LONGER = (
    ("sshd down", "script relay"),
    ("fabric link down", "weights sync"),
    ("disk full", "image transfer"),
    ("head rebooted", "stop"),
    ("worker rebooted", "vLLM serve"),
    ("dockerd restarted", "worker join"),
)


@dataclass(frozen=True)
class Cell:
    """How one fault at one step went."""

    fault: str
    step: str
    hit: str  # How the deploy that was hit ended,
    why: str  # and its error.
    seconds: float  # Of the plain deploy after it.
    wrong: str

    def __str__(self) -> str:
        told = self.wrong or f"then {self.seconds:.0f} s"
        line = f"{self.fault:<18} {self.step:<21} {self.hit:<12} {told}"
        return "\n    ".join([line, *self.why.splitlines()])


def trial(product: Product, fault: str, step: str, seconds: float) -> Cell:
    """One cell of the matrix, on a cluster that serves."""
    changed = product.but(
        product.folder, lambda spec: spec["environment"].update(CHANGED=str(next(numbers)))
    )
    if step == SERVING:
        changed = product
        strike(FAULTS[fault], product, None, seconds)
        hit, why = "-", ""
    else:
        hit, why = run_into(changed, fault, step, seconds)
    said = changed.run("deploy")
    wrong = "" if said.code == DONE else f"deploy: {said.error}"
    if not wrong:
        try:
            poll(lambda: changed.answer() == " of the stub", 30)
            nothing_is_left(changed, AFTER_AN_OUTAGE)
        except AssertionError as error:
            wrong = f"afterwards: {error}"
    return Cell(fault, step, hit, why, said.seconds, wrong)


def run_into(product: Product, fault: str, step: str, seconds: float) -> tuple[str, str]:
    """A deploy that has something to do in every step, hit in this one; how it ended, and why."""
    product.on("worker1", f"docker tag sparkrail/engine:lab {STUB_TAG}")
    product.on("worker1", "for file in /models/tiny/*.safetensors; do echo >> $file; done")
    for name in NODES:
        product.on(name, f"echo '# edited' >> /root/.sparkrail/{product.name}/run/launch")
    running = product.start("deploy")
    until_begun(running, product, step, {**BEFORE_STOP, **FROM_STOP_ON}[step])
    strike(FAULTS[fault], product, running, seconds)
    hit = ("killed", "") if fault == "flow killed" else how(running.wait(ENDED))
    if step in BEFORE_STOP and FAULTS[fault].spares_the_old:
        assert product.answer() == " of the stub", "the old release no longer answers"
    return hit


def how(said: Said) -> tuple[str, str]:
    """The outcome of a deploy, where a failed one that was not rolled back is just that."""
    if said.document["state"] == "completed":
        return said.outcome, ""
    ended = said.outcome if said.outcome in ("rolled-back", "broken") else "failed"
    return ended, said.error


def strike(fault: Fault, product: Product, running: Running | None, seconds: float) -> None:
    fault.strike(product, running)
    if fault.lasting:
        # It lasts: the deploy goes on meanwhile, or ends because of it.
        threading.Event().wait(seconds)
    fault.mend(product)


def run(product: Product, cells: Iterable[tuple[str, str]], seconds: float) -> list[Cell]:
    """The cells one after the other; a cell that goes wrong is told, and the next begins anew."""
    found = []
    for fault, step in cells:
        try:
            cell = trial(product, fault, step, seconds)
        except Exception as error:
            cell = Cell(fault, step, "?", "", 0, f"{type(error).__name__}: {error}")
        print(cell, flush=True)
        found.append(cell)
        if cell.wrong:
            for node in NODES:
                lab_command(product.lab, "break", node, "kill")
                lab_command(product.lab, "break", node, "boot")
            product.clear()  # Without sparkrail: what it could not overcome may be there still.
            product.run("destroy")
            product.deploy()
    return found


def matrix(cells: Iterable[Cell]) -> str:
    """Faults by steps; in each cell how the deploy that was hit ended, or WRONG."""
    by = {(cell.fault, cell.step): "WRONG" if cell.wrong else cell.hit for cell in cells}
    steps = [step for step in STEPS if any(step == key[1] for key in by)]
    rows = [["", *steps]]
    rows += [
        [fault, *(by.get((fault, step), "") for step in steps)]
        for fault in FAULTS
        if any(fault == key[0] for key in by)
    ]
    wide = [max(len(row[at]) for row in rows) for at in range(len(steps) + 1)]
    return "\n".join(
        "  ".join(cell.ljust(size) for cell, size in zip(row, wide, strict=True)).rstrip()
        for row in rows
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.chaos", description=__doc__)
    parser.add_argument("--fault", action="append", choices=list(FAULTS))
    parser.add_argument("--step", action="append", choices=list(STEPS))
    parser.add_argument("--seconds", type=float, default=60, help="how long a lasting fault lasts")
    options = parser.parse_args()
    where, shape = Lab("lab-chaos"), Shape(workers=1)
    cells = itertools.product(options.fault or FAULTS, options.step or STEPS)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        try:
            lab_command(where, "down")
            lab_command(where, "up")
            preload(where, shape)
            made = spec.document(where, shape)
            use_stub(made)
            product = Product(where, shape, Path(folder), made)
            load_stub(product)
            product.deploy()
            found = run(product, cells, options.seconds)
        finally:
            lab_command(where, "down")
    print(matrix(found))
    bad = sum(bool(cell.wrong) for cell in found)
    print(f"{len(found)} faults, {bad} of them not overcome")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
