"""Faults that are named before the running release is touched, each on two real nodes."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.lab import engine_image, network
from tests.lab.command import run
from tests.lab.layout import cache_home, nodes
from tests.lab.product import (
    BLOCKED,
    DONE,
    INVALID,
    STUB,
    STUB_TAG,
    Product,
    Said,
    lab_command,
)

pytestmark = [pytest.mark.lab, pytest.mark.extended]

SHARD = "/models/tiny/model-00002-of-00004.safetensors"
TOKENIZER = "/models/tiny/tokenizer.json"
BARE_TAG = "sparkrail/engine:bare"
SWALLOWING_TAG = "sparkrail/engine:swallowing"
RAY = "usr/local/lib/python3.11/dist-packages/ray-2.60.0.dist-info/METADATA"
SOON = 20  # Seconds from the reading of the spec; an idle machine checks in six.


@pytest.fixture(scope="module")
def running(stub: Product) -> Product:
    """A release runs, and the head remembers what the engine said of its arguments."""
    stub.deploy()
    return stub


@pytest.fixture
def release(running: Product) -> Iterator[Product]:
    """The containers are after the test the ones that they were before it."""
    before = [running.containers(name) for name in running.nodes]
    yield running
    assert [running.containers(name) for name in running.nodes] == before


def rows(said: Said, verdict: str = "blocked") -> dict[tuple[str, str], str]:
    """What was found, by node and check."""
    found = [row for row in said.document["problems"] if row["verdict"] == verdict]
    assert all(row["remedy"] for row in found)
    return {(row["node"], row["check"]): row["detail"] for row in found}


@contextmanager
def broken(product: Product, node: str, fault: str, repair: str) -> Iterator[None]:
    """A shell script breaks something on a node, another one mends it."""
    product.on(node, fault)
    try:
        yield
    finally:
        product.on(node, repair)


def aside(path: str) -> tuple[str, str]:
    return f"mv {path} /models/.aside", f"mv /models/.aside {path}"


def test_a_healthy_cluster(release: Product, record_property: Any) -> None:
    said = release.run("check")
    assert (said.code, said.changed) == (DONE, set())
    assert "remembered" in said.detail("engine check")
    seconds = said.document["seconds"]
    record_property("seconds", seconds)
    print(f"checked in {seconds:.1f} s, with the engine's remembered verdict")
    assert seconds < SOON


# --- the spec against the nodes -------------------------------------------------------------------

Change = Callable[[dict[str, Any]], object]


def variable(name: str, value: str) -> Change:
    return lambda spec: spec["workers"][0].update(environment={name: value})


def more_gpus(spec: dict[str, Any]) -> None:
    spec["head"]["gpus"] = 2
    spec["image"]["gpu_access"] = "nvidia"
    spec["serve"].update(tensor_parallel=1, pipeline_parallel=3)


@pytest.mark.parametrize(
    ("change", "where", "detail"),
    [
        pytest.param(
            variable("GLOO_SOCKET_IFNAME", "ib0"),
            ("worker1", "environment"),
            "GLOO_SOCKET_IFNAME is ib0, which worker1 does not have; it has lo, enP2p1s0f0np0",
            id="absent interface",
        ),
        pytest.param(
            variable("GLOO_SOCKET_IFNAME", "^lo,docker0"),
            ("worker1", "environment"),
            "GLOO_SOCKET_IFNAME is ^lo,docker0; it takes one whole name, without ^, = and commas",
            id="Gloo variable in NCCL's words",
        ),
        pytest.param(
            variable("NCCL_IB_HCA", "mlx5_0"),
            ("worker1", "environment"),
            "NCCL_IB_HCA is mlx5_0, which matches no RDMA device of worker1; it has none",
            id="absent RDMA device",
        ),
        pytest.param(
            lambda spec: spec["serve"].update(arguments=["--mem-fraction-static=0.8"]),
            ("head", "arguments"),
            "vllm serve refuses its arguments: unrecognized arguments: --mem-fraction-static=0.8",
            id="flag of another engine",
        ),
        pytest.param(
            more_gpus,
            ("head", "gpus"),
            "nvidia-smi finds 1 GPUs, the spec says 2",
            id="more ranks than GPUs",
        ),
        pytest.param(
            lambda spec: spec["ray"].update(object_store_mib=20000),
            ("head", "shared memory"),
            "ray.object_store_mib is 20000, but containers have 10240 MiB of shared memory",
            id="object store greater than shared memory",
        ),
    ],
)
def test_a_spec_that_does_not_fit_the_nodes(
    release: Product, tmp_path: Path, change: Change, where: tuple[str, str], detail: str
) -> None:
    said = release.but(tmp_path, change).run("deploy")
    assert said.code == BLOCKED, said.error
    assert rows(said)[where] == detail


def test_more_ranks_than_the_spec_has_gpus(release: Product, tmp_path: Path) -> None:
    said = release.but(tmp_path, lambda spec: spec["serve"].update(tensor_parallel=4)).run("check")
    assert said.code == INVALID
    assert "4 ranks, but the nodes have 2 GPUs" in said.error


def test_an_image_without_an_engine(release: Product, tmp_path: Path) -> None:
    archive = engine_image.tiny_image(cache_home(), BARE_TAG)
    release.on("head", "docker load", stdin=archive.read_bytes())
    said = release.but(tmp_path, lambda spec: spec["image"].update(name=BARE_TAG)).run("deploy")
    assert said.code == BLOCKED, said.error
    assert rows(said) == {
        ("head", "engine"): f"{BARE_TAG} has no python3 and no vllm and no ray",
    }


# --- the nodes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "repair", "detail"),
    [
        pytest.param(
            f"cp -p {SHARD} /models/.aside; truncate --size=-1 {SHARD}",
            f"mv /models/.aside {SHARD}",
            "bytes, its header promises",
            id="truncated shard",
        ),
        pytest.param(*aside(TOKENIZER), "there is no tokenizer", id="no tokenizer"),
        pytest.param(*aside(SHARD), "is missing (model.safetensors.index.json", id="lost shard"),
    ],
)
def test_a_model_that_is_not_whole(release: Product, fault: str, repair: str, detail: str) -> None:
    with broken(release, "head", fault, repair):
        said = release.run("deploy")
    assert said.code == BLOCKED, said.error
    [(where, found)] = rows(said).items()
    assert where == ("head", "weights")
    assert detail in found


def test_code_that_comes_with_the_weights(release: Product) -> None:
    config = "/models/tiny/config.json"
    changed = json.loads(release.on("head", f"cat {config}")) | {"auto_map": {"AutoConfig": "c.C"}}
    fault = f"cp -p {config} /models/.aside; cat >{config} <<'END'\n{json.dumps(changed)}\nEND"
    with broken(release, "head", fault, f"mv /models/.aside {config}"):
        said = release.run("check")
    assert said.code == BLOCKED, said.error
    assert list(rows(said)) == [("head", "own code")]


def test_a_disk_that_is_too_small(release: Product) -> None:
    with broken(release, "worker1", *aside(SHARD)):
        lab_command(release.lab, "break", "worker1", "fill-disk")
        try:
            said = release.run("deploy")
        finally:
            lab_command(release.lab, "break", "worker1", "free-disk")
    assert said.code == BLOCKED, said.error
    [(where, found)] = rows(said).items()
    assert where == ("worker1", "disk")
    assert "0.0 GiB free at /models" in found


def test_a_firewall(release: Product) -> None:
    rule = "INPUT -p tcp --dport 6379 --syn -j DROP"
    with broken(release, "head", f"iptables --insert {rule}", f"iptables --delete {rule}"):
        said = release.run("check")
    assert said.code == BLOCKED, said.error
    assert rows(said) == {
        ("worker1", "fabric path"): "10.77.0.1:6379 (head) from 10.77.0.2: no answer"
    }


def test_a_switch_with_a_smaller_mtu(release: Product) -> None:
    worker = nodes(release.shape)[1]
    port = ["link", "set", network.fabric_port(worker), "mtu"]
    switch = ["ip", "-n", release.lab.namespace("switch")]
    run([*switch, *port, "1500"])
    try:
        said = release.run("check")
    finally:
        run([*switch, *port, "9000"])
    assert said.code == BLOCKED, said.error
    lost = "packets of 9000 bytes from enp1s0f1np1 do not arrive at worker1, those of 1500 do"
    assert rows(said)["head", "fabric mtu"] == lost


@pytest.fixture
def by_rsync(release: Product, tmp_path: Path) -> Product:
    """The same release, by a spec that has its weights sent over the head's ssh."""
    return release.but(tmp_path, lambda spec: spec.update(weights={"transport": "rsync"}))


