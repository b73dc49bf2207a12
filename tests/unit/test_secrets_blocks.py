"""The blocks for secrets: every field is described, and no value shows."""

from typing import Any

import pytest
from prefect.blocks.core import Block
from pydantic import ValidationError

from blocks.secrets import EngineSecrets, SSHCredentials

BLOCKS: list[Any] = [SSHCredentials, EngineSecrets]
SECRET = "s3cret-value"


@pytest.mark.parametrize("block", BLOCKS)
def test_every_field_is_described_in_a_sentence(block: type[Block]) -> None:
    own = {name: field for name, field in block.model_fields.items() if not name.startswith("_")}
    assert own
    for name, field in own.items():
        assert field.description and field.description.endswith("."), name


@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_has_a_name_a_description_and_an_example(block: Any) -> None:
    assert block._block_type_slug and block._block_type_name
    assert block.get_description()
    assert block.get_code_example()


@pytest.mark.parametrize(
    "block",
    [
        SSHCredentials(private_key=SECRET, passphrase=SECRET),
        EngineSecrets(api_key=SECRET, hub_token=SECRET, environment={"TOKEN": SECRET}),
    ],
)
def test_no_secret_shows(block: Block) -> None:
    for text in (repr(block), str(block), str(block.model_dump()), block.model_dump_json()):
        assert SECRET not in text
        assert "***" in text


def test_one_key_only() -> None:
    with pytest.raises(ValidationError, match="give private_key or key_file, not both"):
        SSHCredentials(private_key=SECRET, key_file="~/.ssh/id")
