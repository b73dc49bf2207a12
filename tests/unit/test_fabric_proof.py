"""The all-reduce before the old release is stopped: who is at fault, and what is merely slow."""

from typing import Any

import pytest

from tasks.fabric_proof import Rank, failure, parse_rank, problems, prove_fabric, rank_command
from tasks.topology import Fabric, containers, files
from tests.unit.specs import RUN, spec

CLUSTER = spec()
HEAD, WORKER = CLUSTER.nodes
NO_RDMA = {"head": False, "worker1": False}


def rank(node: str, **changes: Any) -> Rank:
    address = {"head": "10.77.0.1", "worker1": "10.77.0.2"}[node]
    values = {"interface": f"en{node}", "address": address, "host_ip": address, "mib_s": 900.0}
    return Rank.model_validate({"node": node, **values, **changes})


def want(rdma: tuple[str, ...] = (), **changes: Any) -> Any:
    cluster = spec(**changes)
    fabric = Fabric(interface="eth1", rdma=rdma)
    read = files(cluster, cluster.head, fabric)
    return containers(cluster, cluster.head, "/root", fabric, read, "sha256:1")[0]


def test_rank_command() -> None:
    none = want(image={"gpu_access": "none"})
    assert rank_command(CLUSTER, RUN, none, (0, 2, "10.77.0.1", 20001, "gloo", 16, 15)) == (
        *("docker", "run", "--rm", "--interactive", "--init", "--pull=never"),
        *("--network=host", "--log-driver=none", "--entrypoint=/bin/sh"),
        "--label=sparkrail.cluster=sparks",
        "--label=sparkrail.run=run-1",
        "--label=sparkrail.role=proof",
        "--volume=/root/.sparkrail/sparks/run:/sparkrail:ro",
        "engine:1",
        "-c",
        '. /sparkrail/node.env && exec python3 - "$@"',
        "sh",
        *("0", "2", "10.77.0.1", "20001", "gloo", "16", "15"),
    )


def test_rank_command_with_gpus_and_rdma() -> None:
    command = rank_command(CLUSTER, RUN, want(("mlx5_0:1",)), ())
    at = command.index("engine:1")
    assert command[at - 3 : at] == (
        "--gpus=all",
        "--device=/dev/infiniband",
        "--ulimit=memlock=-1",
    )


def test_parse_rank() -> None:
    stdout = (
        '{"interface": "eth1", "address": "10.77.0.1", "host_ip": "10.77.0.1"}\n'
        "NCCL version 2.28.9+cuda13.0\n"
        '{"mib_s": 435.1, "seconds": 0.09, "transport": "Socket"}\n'
    )
    assert parse_rank("head", 0, stdout, "[c10d] a warning\n") == Rank(
        node="head",
        said="[c10d] a warning",
        interface="eth1",
        address="10.77.0.1",
        host_ip="10.77.0.1",
        mib_s=435.1,
        transport="Socket",
    )
    assert parse_rank("head", 125, "", "docker: no such image\n").last == "docker: no such image"
    assert parse_rank("head", 137, "", "").last == "exit code 137"


NO_INTERFACE = (
    "GLOO_SOCKET_IFNAME: Unable to find address for: ib0; here are lo 127.0.0.1, eth1 10.77.0.2"
)
ENDED = {"code": 3, "said": "another rank ended"}


