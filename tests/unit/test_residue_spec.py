"""The part `residue` of a spec, and the mistakes that are possible in it."""

from typing import Any

import pytest
from pydantic import ValidationError

from blocks import Holder
from tests.unit.specs import spec


def mistakes(**changes: Any) -> list[str]:
    with pytest.raises(ValidationError) as error:
        spec(**changes)
    return [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.value.errors()]


def test_without_it_others_are_reported_and_left_alone() -> None:
    residue = spec().residue
    assert (residue.policy, residue.sudo, residue.drop_caches) == ("report", False, False)


def test_a_unit_is_a_service_unless_it_says_otherwise() -> None:
    assert Holder(unit="llm").unit == Holder(unit="llm.service").unit == "llm.service"
    assert Holder(unit="run-7.scope").unit == "run-7.scope"


@pytest.mark.parametrize(
    ("residue", "said"),
    [
        pytest.param(
            {"policy": "stop-listed"},
            "residue: stop-listed stops nobody; allowed: at least one entry in listed",
            id="nobody listed",
        ),
        pytest.param(
            {"policy": "stop-everybody"},
            "residue.policy: allowed: 'report', 'stop-listed' or 'stop-all-except'",
            id="no such policy",
        ),
        pytest.param(
            {"listed": [{"command": "python3 job.py"}]},
            "residue.listed.0: command and user belong together: two people may run the same",
            id="a command without its user",
        ),
        pytest.param(
            {"listed": [{"container": "a", "user": "ada"}]},
            "residue.listed.0: command and user belong together: two people may run the same",
            id="a user without a command",
        ),
        pytest.param(
            {"excepted": [{"container": "a", "unit": "b"}]},
            "residue.excepted.0: allowed: one of container, unit, and command with user",
            id="two at once",
        ),
        pytest.param(
            {"listed": [{"command": "*", "user": "ada"}]},
            "residue.listed.0.command: would match nearly everything; "
            "allowed: a command with * and ?",
            id="a pattern for everything",
        ),
        pytest.param(
            {"listed": [{"container": "a b"}]},
            "residue.listed.0.container: allowed: the name of a container",
            id="no container's name",
        ),
        pytest.param({"grace_seconds": 0}, "residue.grace_seconds: allowed: 1 or more", id="grace"),
        pytest.param(
            {"free_mib": True}, "residue.free_mib: allowed: a number", id="a size that is none"
        ),
    ],
)
def test_mistakes(residue: dict[str, Any], said: str) -> None:
    assert mistakes(residue=residue) == [said]


def test_a_local_head_has_no_proxy() -> None:
    head = {"transport": "local", "proxy_command": "nc %h %p"}
    assert mistakes(head=head) == ["head.proxy_command: allowed with transport ssh only"]
