"""The flow of `status`: whatever cannot be looked at, the rest is told."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from blocks import Cluster, Node
from flows import status as flow
from flows.steps import conduct
from tasks import container_looks
from tasks.converge import Outcome, Run, step
from tasks.endpoint import Answer
from tasks.errors import CommandFailed, NodeUnreachable, SparkrailError
from tasks.node_facts import NodeFacts
from tasks.report import Report
from tasks.standings import Found
from tests.unit.sites import nodes
from tests.unit.specs import DOCUMENT
from tests.unit.test_standings import WANTED, as_made, ray_node

AWAY = NodeUnreachable("no SSH connection", node="worker1", remedy="Is it up?")


def step_of(name: str, data: Any) -> Any:
    """A step that finds this, or raises it."""

    @step(name)
    def look(cluster: Cluster, node: Node, run: Run) -> Outcome:  # noqa: ARG001 - as every step
        if isinstance(data, SparkrailError):
            raise data
        return Outcome(step=name, node=node.name, status="unchanged", data=data)

    return look


class Site:
    """What the nodes say; healthy until a test changes it."""

    def __init__(self) -> None:
        self.facts: dict[str, NodeFacts | SparkrailError] = nodes()
        self.image: Any = {"content": "c0ffee" * 8}
        self.found = {
            name: {each.name: as_made(name, each) for each in specs} for name, specs in WANTED
        }
        self.engines: dict[str, SparkrailError] = {}
        self.not_tried: dict[str, list[dict[str, str]]] = {}

    def status(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
        @contextlib.contextmanager
        def engine(_cluster: Cluster, node: Node) -> Iterator[str]:
            if node.name in self.engines:
                raise self.engines[node.name]
            yield node.name

        def observe(name: str, names: tuple[str, ...]) -> dict[str, Found]:
            return {key: found for key, found in self.found[name].items() if key in names}

        answer = Answer(text=" jumps", tokens=4, seconds=0.5)
        ray = [ray_node("10.77.0.1"), ray_node("10.77.0.2")]
        for module, name, value in (
            (flow, "tell_facts", lambda _steps: self.facts),
            (flow, "not_tried", lambda _cluster: self.not_tried),
            (flow, "ensure_image", step_of("image transfer", self.image)),
            (flow, "ensure_weights", step_of("weights sync", {"digest": "w"})),
            (flow, "look_at_answer", step_of("answer", answer)),
            (flow, "look_at_ray", step_of("Ray", ray)),
            (container_looks, "engine", engine),
            (container_looks, "observe", observe),
        ):
            monkeypatch.setattr(module, name, value)
        spec = tmp_path / "sparks.yaml"
        spec.write_text(yaml.safe_dump(DOCUMENT))
        return conduct(str(spec), flow.tell, dry_run=True)


@pytest.fixture
def site() -> Site:
    return Site()


def states(report: Report) -> dict[str, str]:
    assert report.running is not None
    return {f"{row.node} {row.what}": row.state for row in report.running}


def test_what_differs_is_no_failure_of_the_look(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These containers carry other digests and an earlier boot than what the facts ask for."""
    report = site.status(tmp_path, monkeypatch)
    assert (report.exit_code, report.error) == (0, None)
    assert states(report) == {
        "head Ray": "rebooted since",
        "head server": "rebooted since",
        "worker1 Ray": "rebooted since",
        "head endpoint": "as asked",
    }
    assert report.running is not None
    assert "; deployed with another spec" in report.running[0].runs


def test_what_is_not_tried_again_is_told(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.not_tried = {"not tried again": [{"release": "3385d0d4", "why": "it failed"}]}
    [row] = site.status(tmp_path, monkeypatch).tables["not tried again"]
    assert row == {"release": "3385d0d4", "why": "it failed"}


def test_a_node_that_is_away_fails_after_the_rest_was_told(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.facts["worker1"] = AWAY
    report = site.status(tmp_path, monkeypatch)
    assert report.exit_code == 1
    assert report.error == (
        "not every node can be looked at\nworker1: no SSH connection\nIs it up?"
    )
    assert states(report)["worker1 Ray"] == "unreachable"
    assert states(report)["head endpoint"] == "as asked"


def test_a_docker_that_does_not_answer_is_one_row(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.engines["head"] = CommandFailed("the docker engine does not answer", node="head")
    report = site.status(tmp_path, monkeypatch)
    assert report.exit_code == 1
    assert states(report) == {
        "head Ray": "unreachable",
        "worker1 Ray": "rebooted since",
        "head endpoint": "as asked",
    }


def test_what_was_asked_cannot_be_told_without_the_image(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.image = SparkrailError("there is no image engine:1", node="head", remedy="Get it there.")
    report = site.status(tmp_path, monkeypatch)
    assert report.exit_code == 1
    assert report.error == (
        "what was asked for cannot be told\nhead: there is no image engine:1\nGet it there."
    )
    assert states(report)["head endpoint"] == "as asked"
    # That the node was rebooted is known without it.
    assert states(report)["head Ray"] == "rebooted since"


def test_all_is_away(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site.facts = {name: NodeUnreachable("no SSH connection", node="head") for name in site.facts}
    report = site.status(tmp_path, monkeypatch)
    assert report.exit_code == 1
    assert states(report) == {
        "head Ray": "unreachable",
        "worker1 Ray": "unreachable",
        "head endpoint": "unknown",
    }