@pytest.mark.parametrize(
    ("head", "worker", "node", "said"),
    [
        pytest.param(
            rank("head", **ENDED),
            rank("worker1", code=1, said=NO_INTERFACE, address="", interface="ib0"),
            "worker1",
            "Gloo was given an interface that the node does not have: " + NO_INTERFACE,
            id="an interface that the worker does not have",
        ),
        pytest.param(
            rank("head", code=1, said=NO_INTERFACE, address="", interface="ib0"),
            rank("worker1", code=6, said="cannot reach 10.77.0.1:20001: refused"),
            "head",
            "Gloo was given an interface that the node does not have: " + NO_INTERFACE,
            id="one that the head does not have",
        ),
        pytest.param(
            rank("head", interface="wlan0", address="10.88.0.1", **ENDED),
            rank("worker1", code=1, said="gloo/transport/tcp/pair.cc:144 timed out connecting"),
            "head",
            "GLOO_SOCKET_IFNAME is wlan0 (10.88.0.1), which does not own 10.77.0.1: "
            "gloo/transport/tcp/pair.cc:144 timed out connecting",
            id="the worker does not reach the head's other network",
        ),
        pytest.param(
            rank("head", **ENDED),
            rank("worker1", code=1, said="gloo/transport/tcp/pair.cc:144 timed out connecting"),
            "worker1",
            "Gloo lost another rank: gloo/transport/tcp/pair.cc:144 timed out connecting",
            id="lost for no reason that we see",
        ),
        pytest.param(
            rank("head", interface="wlan0", address="10.88.0.1", **ENDED),
            rank("worker1", code=1, said="RuntimeError: no way"),
            "head",
            "GLOO_SOCKET_IFNAME is wlan0 (10.88.0.1), which does not own 10.77.0.1: "
            "RuntimeError: no way",
            id="the head's Gloo is on another network",
        ),
        pytest.param(
            rank("head", code=3, said="not every rank came"),
            rank("worker1", code=6, said="cannot reach 10.77.0.1:20001: timed out"),
            "worker1",
            "cannot reach 10.77.0.1:20001: timed out",
            id="a firewall on the head",
        ),
        pytest.param(
            rank("head"),
            rank("worker1", host_ip="10.77.0.1"),
            "worker1",
            "VLLM_HOST_IP is 10.77.0.1, planned is 10.77.0.2; serve would wait for ever",
            id="VLLM_HOST_IP is not the planned address",
        ),
        pytest.param(
            rank("head", interface="lo", address="127.0.0.1"),
            rank("worker1"),
            "head",
            "GLOO_SOCKET_IFNAME is lo (127.0.0.1), which does not own 10.77.0.1, nor does any "
            "node reach it",
            id="loopback, and it went well by chance",
        ),
        pytest.param(
            rank("head", **ENDED),
            rank("worker1", code=125, said="docker: Error response from daemon: no GPU."),
            "worker1",
            "docker: Error response from daemon: no GPU.",
            id="docker does not start it",
        ),
    ],
)
def test_failure_names_the_node(head: Rank, worker: Rank, node: str, said: str) -> None:
    error = failure(CLUSTER, [head, worker])
    assert error is not None
    assert (error.node, error.brief) == (node, f"fabric proof: {said}")
    assert error.remedy.endswith("Nothing was stopped.")


def test_no_failure() -> None:
    assert failure(CLUSTER, [rank("head"), rank("worker1")]) is None


@pytest.mark.parametrize(
    ("ranks", "rdma", "no_memory", "rows"),
    [
        pytest.param([rank("head"), rank("worker1")], NO_RDMA, "", [], id="fast enough"),
        pytest.param(
            [rank("head", mib_s=112.4), rank("worker1")],
            NO_RDMA,
            "",
            [
                (
                    "head",
                    "112 MiB/s by gloo over 2 nodes (enhead, enworker1), less than "
                    "proof.slow_mib_s 300",
                )
            ],
            id="slow",
        ),
        pytest.param(
            [rank("head"), rank("worker1", interface="wlan0", address="10.88.0.2")],
            NO_RDMA,
            "",
            [
                (
                    "worker1",
                    "GLOO_SOCKET_IFNAME is wlan0 (10.88.0.2), which does not own 10.77.0.2",
                )
            ],
            id="it works, but over another network",
        ),
        pytest.param(
            [rank("head", transport="Socket"), rank("worker1", transport="IB")],
            {"head": True, "worker1": True},
            "",
            [("head", "NCCL takes Socket, not RDMA")],
            id="RDMA is there and not used",
        ),
        pytest.param(
            [rank("head", transport="Socket"), rank("worker1", transport="Socket")],
            NO_RDMA,
            "",
            [],
            id="no RDMA to be used",
        ),
        pytest.param(
            [rank("head"), rank("worker1")],
            NO_RDMA,
            "worker1: CUDA error: out of memory",
            [("head", "proven by gloo only, not by NCCL: worker1: CUDA error: out of memory")],
            id="no GPU memory for the test",
        ),
    ],
)
def test_problems(
    ranks: list[Rank], rdma: dict[str, bool], no_memory: str, rows: list[tuple[str, str]]
) -> None:
    found = problems(CLUSTER, ranks, rdma, no_memory)
    assert [(row.node, row.detail) for row in found] == rows
    assert {row.verdict for row in found} <= {"slow"}


@pytest.mark.parametrize(
    ("changes", "dry_run", "why"),
    [
        pytest.param({"workers": [], "serve": {"tensor_parallel": 1}}, False, "one node", id="one"),
        pytest.param({"proof": {"enabled": False}}, False, "proof.enabled is false", id="off"),
        pytest.param({}, True, "a dry run", id="dry run"),
    ],
)
def test_skipped(changes: dict[str, Any], dry_run: bool, why: str) -> None:
    cluster = spec(**changes)
    run = RUN.model_copy(update={"dry_run": dry_run})
    outcome = prove_fabric.fn(cluster, cluster.head, run, {})
    assert (outcome.status, outcome.detail, outcome.data) == ("unchanged", f"skipped: {why}", [])
