"""What may be done about others who hold GPU memory; the part `residue` of a cluster spec."""

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from blocks.values import Number, Spec, User, Words, matching

CONTAINER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
UNIT = re.compile(r"[A-Za-z0-9:_.\\@-]+")
KINDS = (".service", ".scope")


def _unit(value: str) -> str:
    return value if value.endswith(KINDS) else f"{value}.service"


def _pattern(value: str) -> str:
    if len(re.sub(r"[*?\s]", "", value)) < 3:
        raise ValueError("would match nearly everything; allowed: a command with * and ?")
    return value


Container = Annotated[str, matching(CONTAINER, "the name of a container")]
Unit = Annotated[str, matching(UNIT, "the name of a systemd unit"), AfterValidator(_unit)]
Pattern = Annotated[Words, AfterValidator(_pattern)]


class Holder(Spec):
    """One who may hold GPU memory: a container, a systemd unit, or a user's command."""

    container: Container | None = None
    unit: Unit | None = None
    command: Pattern | None = None
    user: User | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if sum(each is not None for each in (self.container, self.unit, self.command)) != 1:
            raise ValueError("allowed: one of container, unit, and command with user")
        if (self.command is None) != (self.user is None):
            raise ValueError("command and user belong together: two people may run the same")
        return self


class Residue(Spec):
    """What happens to others who hold GPU memory when there is too little of it."""

    policy: Literal["report", "stop-listed", "stop-all-except"] = "report"
    listed: tuple[Holder, ...] = ()
    excepted: tuple[Holder, ...] = ()
    free_mib: Annotated[Number, Field(ge=0)] | None = None
    grace_seconds: Annotated[Number, Field(ge=1, le=600)] = 30
    restore: bool = False
    drop_caches: bool = False
    sudo: bool = False

    @model_validator(mode="after")
    def _something_to_stop(self) -> Self:
        if self.policy == "stop-listed" and not self.listed:
            raise ValueError("stop-listed stops nobody; allowed: at least one entry in listed")
        return self
