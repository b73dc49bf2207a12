"""The table of `make bench`, and what it times."""

import pytest

from tests.bench.rows import Row, compared, table
from tests.bench.unchanged import watched


@pytest.mark.parametrize(
    ("limits", "wanted", "met"),
    [
        ({"at_most": 0.4}, "<= 0.4", False),
        ({"at_most": 0.5}, "<= 0.5", True),
        ({"at_least": 0.5}, ">= 0.5", True),
        ({"at_least": 2.5}, ">= 2.5", False),
        ({}, "", None),
    ],
)
def test_medians_are_compared(limits: dict[str, float], wanted: str, met: bool | None) -> None:
    row = compared("copy", [9.0, 2.0, 1.0], "s", other="by hand", others=[4.0, 4.0], **limits)
    assert row == Row("copy", 2.0, "s", "by hand: 4 s", 0.5, wanted, met)


def test_table() -> None:
    rows = [
        Row("one", 1.234, "s", "two: 4 s", 0.3085, "<= 0.3", False),
        Row("memory", 12, "MB"),
    ]
    assert table(rows).splitlines()[2:] == [
        "| one | 1.23 s | two: 4 s | 0.31 | <= 0.3 (missed) |",
        "| memory | 12 MB |  |  |  |",
    ]


def test_all_that_asks_a_node_something_is_timed() -> None:
    """By its name, which changes with the code."""
    with watched() as found:
        assert found.seconds() == 0
