"""Errors: what they print, and that they survive Prefect's pickling."""

import pickle

import pytest

from tasks import errors
from tasks.errors import CommandFailed, PreflightFailed, SparkrailError

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, SparkrailError)
]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        pytest.param(SparkrailError("it broke"), "it broke", id="brief"),
        pytest.param(SparkrailError("it broke", node="head"), "head: it broke", id="node"),
        pytest.param(
            SparkrailError("it broke", node="head", details="last line", remedy="Mend it."),
            "head: it broke\nlast line\nMend it.",
            id="all",
        ),
        pytest.param(
            SparkrailError("it broke", remedy="Mend it."), "it broke\nMend it.", id="remedy"
        ),
    ],
)
def test_text_is_node_and_what_failed_then_what_it_said_then_what_to_do(
    error: SparkrailError, text: str
) -> None:
    assert str(error) == text


@pytest.mark.parametrize("kind", KINDS)
def test_errors_survive_pickling(kind: type[SparkrailError]) -> None:
    error = kind("it broke", node="head", details="said", remedy="Mend it.")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (again.brief, again.node, again.details, again.remedy) == (
        "it broke",
        "head",
        "said",
        "Mend it.",
    )
    assert str(again) == str(error)


def test_what_an_error_carries_survives_pickling() -> None:
    error = PreflightFailed("blocked")
    error.problems = ["disk"]
    assert pickle.loads(pickle.dumps(error)).problems == ["disk"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_says_what_it_means_and_stands_in_the_tree(kind: type[SparkrailError]) -> None:
    assert kind.__doc__
    assert errors.__doc__ and kind.__name__ in errors.__doc__


def test_errors_are_told_apart_by_their_kind() -> None:
    assert len(KINDS) == len({kind.__name__ for kind in KINDS}) > 10
    assert not issubclass(CommandFailed, errors.NodeUnreachable)
