"""What must be stopped and started, and the record of what was deployed."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from blocks import Cluster
from tasks.containers import CLUSTER_LABEL, DIGEST_LABEL, RUN_LABEL, SHARES_LABEL, Container
from tasks.converge import Run
from tasks.endpoint import Ask, Silent
from tasks.releases import Decision, Wanted, answered, both, compare, lost
from tasks.topology import Fabric, containers, files
from tests.unit.specs import RUN, spec, workers

RAY, SERVE = "sparkrail-sparks-ray", "sparkrail-sparks-serve"
CLUSTER = spec(**workers(2))
HEAD, W1, W2 = "head", "worker1", "worker2"
Have = dict[str, dict[str, Container]]


def wanted(cluster: Cluster) -> Wanted:
    fabric = Fabric(interface="eth1")
    return Wanted(
        nodes={
            node.name: containers(
                cluster, node, "/root", fabric, files(cluster, node, fabric), "sha256:1"
            )
            for node in cluster.nodes
        }
    )


def running(want: Wanted, run: str = "run-1") -> Have:
    """All as wanted, started by one run."""
    return {
        name: {
            each.name: Container(
                id=f"{each.name} on {name}",
                name=each.name,
                state="running",
                labels={
                    CLUSTER_LABEL: "sparks",
                    DIGEST_LABEL: each.digest,
                    RUN_LABEL: run,
                    SHARES_LABEL: f"{each.shares} on {name}" if each.shares else "",
                },
            )
            for each in specs
        }
        for name, specs in want.nodes.items()
    }


def nothing(_have: Have) -> None:
    """As wanted."""


def gone(node: str, name: str) -> Callable[[Have], None]:
    def change(have: Have) -> None:
        del have[node][name]

    return change


def stopped(node: str, name: str) -> Callable[[Have], None]:
    def change(have: Have) -> None:
        have[node][name] = have[node][name].model_copy(update={"state": "exited"})

    return change


def drifted(node: str, name: str) -> Callable[[Have], None]:
    def change(have: Have) -> None:
        labels = dict(have[node][name].labels) | {DIGEST_LABEL: "other"}
        have[node][name] = have[node][name].model_copy(update={"labels": labels})

    return change


def all_gone(have: Have) -> None:
    for found in have.values():
        found.clear()


def server_on_a_worker(have: Have) -> None:
    have[W1][SERVE] = have[HEAD][SERVE]


EVERYTHING = {HEAD: (SERVE, RAY), W1: (RAY,), W2: (RAY,)}


@pytest.mark.parametrize(
    ("change", "stop", "start", "reasons"),
    [
        pytest.param(nothing, {}, {}, [], id="as wanted"),
        pytest.param(
            all_gone,
            {},
            EVERYTHING,
            [
                f"{RAY} on head: it is not there",
                f"{SERVE} on head: it is not there",
                f"{RAY} on worker1: it is not there",
                f"{RAY} on worker2: it is not there",
            ],
            id="nothing is there",
        ),
        pytest.param(
            gone(HEAD, RAY),
            {HEAD: (SERVE,), W1: (RAY,), W2: (RAY,)},
            EVERYTHING,
            [
                f"{RAY} on head: it is not there",
                f"{SERVE} on head: {RAY} was started anew",
            ],
            id="the head's Ray is gone: all starts anew",
        ),
        pytest.param(
            drifted(HEAD, RAY),
            EVERYTHING,
            EVERYTHING,
            [f"{RAY} on head: its spec has changed"],
            id="the head's Ray drifted: all starts anew",
        ),
        pytest.param(
            gone(W1, RAY),
            {HEAD: (SERVE,)},
            {HEAD: (SERVE,), W1: (RAY,)},
            [f"{RAY} on worker1: it is not there"],
            id="a worker is gone: it and the server",
        ),
        pytest.param(
            stopped(W2, RAY),
            {HEAD: (SERVE,), W2: (RAY,)},
            {HEAD: (SERVE,), W2: (RAY,)},
            [f"{RAY} on worker2: it is exited"],
            id="a worker ended: it and the server",
        ),
        pytest.param(
            drifted(HEAD, SERVE),
            {HEAD: (SERVE,)},
            {HEAD: (SERVE,)},
            [f"{SERVE} on head: its spec has changed"],
            id="the server drifted: only it",
        ),
        pytest.param(
            gone(HEAD, SERVE),
            {},
            {HEAD: (SERVE,)},
            [f"{SERVE} on head: it is not there"],
            id="the server is gone: only it",
        ),
        pytest.param(
            server_on_a_worker,
            {W1: (SERVE,)},
            {},
            [f"{SERVE} on worker1: it does not belong there"],
            id="a server on a node that is no head any more",
        ),
    ],
)
def test_compare(
    change: Callable[[Have], None],
    stop: dict[str, tuple[str, ...]],
    start: dict[str, tuple[str, ...]],
    reasons: list[str],
) -> None:
    want = wanted(CLUSTER)
    have = running(want)
    change(have)
    decision = compare(CLUSTER, want, have, RUN)
    assert decision == Decision(stop=stop, start=start, reasons=tuple(reasons))
    assert decision.nothing_to_do == (change is nothing)


@pytest.mark.parametrize(
    ("made_by", "stop"),
    [
        pytest.param("run-1", {}, id="what the run itself started stays"),
        pytest.param("run-0", EVERYTHING, id="what an earlier run started goes"),
    ],
)
def test_compare_with_restart_always(made_by: str, stop: dict[str, tuple[str, ...]]) -> None:
    want = wanted(CLUSTER)
    always = Run(id="run-1", who="ada", restart="always")
    decision = compare(CLUSTER, want, running(want, made_by), always)
    assert (decision.stop, decision.start) == (stop, stop)


def test_one_node_alone() -> None:
    cluster = spec(workers=[], serve={"tensor_parallel": 1})
    want = wanted(cluster)
    assert compare(cluster, want, {HEAD: {}}, RUN).start == {HEAD: (SERVE, RAY)}
    assert compare(cluster, want, running(want), RUN).nothing_to_do


@pytest.mark.parametrize(
    ("nodes", "stop"),
    [
        pytest.param([HEAD], EVERYTHING, id="Ray on the head is lost: all"),
        pytest.param([W1], {HEAD: (SERVE,), W1: (RAY,)}, id="a worker is lost: it and the server"),
        pytest.param(
            [W1, W2, W1], {HEAD: (SERVE,), W1: (RAY,), W2: (RAY,)}, id="both workers are lost"
        ),
        pytest.param([], {HEAD: (SERVE,)}, id="no node: only the server"),
    ],
)
def test_lost(nodes: list[str], stop: dict[str, tuple[str, ...]]) -> None:
    decision = lost(CLUSTER, nodes, ["why"])
    assert decision == Decision(stop=stop, start=stop, reasons=("why",))


def test_a_lost_rank_goes_with_a_server_that_goes_anyway() -> None:
    server = Decision(stop={HEAD: (SERVE,)}, start={HEAD: (SERVE,)}, reasons=("it is exited",))
    rank = lost(CLUSTER, [W2], ["10.77.0.3 is not alive in Ray"])
    assert both(CLUSTER, server, rank) == Decision(
        stop={HEAD: (SERVE,), W2: (RAY,)},
        start={HEAD: (SERVE,), W2: (RAY,)},
        reasons=("it is exited", "10.77.0.3 is not alive in Ray"),
    )
    assert both(CLUSTER, Decision(), Decision()).nothing_to_do
    assert both(CLUSTER, server, Decision()) == server


def test_a_release_has_one_digest_for_all_nodes() -> None:
    more = spec(**workers(2) | {"serve": {"tensor_parallel": 3, "arguments": ["--seed=1"]}})
    assert wanted(CLUSTER).digest == wanted(CLUSTER).digest
    assert wanted(CLUSTER).digest != wanted(more).digest


def test_a_decision_survives_json() -> None:
    """Prefect may keep what a step returns."""
    decision = lost(CLUSTER, [W1], ["why"])
    assert Decision.model_validate(json.loads(decision.model_dump_json())) == decision


# --- whether the server answers -------------------------------------------------------------------


def slow(running: int, late: int, status: int = 200) -> tuple[Ask, list[str]]:
    """A server that leaves so many completions without an answer, and makes no token meanwhile."""
    completions: list[str] = []

    def ask(_method: str, path: str, _body: Any, _timeout: float) -> tuple[int, bytes]:
        if path == "/metrics":
            return 200, f"vllm:num_requests_running {running}\n".encode()
        if path == "/v1/models":
            return 200, b'{"data": [{"id": "tiny"}]}'
        if path == "/health":
            return 200, b""
        completions.append(path)
        if len(completions) <= late:
            error = Silent("/v1/completions: no answer within 60 s")
            error.late = True
            raise error
        said = {"choices": [{"text": " x"}], "usage": {"completion_tokens": 4}}
        return status, json.dumps(said).encode()

    return ask, completions


def test_a_server_that_reads_a_long_prompt_for_somebody_is_not_silent() -> None:
    """For minutes, no token comes out, and what others ask waits behind it."""
    ask, completions = slow(running=1, late=2)
    assert answered(ask, "tiny").tokens == 4
    assert len(completions) == 3


@pytest.mark.parametrize(
    ("server", "asked"),
    [
        pytest.param(slow(running=1, late=9), 3, id="three minutes are enough"),
        pytest.param(slow(running=0, late=9), 1, id="it works for nobody"),
        pytest.param(slow(running=1, late=0, status=500), 1, id="it answers, but not well"),
    ],
)
def test_a_server_that_is_silent(server: tuple[Ask, list[str]], asked: int) -> None:
    ask, completions = server
    with pytest.raises(Silent):
        answered(ask, "tiny")
    assert len(completions) == asked
