"""The files in `deployments/` with their variables filled in, by Prefect's own templates."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from prefect.utilities.templating import apply_values

ROOT = Path(__file__).resolve().parents[2]
DEPLOYMENTS = ROOT / "deployments" / "prefect.yaml"
AUTOMATIONS = ROOT / "deployments" / "automations.yaml"


def filled_in(path: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    """A file with `{{ $NAME }}` replaced; what else is in braces is left for who reads it later."""
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    with _environment(variables):
        filled: Any = apply_values(document, {}, remove_notset=False)
    assert isinstance(filled, dict), f"{path}: not a mapping"
    return filled


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
