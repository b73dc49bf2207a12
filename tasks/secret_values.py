"""The values of a cluster's secrets block, read once per process and kept out of every repr."""

from collections.abc import Mapping
from functools import lru_cache

from blocks import Cluster
from blocks.cluster import DERIVED_VARIABLES, VARIABLE
from tasks import hidden
from tasks.errors import InvalidSpec
from tasks.topology import Secrets

# API keys of releases that were restored, by cluster: the block may hold another one meanwhile.
_restored: dict[str, str] = {}


def load_secrets(cluster: Cluster) -> Secrets:
    """What the spec's secrets block holds; nothing when the spec names none."""
    return _load(cluster.secrets) if cluster.secrets else Secrets()


def use_key(cluster: Cluster, key: str) -> None:
    """From now on the server of this cluster is asked with this API key."""
    hidden.hide([key])
    _restored[cluster.name] = key


def forget_keys() -> None:
    """At the end of a run: the next one asks with what the block holds."""
    _restored.clear()


def api_key(cluster: Cluster) -> str:
    """What the server must be asked with; nothing where it wants no key."""
    restored = _restored.get(cluster.name)
    return load_secrets(cluster).api_key if restored is None else restored


@lru_cache
def _load(name: str) -> Secrets:
    # Imported here: most commands need no block, and loading one needs a Prefect API.
    from blocks.secrets import EngineSecrets

    try:
        block = EngineSecrets.load(name)
    except ValueError as error:
        raise InvalidSpec(
            f"secrets: no engine-secrets block named {name}",
            details=str(error),
            remedy="Create it in the Prefect UI (Blocks), or take secrets out of the spec.",
        ) from error
    assert isinstance(block, EngineSecrets)
    secret = [block.api_key, block.hub_token]
    hidden.hide(value.get_secret_value() for value in secret if value)
    environment = dict(block.environment.get_secret_value()) if block.environment else {}
    hidden.hide(map(str, environment.values()))
    check_names(name, environment)
    if block.hub_token:
        environment["HF_TOKEN"] = block.hub_token.get_secret_value()
    return Secrets(
        api_key=block.api_key.get_secret_value() if block.api_key else "",
        environment={name: str(value) for name, value in environment.items()},
    )


def check_names(block: str, environment: Mapping[str, object]) -> None:
    """The rules of the spec's own variables; values are never shown."""
    problems = []
    for name in environment:
        if not VARIABLE.fullmatch(name):
            problems.append(f"{name!r} is not an environment name (letters, digits, _)")
        elif name in DERIVED_VARIABLES:
            problems.append(f"{name} is not yours to set: {DERIVED_VARIABLES[name]}")
    if problems:
        raise InvalidSpec(
            f"secrets: the engine-secrets block {block} has variables that cannot be",
            details="\n".join(problems),
            remedy="Correct its environment in the Prefect UI (Blocks).",
        )
