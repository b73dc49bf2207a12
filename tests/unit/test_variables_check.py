"""Variables that name interfaces and RDMA devices, against what a node has."""

from typing import Any

import pytest

from tasks.node_facts import Address, Rdma
from tests.unit.sites import Change, cluster, having, interface, nodes, row

ROCE = Rdma(
    device="roce0",
    port=1,
    state="ACTIVE",
    link_layer="Ethernet",
    roce_v2={"10.77.0.2": 4},
)
FABRIC = interface("10.77.0.2", name="enP2p1s0f0np0", rdma=(ROCE,))
MANAGEMENT = interface("10.88.0.2", name="eth0", mtu=1500)
BARE = interface("10.99.0.2", name="eth1", addresses=())
LOOPBACK = interface("127.0.0.1", name="lo", addresses=(Address(address="127.0.0.1", prefix=8),))
WORKER = having(interfaces=(LOOPBACK, MANAGEMENT, BARE, FABRIC), rdma_devices=("roce0", "roce1"))
# The head has the management network too.
HEAD = having(interfaces=(interface("10.77.0.1"), interface("10.88.0.1", name="enP7s7")))
HAS = "worker1 does not have; it has lo, eth0, eth1, enP2p1s0f0np0"


def environment(**values: str) -> Any:
    worker = {"name": "worker1", "fabric_address": "10.77.0.2", "environment": values}
    return cluster(workers=[worker])


def test_derived_ones_are_shown() -> None:
    found = row("environment", nodes(worker1=WORKER), "worker1")
    assert (found.verdict, found.detail) == (
        "ready",
        "GLOO_SOCKET_IFNAME=enP2p1s0f0np0, NCCL_SOCKET_IFNAME==enP2p1s0f0np0, NCCL_IB_HCA==roce0:1",
    )


@pytest.mark.parametrize(
    ("name", "value", "verdict", "detail"),
    [
        pytest.param("GLOO_SOCKET_IFNAME", "enP2p1s0f0np0", "ready", None, id="its own name"),
        pytest.param("GLOO_SOCKET_IFNAME", "", "ready", None, id="empty"),
        pytest.param(
            "GLOO_SOCKET_IFNAME",
            "^lo,docker0",
            "blocked",
            "GLOO_SOCKET_IFNAME is ^lo,docker0; it takes one whole name, without ^, = and commas",
            id="NCCL's way to leave some out",
        ),
        pytest.param(
            "GLOO_SOCKET_IFNAME",
            "=enP2p1s0f0np0",
            "blocked",
            "GLOO_SOCKET_IFNAME is =enP2p1s0f0np0; it takes one whole name, without ^, = and "
            "commas",
            id="NCCL's way to take a whole name",
        ),
        pytest.param(
            "TP_SOCKET_IFNAME",
            "eth0,enP2p1s0f0np0",
            "blocked",
            "TP_SOCKET_IFNAME is eth0,enP2p1s0f0np0; it takes one whole name, without ^, = and "
            "commas",
            id="a list",
        ),
        pytest.param(
            "GLOO_SOCKET_IFNAME",
            "10.77.0.2",
            "blocked",
            "GLOO_SOCKET_IFNAME is 10.77.0.2, an address; it takes a name",
            id="an address",
        ),
        pytest.param(
            "GLOO_SOCKET_IFNAME",
            "ib0",
            "blocked",
            f"GLOO_SOCKET_IFNAME is ib0, which {HAS}",
            id="absent",
        ),
        pytest.param(
            "GLOO_SOCKET_IFNAME",
            "lo",
            "blocked",
            "GLOO_SOCKET_IFNAME is lo, which has no IPv4 address that others reach",
            id="loopback",
        ),
        pytest.param(
            "GLOO_SOCKET_IFNAME",
            "eth1",
            "blocked",
            "GLOO_SOCKET_IFNAME is eth1, which has no IPv4 address that others reach",
            id="without an address",
        ),
        pytest.param(
            "GLOO_SOCKET_IFNAME",
            "eth0",
            "blocked",
            "GLOO_SOCKET_IFNAME is eth0, in 10.88.0.0/24, but head's is enp1s0f1np1, in "
            "10.77.0.0/24",
            id="on another network than the head's",
        ),
        pytest.param("NCCL_SOCKET_IFNAME", "=enP2p1s0f0np0", "ready", None, id="a whole name"),
        pytest.param("NCCL_SOCKET_IFNAME", "enP", "ready", None, id="the beginning of a name"),
        pytest.param("NCCL_SOCKET_IFNAME", "^lo,eth", "ready", None, id="some left out"),
        pytest.param(
            "NCCL_SOCKET_IFNAME",
            "=enP",
            "blocked",
            f"NCCL_SOCKET_IFNAME is =enP, which {HAS}",
            id="no whole name",
        ),
        pytest.param(
            "NCCL_SOCKET_IFNAME",
            "^enP,lo",
            "slow",
            "NCCL_SOCKET_IFNAME is ^enP,lo, which is not the interface of 10.77.0.2",
            id="the fabric left out",
        ),
        pytest.param(
            "NCCL_SOCKET_IFNAME",
            "=10.77.0.2",
            "blocked",
            "NCCL_SOCKET_IFNAME is =10.77.0.2, an address; it takes names",
            id="an address for NCCL",
        ),
        pytest.param("NCCL_IB_HCA", "=roce0:1,roce1:1", "ready", None, id="RDMA ports"),
        pytest.param("NCCL_IB_HCA", "roce", "ready", None, id="the beginning of a device"),
        pytest.param(
            "NCCL_IB_HCA",
            "mlx5_0",
            "blocked",
            "NCCL_IB_HCA is mlx5_0, which matches no RDMA device of worker1; it has roce0, roce1",
            id="absent device",
        ),
        pytest.param("NCCL_IB_GID_INDEX", "4", "ready", None, id="the index of the address"),
        pytest.param("NCCL_IB_GID_INDEX", "-1", "ready", None, id="NCCL's own choice"),
        pytest.param(
            "NCCL_IB_GID_INDEX",
            "3",
            "blocked",
            "NCCL_IB_GID_INDEX is 3, but the RoCE v2 GID of 10.77.0.2 on roce0 has the index 4",
            id="another index",
        ),
        pytest.param(
            "NCCL_IB_GID_INDEX",
            "v2",
            "blocked",
            "NCCL_IB_GID_INDEX is v2; it takes a number",
            id="no number",
        ),
        pytest.param("UCX_NET_DEVICES", "roce0:1,enP2p1s0f0np0", "ready", None, id="known devices"),
        pytest.param(
            "UCX_NET_DEVICES",
            "mlx5_0:1,roce0:1",
            "blocked",
            "UCX_NET_DEVICES names mlx5_0:1, which worker1 does not have",
            id="a device it has and one that it has not",
        ),
    ],
)
def test_a_value_of_the_spec(name: str, value: str, verdict: str, detail: str | None) -> None:
    spec = environment(**{name: value})
    found = row("environment", nodes(head=HEAD, worker1=WORKER), "worker1", spec=spec)
    assert found.verdict == verdict
    if detail is not None:
        assert found.detail == detail
    assert found.remedy.startswith(f"Leave {name} of worker1 out of the spec" if detail else "")


