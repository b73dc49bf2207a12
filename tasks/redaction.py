"""Texts for others' eyes: without secrets, those too that only a node still knows."""

import re
import shlex
from collections.abc import Mapping
from typing import Any

from blocks.cluster import SECRET_VARIABLE
from tasks import hidden

SHOWN = "SPARKRAIL_SHOWN"  # The names of the variables that are no secrets.
HIDDEN = "***"
# What is a secret by its form or its place, whoever's it is: the argument of another program, say.
FORMS = (
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*KEY-----|\Z)", re.S), ""),
    (re.compile(r"(\bbearer\s+)[\w.~+/-]{6,}=*", re.I), r"\1"),
    (re.compile(r"\b(hf_|sk-|ghp_|nvapi-)[\w-]{10,}"), r"\1"),
    (re.compile(r"(://[^/\s:@]*:)[^/\s@]+(?=@)"), r"\1"),
    (re.compile(r"(--[a-z-]*(?:api-key|token|password|secret)[=\s,'\"]+)[^\s'\",]+"), r"\1"),
    (
        re.compile(
            rf"(\b{SECRET_VARIABLE.pattern.replace('.*', '[A-Z0-9_]*')}['\"]?"
            r"\s*[=:]\s*['\"]?)[^\s'\",}]+"
        ),
        r"\1",
    ),
)


def redacted(text: str) -> str:
    """A text without the secrets that we know, and without what looks like one."""
    text = hidden.shown(text)
    for form, before in FORMS:
        text = form.sub(before + HIDDEN, text)
    return text


def redacted_document(value: Any) -> Any:
    """The same of a JSON document, before it is written: quoting would disguise a secret."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {redacted(str(name)): redacted_document(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [redacted_document(each) for each in value]
    return value


def parse_environment(text: str) -> dict[str, str] | None:
    """The variables of a node.env; None of a file that is not as we write it."""
    try:
        words = shlex.split(text)
    except ValueError:
        return None
    pairs = [word.partition("=")[::2] for word in words if word != "export"]
    return dict(pairs) if all(name.isidentifier() for name, _ in pairs) else None


def hide_secrets_of(text: str) -> None:
    """From now on, no secret of this node.env shows: it may be older than today's block."""
    values = parse_environment(text) or {}
    hidden.hide(value for name, value in values.items() if _is_secret(name, values))


def redacted_environment(text: str) -> str:
    """A node.env with the names of all its variables, and the values of what is no secret."""
    values = parse_environment(text)
    if values is None:
        return "it is not as sparkrail writes it, and so not shown\n"
    return "".join(
        f"export {name}={HIDDEN if _is_secret(name, values) else redacted(shlex.quote(value))}\n"
        for name, value in values.items()
    )


def _is_secret(name: str, values: Mapping[str, str]) -> bool:
    shown = values.get(SHOWN, "").split()
    return name != SHOWN and (name not in shown or bool(SECRET_VARIABLE.fullmatch(name)))
