"""The report: the document of `--json` is a contract, and markdown shows what was said."""

import json
from typing import Any

import pytest

from tasks.preflight import Problem
from tasks.report import Report, Row, as_json, as_markdown, outcome_of
from tasks.standings import Standing

ROWS = (
    Row(step="facts", node="head", outcome="unchanged", seconds=0.51234, detail="GB10 x1"),
    Row(step="vLLM serve", node="head", outcome="changed", seconds=61.5),
)
PROBLEMS = (
    Problem(node="head", check="disk", verdict="ready", detail="812 GiB free"),
    Problem(node="head", check="page cache", verdict="slow", detail="99 GiB", remedy="Wait."),
    Problem(node="worker1", check="docker", verdict="blocked", detail="denied", remedy="Join."),
)
REPORT = Report(
    cluster="sparks",
    state="completed",
    outcome="changed",
    seconds=62.01999,
    endpoint="http://10.88.0.1:8000/v1",
    steps=ROWS,
    problems=PROBLEMS,
    exit_code=7,
)


def test_the_whole_document() -> None:
    assert (
        as_json(REPORT)
        == """\
{
  "cluster": "sparks",
  "state": "completed",
  "outcome": "changed",
  "seconds": 62.02,
  "endpoint": "http://10.88.0.1:8000/v1",
  "steps": [
    {
      "step": "facts",
      "node": "head",
      "outcome": "unchanged",
      "seconds": 0.51,
      "detail": "GB10 x1"
    },
    {
      "step": "vLLM serve",
      "node": "head",
      "outcome": "changed",
      "seconds": 61.5,
      "detail": ""
    }
  ],
  "problems": [
    {
      "node": "head",
      "check": "page cache",
      "verdict": "slow",
      "detail": "99 GiB",
      "remedy": "Wait."
    },
    {
      "node": "worker1",
      "check": "docker",
      "verdict": "blocked",
      "detail": "denied",
      "remedy": "Join."
    }
  ],
  "error": null
}"""
    )


def test_the_document_of_a_run_that_never_began() -> None:
    failed = Report(
        cluster="x",
        state="failed",
        outcome="unchanged",
        seconds=0,
        error="no such file",
        exit_code=2,
    )
    assert json.loads(as_json(failed)) == {
        "cluster": "x",
        "state": "failed",
        "outcome": "unchanged",
        "seconds": 0,
        "endpoint": None,
        "steps": [],
        "problems": [],
        "error": "no such file",
    }


def rows(*outcomes: Any) -> list[Row]:
    return [Row(step="s", node="n", outcome=each, seconds=0) for each in outcomes]


@pytest.mark.parametrize(
    ("outcomes", "strongest"),
    [
        pytest.param((), "unchanged", id="no step"),
        pytest.param(("unchanged", "unchanged"), "unchanged", id="all unchanged"),
        pytest.param(("unchanged", "planned"), "planned", id="a dry run"),
        pytest.param(("changed", "unchanged", "failed"), "changed", id="changed before it failed"),
        pytest.param(("failed",), "unchanged", id="failed before anything changed"),
    ],
)
def test_the_strongest_outcome_of_all_steps(outcomes: tuple[str, ...], strongest: str) -> None:
    assert outcome_of(rows(*outcomes)) == strongest


def test_the_whole_page() -> None:
    assert (
        as_markdown(REPORT)
        == """\
# sparks: completed, changed

Endpoint: <http://10.88.0.1:8000/v1>

| step | node | outcome | seconds | detail |
|---|---|---|---|---|
| facts | head | unchanged | 0.5 | GB10 x1 |
| vLLM serve | head | changed | 61.5 |  |

## Problems

| node | check | verdict | detail | remedy |
|---|---|---|---|---|
| head | page cache | slow | 99 GiB | Wait. |
| worker1 | docker | blocked | denied | Join. |"""
    )


@pytest.mark.parametrize(
    ("detail", "cell"),
    [
        pytest.param("a|b", "a\\|b", id="a bar"),
        pytest.param("a\\|b", "a\\\\\\|b", id="a bar behind a backslash"),
        pytest.param("one\ntwo  three", "one two three", id="line breaks"),
        pytest.param("image <none> & more", "image &lt;none> &amp; more", id="HTML"),
    ],
)
def test_a_cell_shows_what_was_said(detail: str, cell: str) -> None:
    row = ROWS[0].model_copy(update={"detail": detail})
    last = as_markdown(REPORT.model_copy(update={"steps": (row,), "problems": ()})).splitlines()[-1]
    assert last == f"| facts | head | unchanged | 0.5 | {cell} |"


@pytest.mark.parametrize(
    ("error", "block"),
    [
        pytest.param("it broke", "```text\nit broke\n```", id="plain"),
        pytest.param(
            "try:\n```sh\nls\n```",
            "````text\ntry:\n```sh\nls\n```\n````",
            id="with a fence of its own",
        ),
    ],
)
def test_an_error_stands_in_a_block_of_its_own(error: str, block: str) -> None:
    failed = REPORT.model_copy(update={"state": "failed", "error": error, "endpoint": None})
    assert as_markdown(failed).startswith(f"# sparks: failed, changed\n\n{block}\n\n| step")


def test_status_alone_tells_what_runs() -> None:
    row = Standing(node="head", what="Ray", state="as asked", asked="Ray", runs="as asked")
    assert "running" not in json.loads(as_json(REPORT))
    told = REPORT.model_copy(update={"running": (row,)})
    assert json.loads(as_json(told))["running"] == [row.model_dump()]
    assert "| head | Ray | as asked | Ray | as asked |" in as_markdown(told).splitlines()
    assert json.loads(as_json(REPORT.model_copy(update={"running": ()})))["running"] == []
