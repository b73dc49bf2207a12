"""Secret values that this process knows, and texts without them.

What an engine, a node or a server says ends up in errors, logs and the Prefect UI, and any of them
may repeat a key that it was given.
"""

import json
import logging
import shlex
from collections.abc import Iterable
from urllib.parse import quote

from tasks.errors import SparkrailError

SHORTEST = 6  # Replacing a shorter one would garble texts, and guard nothing.
_values: set[str] = set()


def hide(values: Iterable[str]) -> None:
    """From now on, none of these shows, nor as a program quotes it or line by line."""
    for value in values:
        for part in (value, *value.splitlines()):
            quoted = (json.dumps(part)[1:-1], repr(part)[1:-1], shlex.quote(part), quote(part))
            _values.update(form for form in (part, *quoted) if len(part) >= SHORTEST)


def shown(text: str) -> str:
    """The text as it may be shown."""
    # The longest first: one may be a part of another.
    for value in sorted(_values, key=len, reverse=True):
        text = text.replace(value, "***")
    return text


def clean(error: BaseException) -> None:
    """Nothing that an error says gives a value away, nor what led to it: Prefect logs it all."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        left += [each.__cause__, each.__context__]
        if isinstance(each, SparkrailError):
            each.brief, each.details, each.remedy = map(
                shown, (each.brief, each.details, each.remedy)
            )
            each.args = (each.brief, each.node, each.details, each.remedy)
        else:
            each.args = tuple(shown(word) if isinstance(word, str) else word for word in each.args)


class Filter(logging.Filter):
    """For a logger: its messages are as they may be shown."""

    def filter(self, record: logging.LogRecord) -> bool:
        if _values:
            record.msg, record.args = shown(record.getMessage()), None
        return True
