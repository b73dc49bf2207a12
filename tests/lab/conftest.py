"""A lab for the tests of the product, and sparkrail with its specs on it."""

from collections.abc import Iterator

import pytest

from tests.lab.layout import Lab, Shape
from tests.lab.product import Product, lab_command, load_stub, preload, product, use_stub

LAB = Lab("lab-test")
SHAPE = Shape(workers=1)


@pytest.fixture(scope="session")
def lab_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    """sparkrail with the spec that the lab wrote: real Ray and real vLLM over two nodes."""
    try:
        lab_command(LAB, "down")
        lab_command(LAB, "up")
        preload(LAB, SHAPE)
        yield product(LAB, SHAPE, tmp_path_factory.mktemp("lab-test"))
    finally:
        lab_command(LAB, "down")


@pytest.fixture(scope="session")
def _stub(lab_cluster: Product, tmp_path_factory: pytest.TempPathFactory) -> Product:
    stub = lab_cluster.but(tmp_path_factory.mktemp("stub"), use_stub)
    load_stub(stub)
    return stub


@pytest.fixture(scope="module")
def stub(_stub: Product) -> Iterator[Product]:
    """sparkrail with real Ray and, at the process boundary, a stub of vLLM that starts at once."""
    yield _stub
    _stub.clear()
