"""What a run did, as one document: for people, for `--json`, and for the Prefect UI."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, Field

from tasks import artifacts
from tasks.preflight import Problem
from tasks.standings import Standing

SERVE = "vLLM serve"


class Row(BaseModel, frozen=True):
    """One step on one node."""

    step: str
    node: str
    outcome: Literal["unchanged", "changed", "planned", "failed"]
    seconds: float
    detail: str = ""


class Report(BaseModel, frozen=True):
    """What `--json` prints; the fields and their values are a contract (see README)."""

    cluster: str
    state: Literal["completed", "failed"]
    outcome: Literal["unchanged", "changed", "planned", "rolled-back", "broken"]
    seconds: float
    outage_seconds: float | None = None  # From the old server's stop to the first answer.
    endpoint: str | None = None
    steps: tuple[Row, ...] = ()
    problems: tuple[Problem, ...] = ()
    running: tuple[Standing, ...] | None = None  # Of `status` only.
    # What a flow found out, by its name: rows for people and for programs.
    tables: Mapping[str, tuple[Mapping[str, str], ...]] = {}
    error: str | None = None
    exit_code: int = Field(0, exclude=True)
    cancelled: bool = Field(False, exclude=True)
    chart: str = Field("", exclude=True)  # Lines of text, for people.
    summary: str = Field("", exclude=True)  # The error for a state message of Prefect.


def outcome_of(rows: Sequence[Row]) -> Literal["unchanged", "changed", "planned"]:
    """The strongest outcome of all steps."""
    outcomes = {row.outcome for row in rows}
    if "changed" in outcomes:
        return "changed"
    return "planned" if "planned" in outcomes else "unchanged"


def as_json(report: Report) -> str:
    """The document of `--json`; times are rounded, because nobody reads microseconds."""
    document = report.model_dump(mode="json")
    document["seconds"] = round(report.seconds, 2)
    if report.outage_seconds is not None:
        document["outage_seconds"] = round(report.outage_seconds, 2)
    for name in ("outage_seconds", "tables"):
        if not document[name]:
            del document[name]
    for row in document["steps"]:
        row["seconds"] = round(row["seconds"], 2)
    document["problems"] = [p for p in document["problems"] if p["verdict"] != "ready"]
    if report.running is None:
        del document["running"]
    return json.dumps(document, indent=2)


def as_markdown(report: Report) -> str:
    """The report of the Prefect UI."""
    lines = [f"# {report.cluster}: {report.state}, {report.outcome}", ""]
    if report.endpoint:
        lines += [f"Endpoint: <{report.endpoint}>", ""]
    if report.outage_seconds is not None:
        lines += [outage_told(report), ""]
    if report.error:
        fence = "`" * max(3, 1 + _longest_run_of_backticks(report.error))
        lines += [f"{fence}text", report.error, fence, ""]
    if report.running:
        lines += table(
            ("node", "what", "state", "asked", "runs"),
            [(r.node, r.what, r.state, r.asked, r.runs) for r in report.running],
        )
        lines += ["", "## Steps", ""]
    lines += table(
        ("step", "node", "outcome", "seconds", "detail"),
        [(r.step, r.node, r.outcome, f"{r.seconds:.1f}", r.detail) for r in report.steps],
    )
    for title, rows in report.tables.items():
        lines += ["", f"## {title.capitalize()}", ""]
        lines += table(columns(rows), [list(row.values()) for row in rows])
    shown = [problem for problem in report.problems if problem.verdict != "ready"]
    if shown:
        lines += ["", "## Problems", ""]
        lines += table(
            ("node", "check", "verdict", "detail", "remedy"),
            [(p.node, p.check, p.verdict, p.detail, p.remedy) for p in shown],
        )
    if report.chart:
        lines += ["", "```text", report.chart, "```"]
    return "\n".join(lines)


def outage_told(report: Report) -> str:
    """How long the model did not answer, and how much of it was the engine's own start."""
    told = f"The model did not answer for {report.outage_seconds:.1f} s"
    starts = [row for row in report.steps if row.step == SERVE and row.outcome == "changed"]
    return (
        f"{told}, of which vLLM took {starts[-1].seconds:.1f} s to start." if starts else f"{told}."
    )


def columns(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """The heads of a table of a report."""
    return list(rows[0]) if rows else ["none"]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A markdown table; what would break a cell is replaced."""
    cells = [[_cell(text) for text in row] for row in rows]
    return [
        f"| {' | '.join(heads)} |",
        f"|{'---|' * len(heads)}",
        *(f"| {' | '.join(row)} |" for row in cells),
    ]


def _cell(text: str) -> str:
    # `<none>` would be taken for an HTML tag, and a line break would end the table.
    for character, shown in (("\\", "\\\\"), ("|", "\\|"), ("&", "&amp;"), ("<", "&lt;")):
        text = text.replace(character, shown)
    return " ".join(text.split())


def _longest_run_of_backticks(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


def publish(report: Report) -> None:
    """Put the report on the flow run's page; the last thing that a run publishes."""
    title = f"{report.cluster}: {report.state}, {report.outcome}"
    artifacts.show_report(report.cluster, as_markdown(report), title)
    artifacts.drain()
