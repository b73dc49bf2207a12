"""The archive for a bug report: what is in it, and what is not."""

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows import bundle as flow
from flows.steps import Steps
from tasks import bundles, hidden
from tasks.bundles import as_text, gather_node, write
from tasks.errors import CommandFailed, NodeUnreachable
from tasks.remote import Result
from tasks.standings import Standing
from tests.unit.specs import DOCUMENT, RUN, spec

ENVIRONMENT = "export SITE_WORD='it is secret'\nexport A=b\nexport SPARKRAIL_SHOWN=A\n"


@pytest.fixture(autouse=True)
def values(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(hidden, "_values", set())
    yield


def read(file: Path) -> dict[str, str]:
    with tarfile.open(file) as archive:
        return {
            member.name: io.TextIOWrapper(archive.extractfile(member) or io.BytesIO()).read()
            for member in archive
        }


@pytest.mark.parametrize(
    ("name", "part", "text"),
    [
        pytest.param("a.log", "it is secret\n", "***\n", id="a log"),
        pytest.param("a.json", {"a": ["it is secret", 1]}, {"a": ["***", 1]}, id="a document"),
        pytest.param("a.json", '{"a": "it is secret"}', {"a": "***"}, id="JSON of a node"),
        pytest.param("a.json", '{"a": "it is secret', '{"a": "***', id="JSON that is cut off"),
        pytest.param(
            "nodes/head/run/node.env",
            ENVIRONMENT,
            "export SITE_WORD=***\nexport A=b\nexport SPARKRAIL_SHOWN=A\n",
            id="variables",
        ),
    ],
)
def test_no_part_has_secrets(name: str, part: Any, text: Any) -> None:
    hidden.hide(["it is secret"])
    said = as_text(name, part)
    assert (json.loads(said) if isinstance(text, dict) else said) == text


def test_the_archive_is_whole_and_for_nobody_else(tmp_path: Path) -> None:
    file = tmp_path / "x.tar.gz"
    size = write(file, "folder", {"a.txt": "a\n", "b/c.json": {"d": 1}})
    assert file.stat().st_size == size
    assert file.stat().st_mode & 0o777 == 0o600
    assert read(file) == {"folder/a.txt": "a\n", "folder/b/c.json": '{\n  "d": 1\n}\n'}
    assert list(tmp_path.iterdir()) == [file]


# --- of a node ------------------------------------------------------------------------------------


class Node:
    """A node that tells its files, and nothing of its docker."""

    def run(self, argv: tuple[str, ...], **_how: Any) -> Result:
        files = "\x1erun/launch\n#!/bin/sh\n\x1eengine.json\n{}\n"
        return Result(files if argv[2] == bundles.READ else "", "", 0)


def no_docker(*_words: Any) -> Any:
    raise CommandFailed("the docker engine does not answer", node="head", remedy="Is it up?")


def test_what_cannot_be_read_of_a_node_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = spec()
    monkeypatch.setattr(bundles, "connect", lambda _cluster, _node: Node())
    monkeypatch.setattr(bundles, "know_secrets", lambda _cluster, _node: ENVIRONMENT)
    for name in ("observe_facts", "engine"):
        monkeypatch.setattr(bundles, name, no_docker)
    monkeypatch.setattr("tasks.log_streams.connect", lambda _cluster, _node: Node())
    monkeypatch.setattr("tasks.log_streams.engine", no_docker)
    outcome = gather_node.fn(cluster, cluster.head, RUN, lines=5)
    assert outcome.detail == "4 files, 5 not to be read"
    assert set(outcome.data) == {"run/node.env", "run/launch", "engine.json", "not-read.txt"}
    assert outcome.data["run/launch"] == "#!/bin/sh\n"
    assert outcome.data["not-read.txt"].splitlines()[:2] == [
        "its facts: head: the docker engine does not answer",
        "Is it up?",
    ]


# --- as a whole -----------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "sparks.yaml"
    file.write_text(yaml.safe_dump(DOCUMENT))
    return str(file)


def tell(steps: Steps) -> None:
    row = Standing(node="head", what="Ray", state="ended", asked="Ray", runs="it is secret")
    steps.running = (row,)


def test_a_node_that_is_away_is_told_in_it(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(_cluster: Any, node: Any) -> Any:
        if node.name == "worker1":
            raise NodeUnreachable("no SSH connection", node="worker1", remedy="Is it up?")
        return Node()

    monkeypatch.setattr(flow, "tell", tell)
    monkeypatch.setattr(bundles, "connect", connect)
    monkeypatch.setattr(bundles, "observe_facts", no_docker)
    monkeypatch.setattr(bundles, "engine", no_docker)
    monkeypatch.setattr("tasks.log_streams.connect", connect)
    monkeypatch.setattr("tasks.log_streams.engine", no_docker)

    def know_secrets(_cluster: Any, _node: Any) -> str:
        hidden.hide(["it is secret"])
        return ENVIRONMENT

    monkeypatch.setattr(bundles, "know_secrets", know_secrets)
    file = tmp_path / "out" / "x.tar.gz"
    refused = flow.bundle(path, 5, str(file))
    assert (refused.exit_code, refused.file) == (1, None)
    assert refused.told == (
        f"{file} cannot be written: No such file or directory; give another one by --output"
    )
    file.parent.mkdir()
    made = flow.bundle(path, 5, str(file))
    assert (made.exit_code, made.file) == (0, str(file))
    assert made.missing == {"worker1": "worker1: no SSH connection\nIs it up?"}
    assert json.loads(made.as_json())["missing"] == made.missing
    found = {name.partition("/")[2]: text for name, text in read(file).items()}
    assert found["nodes/worker1/not-read.txt"] == "worker1: no SSH connection\nIs it up?\n"
    assert found["status.txt"] == "head  Ray  ended: ***\n"
    assert json.loads(found["status.json"])["running"][0]["runs"] == "***"
    assert yaml.safe_load(found["spec.yaml"])["name"] == "sparks"
    assert "Look it through before you send it." in found["README.txt"]
    assert {"nodes/head/run/node.env", "nodes/head/run/launch", "versions.json"} <= set(found)
    assert not any("it is secret" in text for text in found.values())
