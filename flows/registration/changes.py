"""What a registration did with each object on the Prefect server, as one document."""

import json
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, Field

Outcome = Literal["created", "updated", "removed", "unchanged", "left"]


class Change(BaseModel, frozen=True):
    """One object on the Prefect server; one that is left is not looked into at all."""

    kind: str
    name: str
    outcome: Outcome
    detail: str = ""


class Registration(BaseModel, frozen=True):
    """What `sparkrail register --json` prints."""

    cluster: str
    state: Literal["completed", "failed"]
    outcome: Literal["unchanged", "changed"]
    seconds: float
    objects: tuple[Change, ...] = ()
    warnings: tuple[str, ...] = ()
    error: str | None = None
    exit_code: int = Field(0, exclude=True)


def outcome_of(changes: Sequence[Change]) -> Literal["unchanged", "changed"]:
    """Whether anything on the server is other than before."""
    same = {"unchanged", "left"}
    return "unchanged" if {change.outcome for change in changes} <= same else "changed"


def as_json(registration: Registration) -> str:
    """The document of `--json`."""
    document = registration.model_dump(mode="json")
    document["seconds"] = round(registration.seconds, 2)
    return json.dumps(document, indent=2)
