"""How specs of containers differ, in plain words."""

from typing import Any

import pytest

from blocks import Cluster
from flows.diff import machine, of_container
from tasks.containers import Container
from tasks.differences import changed_variables, changed_words, explained
from tasks.records import OnNode
from tasks.releases import compare
from tests.unit.releases import release, wanted
from tests.unit.specs import RUN, spec
from tests.unit.test_releases import running

THEN = spec(environment={"A": "1", "B": "1"}, serve={"arguments": ["--seed=1"]})
RAY, SERVE = "sparkrail-sparks-ray", "sparkrail-sparks-serve"


def told(now: Cluster, content: str = "sha256:1", weights: str = "w") -> list[str]:
    """The reasons of `decide`, where the recorded release runs."""
    want, before = wanted(now, content, weights), release(THEN)
    have: dict[str, dict[str, Container]] = running(wanted(THEN))
    return list(compare(now, want, have, RUN, [before]).reasons)


def but(**changes: Any) -> Cluster:
    return spec(**{"environment": THEN.environment, "serve": {"arguments": ["--seed=1"]}} | changes)


CHANGED = "its spec has changed"


@pytest.mark.parametrize(
    ("now", "reasons"),
    [
        pytest.param(but(), [], id="the same"),
        pytest.param(
            but(serve={"arguments": ["--seed=2", "--max-model-len=8"]}),
            [
                f"{SERVE} on head: {CHANGED} (vLLM's arguments (without --seed=1, with --seed=2 "
                "--max-model-len=8))"
            ],
            id="arguments",
        ),
        pytest.param(
            but(environment={"A": "2", "C": "3"}),
            [
                f"{each} on {node}: {CHANGED} (the variables (A=2 instead of 1, without B, C=3))"
                for node, each in (("head", RAY), ("head", SERVE), ("worker1", RAY))
            ],
            id="variables",
        ),
        pytest.param(
            but(image={"name": "engine:2"}),
            [
                f"{each} on {node}: {CHANGED} (the image: engine:1 -> engine:2)"
                for node, each in (("head", RAY), ("head", SERVE), ("worker1", RAY))
            ],
            id="the image's name",
        ),
    ],
)
def test_what_the_spec_asks_for(now: Cluster, reasons: list[str]) -> None:
    assert told(now) == reasons


def test_another_content_of_the_image_and_other_files_of_the_model() -> None:
    assert told(but(), content="sha256:2")[0] == (f"{RAY} on head: {CHANGED} (the image's content)")
    assert told(but(), weights="other") == [f"{SERVE} on head: {CHANGED} (the model's files)"]


def test_a_container_that_nothing_is_known_of() -> None:
    want = wanted(THEN).nodes["head"][0]
    assert explained([release()], "head", "unknown", want, (), {}) == ""


@pytest.mark.parametrize(
    ("have", "want", "said"),
    [
        pytest.param({"A": "1"}, {"A": "1"}, "a secret one", id="nothing that may be shown"),
        pytest.param(
            {}, {"SPARKRAIL_GPUS": "2"}, "one of sparkrail's own", id="what is told elsewhere"
        ),
    ],
)
def test_variables(have: dict[str, str], want: dict[str, str], said: str) -> None:
    assert changed_variables(have, want) == said


def test_the_order_of_arguments() -> None:
    assert changed_words(["--a", "--b"], ["--b", "--a"]) == "in another order"


BEFORE = OnNode(interface="eth1", driver="580.1", boot_id="1")


@pytest.mark.parametrize(
    ("now", "said"),
    [
        pytest.param(BEFORE, [], id="the same"),
        pytest.param(BEFORE.model_copy(update={"boot_id": "2"}), ["it was rebooted"], id="boot"),
        pytest.param(
            BEFORE.model_copy(update={"driver": "590.2"}),
            ["its driver is 590.2 instead of 580.1"],
            id="driver",
        ),
        pytest.param(
            BEFORE.model_copy(update={"interface": "eth2"}),
            ["its fabric address is on eth2 instead of eth1"],
            id="interface",
        ),
        pytest.param(
            BEFORE.model_copy(update={"rdma": ("mlx5_0:1",)}),
            ["its RDMA ports are mlx5_0:1"],
            id="RDMA",
        ),
    ],
)
def test_the_machine(now: OnNode, said: list[str]) -> None:
    assert machine(BEFORE, now) == said


def test_reasons_are_told_by_node_and_thing() -> None:
    assert of_container(f"{RAY} on worker1: it is exited") == {
        "node": "worker1",
        "what": RAY,
        "difference": "it is exited",
    }
    assert of_container("10.77.0.2 is not alive in Ray") == {
        "node": "",
        "what": "cluster",
        "difference": "10.77.0.2 is not alive in Ray",
    }
