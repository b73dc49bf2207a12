"""Cluster specs as files: what is read, and what is said where it cannot be."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from blocks import Cluster
from tasks import inventory
from tasks.errors import InvalidSpec
from tasks.inventory import CLUSTERS, cluster_names, load_cluster

GOOD = """\
name: sparks
head: {name: head, address: 10.88.0.1, fabric_address: 10.77.0.1}
workers:
  - {name: worker1, fabric_address: 10.77.0.2}
image: {name: "engine:1"}
model: {name: tiny, path: /models/tiny}
serve: {tensor_parallel: 2}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "sparks.yaml"
    path.write_text(GOOD)
    return path


def refusal(path: Path | str) -> str:
    with pytest.raises(InvalidSpec) as caught:
        load_cluster(str(path))
    return str(caught.value)


def test_a_path_is_loaded(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_cluster(str(file)).name == "sparks"
    monkeypatch.chdir(file.parent)
    assert load_cluster("sparks.yaml").name == "sparks"
    assert load_cluster("./sparks.yaml").name == "sparks"


def test_a_name_is_a_file_of_the_checkout(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "CLUSTERS", file.parent)
    assert load_cluster("sparks").name == "sparks"
    assert cluster_names() == ["sparks"]


def test_the_clusters_stand_in_the_checkout() -> None:
    """Not in the working directory: a Prefect worker runs anywhere."""
    assert CLUSTERS.is_absolute()
    assert "example" in cluster_names()


def test_a_missing_file_lists_those_that_exist(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "CLUSTERS", file.parent)
    assert refusal("spark") == (
        f"{file.parent}/spark.yaml: no such file\n"
        "clusters here: sparks\n"
        f"Copy {file.parent}/example.yaml and fill in your nodes."
    )


def test_all_mistakes_stand_below_the_name_of_the_file(file: Path) -> None:
    text = GOOD.replace("10.77.0.2", "10.77.0.1").replace("head,", "head, prot: 22,")
    file.write_text(text.replace("name: sparks\n", "").replace("tensor_parallel: 2", "port: 80"))
    assert refusal(file) == (
        f"{file}: 5 mistakes\n"
        "name: (absent) — missing; it has no default\n"
        'head.prot: "22" — unknown key (did you mean port?); allowed: name, fabric_address, user, '
        "port, address, proxy_command, gpus, environment, transport\n"
        'workers[0].fabric_address: "10.77.0.1" — also used by head; allowed: one per node\n'
        'serve.port: "80" — allowed: 1024 or more\n'
        "serve.tensor_parallel: (absent) — missing; it has no default\n"
        f"Nothing was touched. {CLUSTERS}/example.yaml explains every key."
    )


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        pytest.param(
            GOOD + "name: other\n",
            "line 8, column 1: the key name stands already in line 1",
            id="key twice",
        ),
        pytest.param(
            "head:\n  gpus: 1\n  user: x\n  gpus: 2\n",
            "line 4, column 3: the key gpus stands already in line 2",
            id="inner key twice",
        ),
        pytest.param(
            "name: a\nhead: {a: 1\n",
            "line 3, column 1: expected ',' or '}', but got '<stream end>'",
            id="bracket left open",
        ),
        pytest.param(
            "name: a\n\thead: 1\n",
            "line 2, column 1: found character '\\t' that cannot start any token",
            id="tab",
        ),
        pytest.param(
            "name: a: b\n", "line 1, column 8: mapping values are not allowed here", id="two colons"
        ),
        pytest.param(
            "a: 1\n---\nb: 2\n", "line 2, column 1: but found another document", id="two documents"
        ),
        pytest.param(
            "a: !!python/object/apply:os.system [id]\n",
            "line 1, column 4: could not determine a constructor for the tag "
            "'tag:yaml.org,2002:python/object/apply:os.system'",
            id="python object",
        ),
        pytest.param("? [a, b]\n: 1\n", "line 1, column 3: a key must be a word", id="list as key"),
        pytest.param("", "the document: null — allowed: keys with values", id="empty"),
        pytest.param("- a\n", 'the document: ["a"] — allowed: keys with values', id="list"),
        pytest.param("text\n", 'the document: "text" — allowed: keys with values', id="text"),
    ],
)
def test_what_is_no_spec_is_refused(file: Path, text: str, mistake: str) -> None:
    file.write_text(text)
    assert refusal(file).splitlines()[:2] == [f"{file}: 1 mistake", mistake]


def test_a_file_that_cannot_be_read_is_refused(file: Path) -> None:
    file.write_bytes(b"name: \xff\n")
    assert refusal(file).splitlines()[1] == "not UTF-8: byte 6 is 0xff"
    assert refusal(f"{file.parent}/").splitlines()[1] == "Is a directory"
    file.write_bytes(b"name: \0\n")
    assert refusal(file).splitlines()[1].startswith("not YAML: ")


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_file_that_is_not_ours_to_read_is_refused(file: Path) -> None:
    file.chmod(0)
    assert refusal(file).splitlines()[1] == "Permission denied"


def test_values_are_the_text_that_was_written(file: Path) -> None:
    """YAML 1.1 alone would make false, 8, 1.1, a date and seconds of these."""
    values = {"A": "no", "B": "010", "C": "1.10", "D": "2026-01-01", "E": "12:30:45", "F": "0x10"}
    lines = "".join(f"  {name}: {value}\n" for name, value in values.items())
    file.write_text(f"{GOOD}environment:\n{lines}")
    assert load_cluster(str(file)).environment == values


def test_anchors_and_merges_work(file: Path) -> None:
    file.write_text(
        GOOD.replace("  - {name: worker1,", "  - {<<: &login {user: ada}, name: worker1,").replace(
            "head: {", "head: {user: root, "
        )
    )
    cluster = load_cluster(str(file))
    assert (cluster.head.user, cluster.workers[0].user) == ("root", "ada")


def places(model: type[BaseModel], at: str = "") -> Iterator[str]:
    """Every field of the spec, as `head.fabric_address`."""
    for name, field in model.model_fields.items():
        yield f"{at}{name}"
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from places(inner, f"{at}{name}.")


def keys(value: Any, at: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield f"{at}{key}"
            yield from keys(inner, f"{at}{key}.")
    for inner in value if isinstance(value, list) else ():
        yield from keys(inner, at)


def test_the_example_loads_and_names_every_key() -> None:
    cluster = load_cluster("example")
    assert len(cluster.workers) == 1
    document = yaml.safe_load((CLUSTERS / "example.yaml").read_text())
    assert set(places(Cluster)) - set(keys(document)) == {"workers.proxy_command"}


def test_what_the_example_calls_a_default_is_one() -> None:
    lines = (CLUSTERS / "example.yaml").read_text().splitlines()
    document = yaml.safe_load("\n".join(lines))
    checked = 0
    for part, model in (("ssh", "Ssh"), ("image", "Image"), ("serve", "Serve"), ("ray", "Ray")):
        fields = Cluster.model_fields[part].annotation
        assert fields is not None and fields.__name__ == model
        for name, field in fields.model_fields.items():
            said = lines[
                next(n for n, line in enumerate(lines) if line.startswith(f"  {name}:")) - 1
            ]
            if said.endswith("Default."):
                assert document[part][name] == field.default, f"{part}.{name}"
                checked += 1
    assert checked >= 10
