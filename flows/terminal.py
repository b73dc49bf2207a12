"""What a person sees while a flow runs, and at its end."""

import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TextIO

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from flows.registration.changes import Registration
from tasks.preflight import Problem
from tasks.report import Report, Row, columns
from tasks.standings import Standing

WIDE = 200
STYLES = {
    "unchanged": "dim",
    "changed": "yellow",
    "planned": "cyan",
    "failed": "bold red",
    "ready": "dim",
    "slow": "yellow",
    "blocked": "bold red",
    "created": "yellow",
    "updated": "yellow",
    "removed": "yellow",
    "left": "dim",
}


def _console(file: TextIO) -> Console:
    # A file or a pager wraps lines by itself; a table cut to 80 columns helps nobody.
    width = None if file.isatty() else WIDE
    return Console(file=file, highlight=False, width=width)


class Terminal:
    """One line for each step that ends; on a terminal also what is running right now."""

    def __init__(self) -> None:
        self._console = _console(sys.stderr)
        self._running: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()
        self.report: Report | None = None
        self._status: Status | None = None
        if self._console.is_terminal:
            self._status = self._console.status("")
            self._status.start()

    def began(self, step: str, node: str) -> None:
        with self._lock:
            self._running[step, node] = 1
            self._refresh()

    def ended(self, row: Row) -> None:
        with self._lock:
            self._running.pop((row.step, row.node), None)
            self._refresh()
            line = Text(f"{row.seconds:6.1f} s  {row.outcome:<9}  {row.step} on {row.node}")
            line.stylize(STYLES[row.outcome])
            if row.detail:
                line.append(f"  {_short(row.detail)}", style="dim")
            self._console.print(line)

    def finished(self, report: Report) -> None:
        self.report = report

    def stop(self) -> None:
        if self._status:
            self._status.stop()

    def _refresh(self) -> None:
        if self._status:
            running = ", ".join(f"{step} on {node}" for step, node in self._running)
            self._status.update(running or "...")


def show(report: Report, *, every_check: bool = False) -> None:
    """The tables at the end, on standard output; checks that are ready only where they matter."""
    console = _console(sys.stdout)
    problems = [each for each in report.problems if every_check or each.verdict != "ready"]
    if report.running is not None:
        console.print(_running(report.running))
    else:
        if problems:
            console.print(_problems(problems))
        if report.steps:
            console.print(_steps(report))
    for rows in report.tables.values():
        console.print(_rows(columns(rows), rows))
    if report.chart:
        console.print(report.chart, markup=False)
    if report.error:
        console.print(Text(report.error, style="bold red"))
    summary = f"{report.cluster}: {report.state}, {report.outcome}, {report.seconds:.1f} s"
    if report.outage_seconds is not None:
        summary += f", the model did not answer for {report.outage_seconds:.1f} s"
    if report.endpoint and report.state == "completed":
        summary += f", endpoint {report.endpoint}"
    console.print(summary)


def show_registration(registration: Registration) -> None:
    """What was made of each object, on standard output."""
    console = _console(sys.stdout)
    table = Table("object", "name", "outcome", "detail", box=None)
    for change in registration.objects:
        outcome = Text(change.outcome, style=STYLES[change.outcome])
        table.add_row(change.kind, change.name, outcome, Text(change.detail))
    if registration.objects:
        console.print(table)
    for warning in registration.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))
    if registration.error:
        console.print(Text(registration.error, style="bold red"))
    console.print(
        f"{registration.cluster}: {registration.state}, {registration.outcome}, "
        f"{registration.seconds:.1f} s"
    )


def _running(rows: Sequence[Standing]) -> Table:
    """The one table of `status`."""
    table = Table("node", "what", "state", "asked", "runs", box=None)
    for row in rows:
        style = STYLES["ready"] if row.state == "as asked" else STYLES["blocked"]
        table.add_row(
            row.node, row.what, Text(row.state, style=style), Text(row.asked), Text(row.runs)
        )
    return table


def _rows(heads: Sequence[str], rows: Sequence[Mapping[str, str]]) -> Table:
    table = Table(*heads, box=None)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row.values()))
    return table


def _steps(report: Report) -> Table:
    table = Table("step", "node", "outcome", "seconds", "detail", box=None)
    for row in report.steps:
        table.add_row(
            row.step,
            row.node,
            Text(row.outcome, style=STYLES[row.outcome]),
            f"{row.seconds:.1f}",
            Text(_short(row.detail)),
        )
    return table


def _problems(problems: Sequence[Problem]) -> Table:
    table = Table("node", "check", "verdict", "detail", "remedy", box=None)
    for row in problems:
        table.add_row(
            row.node,
            row.check,
            Text(row.verdict, style=STYLES[row.verdict]),
            Text(row.detail),
            Text(row.remedy),
        )
    return table


def _short(detail: str) -> str:
    first, *more = detail.strip().splitlines() or [""]
    return f"{first} ..." if more else first
