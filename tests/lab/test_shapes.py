"""Other clusters than the usual one: several workers, and a user who is not root."""

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
    """A cluster of three nodes."""
    try:
        lab_command(THREE, "down")
        lab_command(THREE, "up", "--workers=2")
        preload(THREE, SHAPE)
        found = product(THREE, SHAPE, tmp_path_factory.mktemp("three"))
        stub = found.but(found.folder, use_stub)
        load_stub(stub)
        yield stub
    finally:
        lab_command(THREE, "down")


def goes_round(stub: Product) -> None:
    """From nothing to nothing."""
    first = stub.deploy()
    joined = {f"worker join on {name}" for name in stub.nodes[1:]}
    assert {"Ray head start on head", "vLLM serve on head", *joined} <= first.changed
    assert stub.answer() == " of the stub"
    assert stub.deploy().changed == set()
    assert stub.destroy().changed == {f"remove on {name}" for name in stub.nodes}
    for name in stub.nodes:
        assert stub.containers(name, "--all") == {}


def test_several_workers(three: Product) -> None:
    goes_round(three)


def test_a_user_who_is_not_root(stub: Product, tmp_path_factory: pytest.TempPathFactory) -> None:
    def log_in_as_op(document: dict[str, Any]) -> None:
        document["name"] = "ops"
        for each in (document["head"], *document["workers"]):
            each["user"] = "op"

    stub.destroy()
    ops = stub.but(tmp_path_factory.mktemp("ops"), log_in_as_op)
    # As the remedy of the error says that would come without it.
    stub.on("worker1", "rm -rf /models/tiny && mkdir -p /models/tiny && chown op /models/tiny")
    goes_round(ops)
    assert ops.on("head", "ls -A /home/op") == ops.on("worker1", "ls -A /home/op")
    stub.on("worker1", "chown -R root: /models/tiny")
