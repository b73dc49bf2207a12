"""Another cluster than the usual one: several workers, and a user who is not root."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.lab.layout import Lab, Shape
from tests.lab.product import Product, lab_command, load_stub, preload, product, use_stub

pytestmark = pytest.mark.lab

THREE = Lab("lab-test-three")
SHAPE = Shape(workers=2)


@pytest.fixture
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    """A cluster of three nodes, on which we are an ordinary user who may use docker."""
    try:
        lab_command(THREE, "down")
        lab_command(THREE, "up", "--workers=2")
        preload(THREE, SHAPE)
        whole = product(THREE, SHAPE, tmp_path_factory.mktemp("three"))
        found = whole.but(whole.folder, log_in_as_op)
        load_stub(found)
        for name in found.nodes[1:]:
            # What the error says that comes without it.
            found.on(name, "mkdir -p /models/tiny && chown op /models/tiny")
        yield found
    finally:
        lab_command(THREE, "down")


def log_in_as_op(document: dict[str, Any]) -> None:
    use_stub(document)
    for each in (document["head"], *document["workers"]):
        each["user"] = "op"


def test_several_workers_and_a_user_who_is_not_root(three: Product) -> None:
    first = three.deploy()
    joined = {f"worker join on {name}" for name in ("worker1", "worker2")}
    assert {"Ray head start on head", "vLLM serve on head", *joined} <= first.changed
    assert three.answer() == " of the stub"
    again = three.deploy()
    assert (again.outcome, again.changed) == ("unchanged", set())
    assert three.destroy().changed == {f"remove on {name}" for name in three.nodes}
    for name in three.nodes:
        assert three.containers(name, "--all") == {}
        assert three.on(name, "ls -A /root /home/op | grep sparkrail || true") == ""
