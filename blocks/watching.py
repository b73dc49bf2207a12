"""How a server is judged: by the canary when it was started, and by the watch while it runs."""

from typing import Annotated, Literal

from pydantic import Field

from blocks.values import Number, Spec


class Canary(Spec):
    """The completions that a new server must give, compared with the last good release's."""

    tokens: Annotated[Number, Field(ge=1, le=4096)] = 64
    again_seconds: Annotated[Number, Field(ge=0, le=3600)] = 30
    slower_percent: Annotated[Number, Field(ge=1, le=1000)] = 30
    on_slower: Literal["warn", "fail"] = "warn"


class Watch(Spec):
    """How often the server is looked at, and what makes the watch act; off unless switched on."""

    minutes: Annotated[Number, Field(ge=1, le=59)] = 5
    failures: Annotated[Number, Field(ge=1, le=20)] = 3