def test_a_login_that_prints(release: Product, by_rsync: Product) -> None:
    with broken(
        release,
        "worker1",
        "cp -p ~/.bashrc /models/.aside; sed -i '1i echo hello from worker1' ~/.bashrc",
        "mv /models/.aside ~/.bashrc",
    ):
        assert release.run("check").code == DONE
        idle = by_rsync.run("check")
        with broken(
            release, "worker1", f"mv {TOKENIZER} /models/.tok", f"mv /models/.tok {TOKENIZER}"
        ):
            needed = by_rsync.run("deploy")
    said = (
        "the login of root@10.77.0.2 prints 19 bytes unasked, which breaks rsync: "
        "hello from worker1"
    )
    assert idle.code == DONE, idle.error
    assert rows(idle, "slow")["worker1", "head's ssh"].startswith(said)
    assert needed.code == BLOCKED, needed.error
    assert rows(needed) == {("worker1", "head's ssh"): said}


def test_a_head_that_does_not_know_its_worker(release: Product, by_rsync: Product) -> None:
    with broken(
        release, "head", "mv ~/.ssh/known_hosts ~/.ssh/aside", "mv ~/.ssh/aside ~/.ssh/known_hosts"
    ):
        said = by_rsync.run("check")
    assert said.code == DONE
    found = rows(said, "slow")["worker1", "head's ssh"]
    assert found.startswith("head -> root@10.77.0.2:22: head does not know its host key")


