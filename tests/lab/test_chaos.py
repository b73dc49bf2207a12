"""The short form of the fault trial: `make chaos` runs every fault at every step."""

import pytest

from tests.lab import chaos
from tests.lab.product import Product

pytestmark = [pytest.mark.lab, pytest.mark.extended]


def test_faults_are_overcome(stub: Product) -> None:
    stub.deploy()
    cells = chaos.run(stub, chaos.SHORT, seconds=10)
    print(chaos.matrix(cells))
    assert [cell.wrong for cell in cells] == [""] * len(chaos.SHORT)
