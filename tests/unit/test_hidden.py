"""Secret values in texts that others made."""

import logging
from collections.abc import Iterator

import pytest

from tasks import hidden
from tasks.converge import log
from tasks.errors import CommandFailed


@pytest.fixture(autouse=True)
def values(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(hidden, "_values", set())
    hidden.hide(["sk-abcdef", "sk-abcdef-and-more", "7", ""])
    yield


def test_values_do_not_show() -> None:
    said = "key sk-abcdef-and-more refused, 7 others; sk-abcdef"
    assert hidden.shown(said) == "key *** refused, 7 others; ***"


def test_an_error_is_cleaned_wherever_it_holds_one() -> None:
    error = CommandFailed(
        "exit code 1: x sk-abcdef", node="head", details="no sk-abcdef", remedy="Take sk-abcdef out"
    )
    hidden.clean(error)
    assert str(error) == "head: exit code 1: x ***\nno ***\nTake *** out"
    assert "sk-" not in repr(error)


def test_our_logger_shows_none(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sparkrail"):
        log.info("%s was refused by %d", "sk-abcdef", 7)
    assert caplog.messages == ["*** was refused by 7"]