CARRIED = b"""\
#!/usr/bin/python3
import os
from vllm.ray.ray_env import get_env_vars_to_copy
print(*sorted(get_env_vars_to_copy() & set(os.environ)))
"""


def test_what_names_a_node_stays_there(release: Product) -> None:
    """Behind the launch script, the real vLLM tells what it would carry over to other nodes."""
    script = f"""
cat >/tmp/carried && chmod +x /tmp/carried
docker run --rm --init --network=none --volume=$HOME/.sparkrail/{release.name}/run:/sparkrail:ro \
    --volume=/tmp/carried:/usr/local/bin/vllm:ro --entrypoint=sh {STUB_TAG} /sparkrail/launch serve
rm /tmp/carried"""
    carried = set(release.on("head", script, stdin=CARRIED).splitlines()[-1].split())
    assert {"VLLM_CPU_KVCACHE_SPACE"} <= carried
    assert not carried & {"VLLM_HOST_IP", "NCCL_SOCKET_IFNAME", "UCX_NET_DEVICES"}


# --- what heals -----------------------------------------------------------------------------------


def test_a_worker_without_a_tokenizer(release: Product) -> None:
    release.on("worker1", f"rm {TOKENIZER}")
    assert release.run("check").code == DONE
    said = release.deploy()
    assert said.changed == {"weights sync on worker1"}
    assert "tokenizer.json" in said.detail("weights sync", "worker1")
    release.on("worker1", f"test -s {TOKENIZER}")


def test_another_ray_in_the_workers_image(running: Product) -> None:
    """Equal content is what counts: the head's image takes its place under the same tag."""
    archive = engine_image.variant(
        cache_home(),
        STUB_TAG,
        top_files={
            "usr/local/bin/vllm": STUB.read_bytes(),
            RAY: b"Metadata-Version: 2.4\nName: ray\nVersion: 2.59.0\n",
        },
        complete=False,
    )
    running.on("worker1", "docker load", stdin=archive.read_bytes())
    said = running.deploy()
    assert said.changed == {"image transfer on worker1"}
    assert running.deploy().outcome == "unchanged"


def test_an_entrypoint_that_would_swallow_the_command(running: Product, tmp_path: Path) -> None:
    archive = engine_image.variant(
        cache_home(),
        SWALLOWING_TAG,
        top_files={"usr/local/bin/vllm": STUB.read_bytes()},
        entrypoint=("/bin/echo", "vllm", "serve"),
        complete=False,
    )
    for name in running.nodes:
        running.on(name, "docker load", stdin=archive.read_bytes())
    swallowing = running.but(tmp_path, lambda spec: spec["image"].update(name=SWALLOWING_TAG))
    swallowing.deploy()
    assert swallowing.answer()


# --- black holes: last, because Ray on a silent worker is lost ------------------------------------


@pytest.mark.parametrize(
    ("fault", "repair"), [("freeze", "thaw"), ("link-down", "link-up")], ids=["frozen", "no link"]
)
def test_a_worker_that_is_silent(
    running: Product, fault: str, repair: str, record_property: Any
) -> None:
    lab_command(running.lab, "break", "worker1", fault)
    try:
        said = running.run("check")
    finally:
        lab_command(running.lab, "break", "worker1", repair)
    seconds = said.document["seconds"]
    record_property("seconds", seconds)
    print(f"a silent worker ({fault}) was reported after {seconds:.1f} s")
    assert said.code == BLOCKED, said.error
    assert ("worker1", "reachable") in rows(said)
    assert seconds < SOON
