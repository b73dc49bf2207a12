"""The base of every part of a spec, and the kinds of values that several parts hold."""

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}")


def matching(pattern: re.Pattern[str], allowed: str) -> AfterValidator:
    def check(value: str) -> str:
        if not pattern.fullmatch(value):
            raise ValueError(f"allowed: {allowed}")
        return value

    return AfterValidator(check)


def one_line(value: str) -> str:
    if "\0" in value or "\n" in value:
        raise ValueError("allowed: text without line breaks and NUL")
    return value


def not_empty(value: str) -> str:
    if not value:
        raise ValueError("empty; leave the key out, or give a value")
    return value


def no_bool(value: object) -> object:
    # Python counts true as 1.
    if isinstance(value, bool):
        raise ValueError("allowed: a number")
    return value


User = Annotated[str, matching(USER, "a login name")]
Number = Annotated[int, BeforeValidator(no_bool)]
Words = Annotated[str, AfterValidator(one_line), AfterValidator(not_empty)]


class Spec(BaseModel):
    """Base of every part: frozen, and a key that we do not know is a mistake."""

    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=True)
