"""Preflight: every check on every node at once, before anything is touched."""

from collections.abc import Mapping, Sequence
from textwrap import indent

from pydantic import BaseModel

from blocks import Cluster, Node
from tasks.checks import CHECKS
from tasks.checks.site import Level, Site
from tasks.converge import Outcome, Run, step
from tasks.engine_verdicts import Verdict
from tasks.errors import (
    CommandTimedOut,
    HostKeyRefused,
    LoginRefused,
    NodeUnreachable,
    PreflightFailed,
    SparkrailError,
)
from tasks.node_facts import NodeFacts


class Problem(BaseModel, frozen=True):
    """A row of the table: what one check found on one node; also that all is well."""

    node: str
    check: str
    verdict: Level
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        row = f"{self.node}: {self.check}: {self.detail}"
        return f"{row}\n{indent(self.remedy, '  ')}" if self.remedy else row


def problems(
    cluster: Cluster,
    facts: Mapping[str, NodeFacts | SparkrailError],
    engine: Verdict | None = None,
) -> list[Problem]:
    """One row per check and node; an error instead of a node's facts is a row too."""
    read = {name: found for name, found in facts.items() if isinstance(found, NodeFacts)}
    rows: list[Problem] = []
    for node in cluster.nodes:
        found = facts.get(node.name)
        if isinstance(found, NodeFacts):
            rows.append(_reached(node, found))
            rows += _judged(Site(cluster, node, read, engine))
        else:
            rows.append(_unread(node, found))
    return rows


def _reached(node: Node, facts: NodeFacts) -> Problem:
    detail = f"{facts.user}@{facts.hostname}"
    return Problem(node=node.name, check="reachable", verdict="ready", detail=detail)


def _judged(site: Site) -> list[Problem]:
    found = ((name, check(site)) for name, check in CHECKS.items())
    return [
        Problem(node=site.node.name, check=name, **finding._asdict())
        for name, finding in found
        if finding is not None
    ]


def _unread(node: Node, error: SparkrailError | None) -> Problem:
    if error is None:
        error = SparkrailError("its facts were not gathered")
    elsewhere = error.node not in ("", node.name)
    said = f"{error.node}: {error.brief}" if elsewhere else error.brief
    remedy = error.remedy
    check = _check_of(error)
    if check == "python3":
        said = "there is no python3"
        remedy = f"On {node.name}: sudo apt install python3-minimal"
    elif error.details:
        said = f"{said}\n{error.details}"
    return Problem(node=node.name, check=check, verdict="blocked", detail=said, remedy=remedy)


def _check_of(error: SparkrailError) -> str:
    if isinstance(error, NodeUnreachable | CommandTimedOut):
        return "reachable"
    if isinstance(error, HostKeyRefused):
        return "host key"
    if isinstance(error, LoginRefused):
        return "login"
    # Shells and env say it in their own words; the exit code is the same.
    absent = error.brief.startswith("exit code 127: python3") or "python3: not found" in str(error)
    return "python3" if absent else "facts"


def blocking(rows: Sequence[Problem]) -> list[Problem]:
    return [row for row in rows if row.verdict == "blocked"]


def preflight_failed(rows: Sequence[Problem]) -> PreflightFailed:
    """One error that names every blocked check, and keeps all rows."""
    found = blocking(rows)
    nodes = dict.fromkeys(row.node for row in found)
    error = PreflightFailed(
        f"preflight: blocked by {len(found)} of {len(rows)} checks, on {', '.join(nodes)}",
        details="\n".join(map(str, found)),
        remedy="Nothing was touched.",
    )
    error.problems = list(rows)
    return error


@step("preflight")
def preflight(
    cluster: Cluster,
    node: Node,
    run: Run,  # noqa: ARG001 - as every step
    facts: Mapping[str, NodeFacts | SparkrailError],
    engine: Verdict | None = None,
) -> Outcome:
    """Refuse to begin where something would make the deploy fail."""
    rows = problems(cluster, facts, engine)
    if blocking(rows):
        raise preflight_failed(rows)
    slow = [f"{row.node}: {row.check}" for row in rows if row.verdict == "slow"]
    detail = f"{len(rows)} checks" + (f", slow: {', '.join(slow)}" if slow else "")
    return Outcome(step="preflight", node=node.name, status="unchanged", detail=detail, data=rows)
