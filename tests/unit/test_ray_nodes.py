"""What Ray's table must look like before the server may start."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tasks.converge import Gone, Ready, Waiting
from tasks.errors import CommandFailed
from tasks.failures import find_failure
from tasks.listeners import Listener
from tasks.ray_nodes import (
    Member,
    Placement,
    Raylet,
    RayNode,
    Seen,
    bundles,
    listening_problems,
    member_problems,
    membership_problems,
    parse_member,
    parse_seen,
    placement_problems,
)
from tasks.ray_start import judge_start
from tests.unit.specs import spec, workers

CLUSTER = spec()


def node(address: str, *, alive: bool = True, gpus: float | None = 1, name: str = "") -> RayNode:
    """A node as Ray tells it; without GPUs it has no GPU key at all."""
    resources = {"CPU": 20.0, "memory": 1e11, f"node:{name or address}": 1.0}
    if gpus is not None:
        resources["GPU"] = gpus
    return RayNode(id=f"id of {address}", alive=alive, address=address, resources=resources)


HEAD, WORKER = node("10.77.0.1"), node("10.77.0.2")


@pytest.mark.parametrize(
    ("nodes", "problems"),
    [
        pytest.param([HEAD, WORKER], [], id="as planned"),
        pytest.param([WORKER, HEAD], [], id="in another order"),
        pytest.param([HEAD, WORKER, node("10.77.0.2", alive=False)], [], id="an earlier one, dead"),
        pytest.param([HEAD], [("worker1", "10.77.0.2 is not alive in Ray")], id="not joined"),
        pytest.param(
            [HEAD, node("10.77.0.2", alive=False)],
            [("worker1", "10.77.0.2 is not alive in Ray")],
            id="dead",
        ),
        pytest.param(
            [],
            [
                ("head", "10.77.0.1 is not alive in Ray"),
                ("worker1", "10.77.0.2 is not alive in Ray"),
            ],
            id="nobody",
        ),
        pytest.param(
            [node("10.88.0.1"), WORKER],
            [
                ("head", "10.77.0.1 is not alive in Ray"),
                ("head", "Ray has nodes that are not planned: 10.88.0.1"),
            ],
            id="the management address registered instead of the fabric's",
        ),
        pytest.param(
            [HEAD, node("10.77.0.2", gpus=None)],
            [("worker1", "Ray sees 0 GPUs, planned are 1")],
            id="no GPU key",
        ),
        pytest.param(
            [HEAD, node("10.77.0.2", gpus=2)],
            [("worker1", "Ray sees 2 GPUs, planned are 1")],
            id="too many GPUs",
        ),
        pytest.param(
            [HEAD, WORKER, WORKER],
            [("worker1", "10.77.0.2 is in Ray 2 times")],
            id="twice",
        ),
        pytest.param(
            [HEAD, WORKER, node("10.77.0.9"), node("10.77.0.8")],
            [("head", "Ray has nodes that are not planned: 10.77.0.8, 10.77.0.9")],
            id="strangers",
        ),
        pytest.param(
            [HEAD, node("10.77.0.2", name="10.88.0.2")],
            [("worker1", "Ray has no resource node:10.77.0.2; vLLM would wait for ever")],
            id="its resource has another name",
        ),
    ],
)
def test_membership_problems(nodes: Sequence[RayNode], problems: list[tuple[str, str]]) -> None:
    assert membership_problems(CLUSTER, nodes) == problems


def member(address: str, **changes: Any) -> Member:
    raylet = Raylet(VLLM_HOST_IP=address, GLOO_SOCKET_IFNAME="eth1")
    values = {"python": "3.12.3", "ray": "2.60.0", "vllm": "0.33.0", "raylets": (raylet,)}
    return Member(**values | changes)


@pytest.mark.parametrize(
    ("head", "worker", "problems"),
    [
        pytest.param(member("10.77.0.1"), member("10.77.0.2"), [], id="as planned"),
        pytest.param(
            member("10.88.0.1"),
            member("10.77.0.2"),
            [
                (
                    "head",
                    "VLLM_HOST_IP is 10.88.0.1, Ray knows the node as 10.77.0.1; serve would "
                    "wait for ever",
                )
            ],
            id="the management address",
        ),
        pytest.param(
            member("10.77.0.1"),
            member("10.77.0.1"),
            [
                (
                    "worker1",
                    "VLLM_HOST_IP is 10.77.0.1, Ray knows the node as 10.77.0.2; serve would "
                    "wait for ever",
                )
            ],
            id="the head's address on the worker",
        ),
        pytest.param(
            member("10.77.0.1"),
            member(""),
            [
                (
                    "worker1",
                    "VLLM_HOST_IP is not set, Ray knows the node as 10.77.0.2; serve would wait "
                    "for ever",
                )
            ],
            id="no address",
        ),
        pytest.param(
            member("10.77.0.1"),
            member("10.77.0.2", ray="2.59.0", python="3.11.7"),
            [
                ("worker1", "ray 2.59.0, the head has 2.60.0"),
                ("worker1", "python 3.11.7, the head has 3.12.3"),
            ],
            id="other versions",
        ),
        pytest.param(
            member("10.77.0.1"),
            member("10.77.0.2", vllm=""),
            [("worker1", "vllm missing, the head has 0.33.0")],
            id="no vLLM on the worker",
        ),
        pytest.param(
            member("10.77.0.1", vllm=""),
            member("10.77.0.2"),
            [("worker1", "vllm 0.33.0, the head has none")],
            id="no vLLM on the head",
        ),
        pytest.param(
            member("10.77.0.1"),
            member("10.77.0.2", raylets=()),
            [("worker1", "0 raylets run in its container, not 1")],
            id="no raylet",
        ),
    ],
)
def test_member_problems(head: Member, worker: Member, problems: list[tuple[str, str]]) -> None:
    assert member_problems(CLUSTER, {"head": head, "worker1": worker}) == problems


GROUP = '[{"GPU": 1.0, "node:10.77.0.1": 0.001}, {"GPU": 1.0}]'


def test_bundles_are_those_that_vllm_asks_for() -> None:
    assert json.dumps(bundles(CLUSTER)) == GROUP
    assert len(bundles(spec(**workers(3)))) == 4


@pytest.mark.parametrize(
    ("placement", "problems"),
    [
        pytest.param(None, [], id="not asked"),
        pytest.param(Placement(granted=True), [], id="granted"),
        pytest.param(
            Placement(granted=False, free_gpus={"id of 10.77.0.1": 1.0, "id of 10.77.0.2": 0.0}),
            [("worker1", "0 of its 1 GPUs are free in Ray")],
            id="somebody uses a GPU",
        ),
        pytest.param(
            Placement(granted=False, free_gpus={"id of 10.77.0.1": 1.0, "id of 10.77.0.2": 1.0}),
            [("head", f"Ray grants no placement group of {GROUP}")],
            id="for no reason that we see",
        ),
    ],
)
def test_placement_problems(placement: Placement | None, problems: list[tuple[str, str]]) -> None:
    seen = Seen(nodes=(HEAD, WORKER), placement=placement)
    assert placement_problems(CLUSTER, seen) == problems


@pytest.mark.parametrize(
    ("seen", "problems"),
    [
        pytest.param([Listener(address="::", pid=7)], [], id="ours"),
        pytest.param([], [("head", "nobody listens on Ray's port 6379")], id="nobody"),
        pytest.param(
            [Listener(address="::", pid=7), Listener(address="10.77.0.1")],
            [("head", "another process than our Ray listens on 10.77.0.1:6379")],
            id="a stranger at the address that the workers ask",
        ),
        pytest.param(
            [Listener(address="::", pid=7), Listener(address="10.88.0.1")],
            [],
            id="a stranger at an address that nobody asks",
        ),
    ],
)
def test_listening_problems(seen: list[Listener], problems: list[tuple[str, str]]) -> None:
    assert listening_problems(CLUSTER, seen) == problems


def test_parse_nodes() -> None:
    row = {
        "id": "a1",
        "alive": True,
        "address": "10.77.0.1",
        "resources": {"CPU": 2.0, "GPU": 1.0, "node:10.77.0.1": 1.0},
    }
    dead = {"id": "a2", "alive": False, "address": "10.77.0.2", "resources": {}}
    found = parse_seen(json.dumps({"nodes": [row, dead]})).nodes
    assert [(each.address, each.alive, each.gpus) for each in found] == [
        ("10.77.0.1", True, 1.0),
        ("10.77.0.2", False, 0.0),
    ]


@pytest.mark.parametrize(
    "text", ["", "Traceback", "[]", "{}", '{"nodes": 7}', '{"nodes": [{"id": 1}]}', "null"]
)
def test_other_words_are_an_error_that_shows_them(text: str) -> None:
    with pytest.raises(CommandFailed) as caught:
        parse_seen(text)
    assert caught.value.brief == "Ray's head said something else than its nodes"
    assert caught.value.details == text
    with pytest.raises(CommandFailed, match="something else than its versions"):
        parse_member(text)


# --- the start of a Ray container ---------------------------------------------------------------

LOG = (Path(__file__).parent / "data" / "ray" / "head-start-2.60.0.txt").read_text()
NAME = "sparkrail-sparks-ray"
REFUSED = """\
ray start: Ray is starting
ConnectionError: Ray is trying to start at 10.77.0.1:6379, but is already running
"""


class Docker:
    """A docker client that knows one container and its log."""

    def __init__(self, state: str | None, log: str) -> None:
        self.api, self._state, self._log = self, state, log

    def containers(self, *, all: bool) -> list[dict[str, Any]]:
        assert all
        return [{"Id": "1", "Names": [f"/{NAME}"], "State": self._state}] if self._state else []

    def logs(self, name: str, *, tail: int) -> bytes:
        assert (name, tail) == (NAME, 200)
        return self._log.encode()


@pytest.mark.parametrize(
    ("client", "found"),
    [
        pytest.param(Docker("running", LOG), Ready(), id="up, in Ray's colours"),
        pytest.param(
            Docker("running", LOG.splitlines()[0]),
            Waiting("ray start has not come to its end"),
            id="starting",
        ),
        pytest.param(
            Docker("exited", REFUSED),
            Gone(
                "its container is exited: another Ray head runs on the node: ConnectionError: Ray "
                "is trying to start at 10.77.0.1:6379, but is already running",
                details=REFUSED.strip(),
                remedy="Stop it, or set another ray.port.",
            ),
            id="ended for a known reason",
        ),
        pytest.param(
            Docker("running", REFUSED),
            Gone(
                "another Ray head runs on the node: ConnectionError: Ray is trying to start at "
                "10.77.0.1:6379, but is already running",
                details=REFUSED.strip(),
                remedy="Stop it, or set another ray.port.",
            ),
            id="a known reason, before it has ended",
        ),
        pytest.param(
            Docker("exited", "KeyError: 'x'\n"),
            Gone("its container is exited", details="KeyError: 'x'"),
            id="ended, nobody knows why",
        ),
        pytest.param(Docker(None, ""), Gone("its container is gone"), id="removed"),
    ],
)
def test_whether_ray_has_started(client: Docker, found: Ready | Waiting | Gone) -> None:
    assert judge_start(client, NAME) == found


def test_a_healthy_ray_log_holds_no_failure() -> None:
    assert find_failure(LOG) is None


def test_parse_member() -> None:
    said = (
        '{"python": "3.12.3", "ray": "2.60.0", "vllm": "0.33.0", '
        '"raylets": [{"VLLM_HOST_IP": "10.77.0.1", "GLOO_SOCKET_IFNAME": "eth1"}]}'
    )
    assert parse_member(said) == member("10.77.0.1")
