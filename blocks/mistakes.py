"""Mistakes in a spec, in the user's words: what pydantic found, and what is allowed instead."""

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel

Location = tuple[str | int, ...]
ALLOWED = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a smaller number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "tuple_type": "a list, such as [first, second]",
    "dict_type": "keys with values",
    "model_type": "keys with values",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "{ge:.10g} or more",
    "less_than_equal": "{le:.10g} or less",
    "literal_error": "{expected}",
}


def field_path(location: Location) -> str:
    """As the user would point at it: `workers[0].fabric_address`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".") or "the document"


def shown(value: object) -> str:
    """A value in one short line."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:79]}…"


def in_words(model: type[BaseModel], problem: Mapping[str, Any]) -> str:
    """What is wrong at a place, and what is allowed there."""
    kind, location, context = problem["type"], problem["loc"], problem.get("ctx", {})
    if kind == "missing":
        return "missing; it has no default"
    if kind == "extra_forbidden":
        return _unknown_key(str(location[-1]), _keys(model, location[:-1]))
    if kind in ALLOWED:
        return f"allowed: {ALLOWED[kind].format_map(context)}"
    return str(problem["msg"]).removeprefix("Value error, ")


def _unknown_key(key: str, keys: list[str]) -> str:
    near = difflib.get_close_matches(key, keys, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"unknown key{hint}; allowed: {', '.join(keys)}"


def _keys(model: type[BaseModel], location: Location) -> list[str]:
    for part in location:
        if isinstance(part, str):
            model = next(_models(model.model_fields[part].annotation))
    return list(model.model_fields)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)
