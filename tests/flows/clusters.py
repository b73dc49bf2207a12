"""Clusters to register with a Prefect server, each with a spec file of its own."""

from pathlib import Path
from typing import Any

import yaml

from flows.register import register
from flows.registration.changes import Registration
from tests.unit.specs import DOCUMENT

NIGHTLY = {"cron": "0 4 * * *", "timezone": "Europe/Berlin"}


class Spec:
    """The spec of a cluster."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.path = folder / f"{self.name}.yaml"

    def register(self, nightly: dict[str, str] | None = NIGHTLY, **options: Any) -> Registration:
        document = DOCUMENT | {"name": self.name} | ({"nightly": nightly} if nightly else {})
        self.path.write_text(yaml.safe_dump(document))
        return register(str(self.path), **options)


def outcomes(registration: Registration) -> dict[str, str]:
    """What became of each object."""
    assert registration.error is None
    return {f"{each.kind} {each.name}": each.outcome for each in registration.objects}
