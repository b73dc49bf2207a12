"""Short forms of the fault trial: `make chaos` runs every fault at every step."""

from collections.abc import Iterable

import pytest

from tests.lab import chaos
from tests.lab.product import Product

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def serving(stub: Product) -> Product:
    stub.deploy()
    return stub


@pytest.mark.parametrize(
    "cells",
    [
        pytest.param(chaos.SHORT, id="short"),
        pytest.param(chaos.LONGER, id="longer", marks=pytest.mark.extended),
    ],
)
def test_faults_are_overcome(serving: Product, cells: Iterable[tuple[str, str]]) -> None:
    found = chaos.run(serving, cells, seconds=10)
    print(chaos.matrix(found))
    assert [cell.wrong for cell in found] == [""] * len(found)