def test_the_remedy_names_what_is_derived() -> None:
    spec = environment(GLOO_SOCKET_IFNAME="ib0")
    found = row("environment", nodes(worker1=WORKER), "worker1", spec=spec)
    assert found.remedy == (
        "Leave GLOO_SOCKET_IFNAME of worker1 out of the spec: it follows from fabric_address "
        "(here enP2p1s0f0np0)."
    )


def test_the_remedy_for_an_index_names_the_right_one() -> None:
    spec = environment(NCCL_IB_GID_INDEX="3")
    found = row("environment", nodes(worker1=WORKER), "worker1", spec=spec)
    assert found.remedy == (
        "Leave NCCL_IB_GID_INDEX of worker1 out of the spec: NCCL finds it. Or set it to 4; it may "
        "move when the link does."
    )


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        pytest.param(
            having(
                interfaces=(
                    interface(
                        "10.77.0.2", rdma=(ROCE.model_copy(update={"roce_v2": {"10.9.9.9": 3}}),)
                    ),
                )
            ),
            "NCCL_IB_GID_INDEX is 3, but there is no RoCE v2 GID of 10.77.0.2 on roce0",
            id="a GID of another address",
        ),
        pytest.param(having(interfaces=(interface("10.77.0.2"),)), None, id="no RDMA"),
        pytest.param(
            having(
                interfaces=(
                    interface(
                        "10.77.0.2", rdma=(ROCE.model_copy(update={"link_layer": "InfiniBand"}),)
                    ),
                )
            ),
            None,
            id="InfiniBand",
        ),
    ],
)
def test_an_index_is_for_exactly_the_fabric_address(change: Change, detail: str | None) -> None:
    spec = environment(NCCL_IB_GID_INDEX="3")
    found = row("environment", nodes(worker1=change), "worker1", spec=spec)
    assert found.verdict == ("blocked" if detail else "ready")
    assert detail is None or found.detail == detail


def test_interfaces_of_two_nodes_on_another_network_are_slow() -> None:
    """They meet, but not over the fabric."""
    spec = cluster(
        head={
            "name": "head",
            "address": "10.88.0.1",
            "fabric_address": "10.77.0.1",
            "environment": {"GLOO_SOCKET_IFNAME": "enP7s7"},
        },
        workers=[
            {
                "name": "worker1",
                "fabric_address": "10.77.0.2",
                "environment": {"GLOO_SOCKET_IFNAME": "eth0"},
            }
        ],
    )
    found = row("environment", nodes(head=HEAD, worker1=WORKER), "worker1", spec=spec)
    assert (found.verdict, found.detail) == (
        "slow",
        "GLOO_SOCKET_IFNAME is eth0, which is not the interface of 10.77.0.2",
    )
