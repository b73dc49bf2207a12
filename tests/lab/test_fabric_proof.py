"""The all-reduce over a real fabric: before anything is stopped, and gone without a trace."""

from collections.abc import Iterator
from typing import Any

import pytest

from blocks import Cluster
from tasks import remote
from tasks.converge import Outcome, Run
from tasks.errors import NotReady
from tasks.fabric_proof import prove_fabric
from tasks.inventory import load_cluster
from tasks.topology import ContainerSpec
from tests.lab.product import Product, poll

pytestmark = [pytest.mark.lab, pytest.mark.extended]
RUN = Run(id="proof", who="a test")
PROOFS = "--filter label=sparkrail.role=proof"


@pytest.fixture(scope="module")
def proven(stub: Product, tmp_path_factory: pytest.TempPathFactory) -> Product:
    def prove(document: dict[str, Any]) -> None:
        document["proof"] = {"enabled": True}

    return stub.but(tmp_path_factory.mktemp("proven"), prove)


@pytest.fixture(scope="module")
def deployed(proven: Product) -> Product:
    said = proven.deploy()
    assert "MiB/s by gloo over 2 nodes (enp1s0f1np1, enP2p1s0f0np0)" in said.detail("fabric proof")
    steps = [row["step"] for row in said.document["steps"]]
    assert steps.index("decide") < steps.index("fabric proof") < steps.index("Ray head start")
    return proven


@pytest.fixture
def cluster(deployed: Product) -> Iterator[Cluster]:
    yield load_cluster(str(deployed.spec))
    remote.disconnect()


def prove(cluster: Cluster, product: Product, **changed: str) -> Outcome:
    """The proof with one line more at the end of the variables of a node, by its name."""
    wanted = {}
    for node in cluster.nodes:
        folder = f"/root/changed/{node.name}"
        line = changed.get(node.name, "")
        product.on(
            node.name,
            f"mkdir -p {folder} && cp -r /root/.sparkrail/{cluster.name}/run/. {folder}/ "
            f"&& echo '{line}' >>{folder}/node.env",
        )
        wanted[node.name] = spec_of(cluster, folder)
    return prove_fabric.fn(cluster, cluster.head, RUN, wanted)


def spec_of(cluster: Cluster, folder: str) -> ContainerSpec:
    return ContainerSpec(
        name="proof",
        role="worker",
        image=cluster.image.name,
        image_content="",
        command=(),
        folder=folder,
        model=cluster.model.path,
        gpu_access="none",
        shm_mib=64,
        rdma=False,
        files=(),
    )


def left(product: Product) -> list[str]:
    return [name for node in product.nodes for name in product.containers(node, "--all", PROOFS)]


def test_it_leaves_nothing_and_unchanged_runs_do_without(deployed: Product) -> None:
    assert left(deployed) == []
    again = deployed.deploy()
    assert again.outcome == "unchanged"
    assert "fabric proof" not in {row["step"] for row in again.document["steps"]}


@pytest.mark.parametrize(
    ("changed", "node", "said"),
    [
        pytest.param(
            {"worker1": "export GLOO_SOCKET_IFNAME=ib0"},
            "worker1",
            "Unable to find address for: ib0; here are",
            id="an interface that the worker does not have",
        ),
        pytest.param(
            {"head": "unset GLOO_SOCKET_IFNAME"},
            "head",
            "Gloo was given an interface that the node does not have",
            id="none on the head",
        ),
        pytest.param(
            {"worker1": "export VLLM_HOST_IP=10.77.0.1"},
            "worker1",
            "VLLM_HOST_IP is 10.77.0.1, planned is 10.77.0.2",
            id="the head's address on the worker",
        ),
    ],
)
def test_wrong_variables(
    cluster: Cluster, deployed: Product, changed: dict[str, str], node: str, said: str
) -> None:
    before = [deployed.containers(name) for name in deployed.nodes]
    with pytest.raises(NotReady) as caught:
        prove(cluster, deployed, **changed)
    assert caught.value.node == node
    assert said in caught.value.brief
    assert caught.value.remedy.endswith("Nothing was stopped.")
    assert [deployed.containers(name) for name in deployed.nodes] == before


@pytest.mark.parametrize("node", ["head", "worker1"])
def test_loopback_is_told_even_where_it_works(
    cluster: Cluster, deployed: Product, node: str
) -> None:
    with pytest.raises(NotReady) as caught:
        prove(cluster, deployed, **{node: "export GLOO_SOCKET_IFNAME=lo"})
    assert caught.value.node == node
    assert "GLOO_SOCKET_IFNAME is lo (127.0.0.1)" in caught.value.brief


def test_a_firewall_on_the_head(cluster: Cluster, deployed: Product) -> None:
    rule = "INPUT -p tcp -m multiport --dports 20000:32000 -s 10.77.0.2 -j DROP"
    deployed.on("head", f"iptables -I {rule}")
    try:
        with pytest.raises(NotReady) as caught:
            prove(cluster, deployed)
    finally:
        deployed.on("head", f"iptables -D {rule}")
    assert caught.value.node == "worker1"
    assert "cannot reach 10.77.0.1:" in caught.value.brief
    assert "firewall" in caught.value.remedy


def test_a_killed_run_leaves_no_container_and_stops_nothing(deployed: Product) -> None:
    before = [deployed.containers(name) for name in deployed.nodes]
    running = deployed.start("deploy", "--restart", "always")
    running.until(lambda: len(left(deployed)) == 2, timeout=300)
    running.kill()
    poll(lambda: not left(deployed), timeout=60, every=0.5)
    assert [deployed.containers(name) for name in deployed.nodes] == before
    assert deployed.answer() == " of the stub"
