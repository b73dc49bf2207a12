"""The variables of a secrets block follow the same rules as the spec's own."""

import pytest

from tasks.errors import InvalidSpec
from tasks.secret_values import check_names, load_secrets
from tasks.topology import Secrets
from tests.unit.specs import spec


def test_a_spec_without_a_block_has_no_secrets() -> None:
    assert load_secrets(spec()) == Secrets()


def test_names_that_cannot_be_are_all_told_without_their_values() -> None:
    values = {"FINE": "s3cret", "A B": "s3cret", "x;id": "s3cret", "VLLM_HOST_IP": "s3cret"}
    with pytest.raises(InvalidSpec) as caught:
        check_names("prod", values)
    assert str(caught.value) == (
        "secrets: the engine-secrets block prod has variables that cannot be\n"
        "'A B' is not an environment name (letters, digits, _)\n"
        "'x;id' is not an environment name (letters, digits, _)\n"
        "VLLM_HOST_IP is not yours to set: it is the node's fabric_address\n"
        "Correct its environment in the Prefect UI (Blocks)."
    )


def test_names_that_can_be() -> None:
    check_names("prod", {"S3_SECRET": "x", "_a1": "y"})
