"""Secret values in texts that others made."""

import json
import logging
import shlex
import traceback
from collections.abc import Callable, Iterator
from urllib.parse import quote

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


@pytest.mark.parametrize(
    "quoted", [str, json.dumps, repr, shlex.quote, quote, lambda value: repr({"KEY": value})]
)
@pytest.mark.parametrize("value", ["a'b\"c\\d$e", "pass word", "first line\nthe second"])
def test_nor_do_they_as_a_program_quotes_them(value: str, quoted: Callable[[str], str]) -> None:
    hidden.hide([value])
    left = hidden.shown(f"it has {quoted(value)}.")
    for part in ("b", "word", "first", "second"):
        assert part not in left or part not in value


def test_nor_does_a_line_of_one() -> None:
    hidden.hide(["-----BEGIN KEY-----\nAAAABBBB\n-----END KEY-----"])
    assert hidden.shown("node1 | AAAABBBB") == "node1 | ***"


def test_an_error_is_cleaned_wherever_it_holds_one() -> None:
    error = CommandFailed(
        "exit code 1: x sk-abcdef", node="head", details="no sk-abcdef", remedy="Take sk-abcdef out"
    )
    hidden.clean(error)
    assert str(error) == "head: exit code 1: x ***\nno ***\nTake *** out"
    assert "sk-" not in repr(error)


def test_so_are_a_mistake_of_ours_and_what_led_to_an_error() -> None:
    """Prefect logs the traceback of a step that failed, with all of them."""
    try:
        try:
            raise ValueError("Invalid header value b'Bearer sk-abcdef\\n'")
        except ValueError as first:
            raise CommandFailed("it failed") from first
    except CommandFailed as error:
        hidden.clean(error)
        text = "".join(traceback.format_exception(error))
    assert "Bearer ***" in text
    assert "sk-abcdef\\n" not in text


def test_nor_does_its_repr_give_one_away() -> None:
    with pytest.raises(UnicodeEncodeError) as caught:
        "Bearer sk-abcdef€".encode("latin-1")
    hidden.clean(caught.value)
    assert "sk-abcdef" not in repr(caught.value)


def test_our_logger_shows_none(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sparkrail"):
        log.info("%s was refused by %d", "sk-abcdef", 7)
    assert caplog.messages == ["*** was refused by 7"]
