"""Secrets come from a block of the Prefect server, and show nowhere."""

from collections.abc import Iterator

import pytest

from blocks.secrets import EngineSecrets
from tasks import secret_values
from tasks.errors import InvalidSpec
from tasks.secret_values import load_secrets
from tasks.topology import Secrets
from tests.unit.specs import spec

pytestmark = [
    pytest.mark.usefixtures("prefect_server"),
    # Prefect leaves sockets of its clients to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]


@pytest.fixture(autouse=True)
def read_anew() -> Iterator[None]:
    secret_values._load.cache_clear()
    yield
    secret_values._load.cache_clear()


def test_the_values_of_a_block() -> None:
    block = EngineSecrets(api_key="sk-1", hub_token="hf-1", environment={"A": "b", "N": 7})
    block.save("prod", overwrite=True)
    found = load_secrets(spec(secrets="prod"))
    assert found.api_key == "sk-1"
    assert found.environment == {"A": "b", "N": "7", "HF_TOKEN": "hf-1"}
    assert repr(found) == "Secrets()"


def test_an_empty_block() -> None:
    EngineSecrets().save("empty", overwrite=True)
    assert load_secrets(spec(secrets="empty")) == Secrets()


def test_a_block_that_is_not_there() -> None:
    with pytest.raises(InvalidSpec) as caught:
        load_secrets(spec(secrets="nope"))
    assert caught.value.brief == "secrets: no engine-secrets block named nope"


def test_a_block_with_a_variable_that_cannot_be() -> None:
    EngineSecrets(environment={"A B": "s3cret"}).save("odd", overwrite=True)
    with pytest.raises(InvalidSpec, match="'A B' is not an environment name") as caught:
        load_secrets(spec(secrets="odd"))
    assert "s3cret" not in str(caught.value)
