"""A lab for the tests of the product, sparkrail with its specs on it, and Prefect to run it."""

from collections.abc import Iterator

import pytest

from tests.lab.flow_runs import FlowRuns
from tests.lab.layout import Lab, Shape
from tests.lab.prefect_processes import Processes
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


@pytest.fixture(scope="session")
def _prefect(_stub: Product, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    _stub.write()
    processes = Processes(tmp_path_factory.mktemp("prefect"), str(_stub.spec), first_port=4300)
    try:
        processes.start_server()
        processes.register()
        yield processes
    finally:
        processes.stop()


@pytest.fixture
def prefect(_prefect: Processes, stub: Product) -> Processes:
    """A Prefect server and worker that deploy with the fast engine, whatever befell them."""
    stub.write()
    _prefect.start_server()
    _prefect.start_worker()
    return _prefect


@pytest.fixture
def runs(prefect: Processes) -> Iterator[FlowRuns]:
    found = FlowRuns(prefect)
    yield found
    found.close()
