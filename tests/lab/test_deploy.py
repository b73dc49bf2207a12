"""The main job with nothing left out: real Ray and real vLLM over two nodes."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.lab.product import Product

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def cluster(lab_cluster: Product) -> Iterator[Product]:
    lab_cluster.clear()
    yield lab_cluster
    lab_cluster.clear()


@pytest.fixture(scope="module")
def answer(cluster: Product) -> str:
    """What the model says after the first deploy."""
    first = cluster.deploy()
    assert first.outcome == "changed"
    assert {"worker join on worker1", "vLLM serve on head"} <= first.changed
    return cluster.answer()


def test_first_deploy_answers(answer: str) -> None:
    assert len(answer.split()) == 8


@pytest.mark.usefixtures("answer")
def test_deploys_that_follow_change_nothing(
    cluster: Product, answer: str, record_property: Any
) -> None:
    before = [cluster.containers(name) for name in cluster.nodes]
    for _ in range(2):
        said = cluster.deploy()
        assert (said.outcome, said.changed) == ("unchanged", set())
        assert {row["outcome"] for row in said.document["steps"]} == {"unchanged"}
        record_property("seconds", said.seconds)
        print(f"unchanged after {said.seconds:.1f} s")
    assert [cluster.containers(name) for name in cluster.nodes] == before
    assert cluster.answer() == answer


def test_status_tells_what_runs(cluster: Product, answer: str) -> None:
    said = cluster.run("status")
    assert (said.code, said.outcome) == (0, "unchanged")
    rows = said.document["running"]
    assert {(row["node"], row["what"]) for row in rows} == {
        ("head", "Ray"),
        ("head", "server"),
        ("worker1", "Ray"),
        ("head", "endpoint"),
    }
    assert {row["state"] for row in rows} == {"as asked"}
    assert rows[-1]["runs"].startswith(f"answers '{answer[:4]}")


@pytest.mark.usefixtures("answer")
def test_a_lost_rank_is_healed(cluster: Product, answer: str) -> None:
    cluster.send_signal("worker1", "ray::RayWorkerP")
    said = cluster.deploy()
    assert said.changed == {"stop on head", "vLLM serve on head"}
    assert cluster.answer() == answer


def test_one_node_gives_the_same_answer(
    cluster: Product, answer: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def on_the_head_only(document: dict[str, Any]) -> None:
        document["name"] = "single"
        document["workers"] = []
        document["serve"] |= {"port": 8001, "tensor_parallel": 1}
        document["ray"]["port"] = 6380

    single = cluster.but(tmp_path_factory.mktemp("single"), on_the_head_only)
    cluster.destroy()
    single.deploy()
    assert single.answer() == answer
    single.destroy()
