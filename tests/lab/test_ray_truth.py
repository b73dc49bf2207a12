"""Ray as it can really be: what is not as planned is healed, or named before the server starts."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from blocks import Cluster
from flows.planning import fabric_of, files_of
from tasks import remote
from tasks.converge import Run
from tasks.errors import NotReady
from tasks.facts import gather_facts
from tasks.inventory import load_cluster
from tasks.ray_nodes import membership_problems, observe_ray
from tasks.ray_proof import verify_cluster
from tasks.ray_start import check_port, check_way, join_worker
from tasks.topology import containers
from tests.lab.product import Product, poll

pytestmark = [pytest.mark.lab, pytest.mark.extended]
RUN = Run(id="truth", who="a test")
JOIN = (
    "ray start --address=10.77.0.1:6379 --node-ip-address=10.77.0.2 --num-gpus=0 "
    "--object-store-memory=100000000 --disable-usage-stats --block"
)
# It takes the worker's GPU, as an engine that was started by hand does.
HOLD_GPU = """
import ray, time
ray.init(address="10.77.0.1:6379", log_to_driver=False)
group = ray.util.placement_group([{"GPU": 1, "node:10.77.0.2": 0.001}])
group.wait(60)
open("/tmp/held", "w").close()
time.sleep(600)
"""
OLD_SERVER = """
import http.server, json
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        said = {"data": [{"id": "tiny"}], "choices": [{"text": "old"}]}
        content = json.dumps({**said, "usage": {"completion_tokens": 4}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
    do_POST = do_GET
http.server.HTTPServer(("0.0.0.0", 8000), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def deployed(stub: Product) -> Product:
    stub.deploy()
    return stub


@pytest.fixture
def cluster(deployed: Product) -> Iterator[Cluster]:
    yield load_cluster(str(deployed.spec))
    remote.disconnect()


def verify(cluster: Cluster) -> str:
    return verify_cluster.fn(cluster, cluster.head, RUN).detail


def alive(cluster: Cluster) -> list[str]:
    nodes = observe_ray(cluster, cluster.head, timeout=0)
    return sorted(node.address for node in nodes if node.alive)


@contextmanager
def in_background(product: Product, node: str, name: str, program: str) -> Iterator[None]:
    """A Python program on a node, outside of docker."""
    product.on(node, f"cat >/root/{name}.py", program.encode())
    product.on(node, f"setsid -f python3 /root/{name}.py </dev/null >/root/{name}.log 2>&1")
    try:
        yield
    finally:
        product.on(node, f"pid=$(pgrep -f '^python3 /root/{name}.py') && kill $pid || true")


def test_as_planned(cluster: Cluster) -> None:
    assert verify(cluster).startswith("2 nodes, 2 GPUs, 2 granted in ")


def test_a_raylet_too_many_in_our_container_is_healed(deployed: Product, cluster: Cluster) -> None:
    deployed.on("worker1", f"docker exec -d {deployed.ray} {JOIN}")
    poll(lambda: len(alive(cluster)) == 3, timeout=120, every=1)
    said = deployed.deploy()
    assert "10.77.0.2 is in Ray 2 times" in said.detail("decide")
    assert {"worker join on worker1", "vLLM serve on head"} <= said.changed
    assert alive(cluster) == ["10.77.0.1", "10.77.0.2"]


def test_a_stranger_s_raylet_is_named(deployed: Product, cluster: Cluster) -> None:
    image = deployed.document["image"]["name"]
    deployed.on(
        "worker1",
        f"docker run -d --name stranger --network host --shm-size 256m {image} {JOIN}",
    )
    try:
        poll(lambda: len(alive(cluster)) == 3, timeout=120, every=1)
        with pytest.raises(NotReady) as caught:
            verify(cluster)
    finally:
        deployed.on("worker1", "docker rm -f stranger")
    assert "worker1: 10.77.0.2 is in Ray 2 times" in caught.value.brief
    assert "a raylet also runs in container stranger on worker1" in caught.value.details
    poll(lambda: len(alive(cluster)) == 2, timeout=120, every=1)


def test_a_gpu_that_another_driver_holds_is_named(deployed: Product, cluster: Cluster) -> None:
    deployed.on("head", f"docker exec -i -d {deployed.ray} python3 -c '{HOLD_GPU}'")
    try:
        poll(lambda: _there(deployed, "/tmp/held"), timeout=120, every=1)
        with pytest.raises(NotReady) as caught:
            verify(cluster)
    finally:
        deployed.on(
            "head",
            f"docker exec {deployed.ray} python3 -c 'import os, signal, glob\n"
            'for path in glob.glob("/proc/[0-9]*/cmdline"):\n'
            '    if b"/tmp/held" in open(path, "rb").read() and path.split("/")[2] != '
            "str(os.getpid()):\n"
            '        os.kill(int(path.split("/")[2]), signal.SIGKILL)\'',
        )
    assert caught.value.brief == "worker1: 0 of its 1 GPUs are free in Ray"
    poll(lambda: _grants(cluster), timeout=60, every=1)


def _there(product: Product, path: str) -> bool:
    return bool(product.on("head", f"docker exec {product.ray} sh -c 'ls {path} || true'"))


def _grants(cluster: Cluster) -> bool:
    try:
        verify(cluster)
    except NotReady:
        return False
    return True


def test_a_restarted_head_with_the_old_one_s_workers_is_healed(
    deployed: Product, cluster: Cluster
) -> None:
    """With what an earlier Ray left in the head's own /tmp, which no container of ours sees."""
    before = deployed.containers("worker1")
    deployed.on("head", "mkdir -p /tmp/ray && echo 10.99.9.9:6379 >/tmp/ray/ray_current_cluster")
    deployed.on("head", f"docker restart -t 1 {deployed.ray}")
    said = deployed.deploy()
    assert "vLLM serve on head" in said.changed
    assert membership_problems(cluster, observe_ray(cluster, cluster.head, timeout=0)) == []
    assert verify(cluster)
    assert deployed.containers("worker1")[deployed.ray] != before[deployed.ray]
    assert deployed.answer() == " of the stub"


def test_a_stranger_on_the_head_s_port_is_named_before_ray_starts(
    deployed: Product, cluster: Cluster
) -> None:
    ray = cluster.ray.model_copy(update={"port": 6390})
    planned = cluster.model_copy(update={"ray": ray})
    listen = 'import socket; socket.create_server(("127.0.0.1", 6390)).accept()'
    with in_background(deployed, "head", "listen", listen):
        poll(lambda: "6390" in deployed.on("head", "ss -ltn"))
        with pytest.raises(NotReady) as caught:
            check_port(planned, planned.head, "Ray head start")
    assert "port 6390 is held by pid" in caught.value.brief
    assert "/root/listen.py" in caught.value.brief


def test_a_worker_that_cannot_reach_the_head_says_so(deployed: Product, cluster: Cluster) -> None:
    rule = "INPUT -p tcp --dport 6379 -s 10.77.0.2 -j DROP"
    deployed.on("head", f"iptables -I {rule}")
    try:
        with pytest.raises(NotReady) as caught:
            check_way(cluster, cluster.workers[0], "worker join")
    finally:
        deployed.on("head", f"iptables -D {rule}")
    assert caught.value.node == "worker1"
    assert caught.value.brief == (
        "worker join: cannot reach the Ray head at 10.77.0.1:6379: timed out"
    )


def test_a_join_that_hangs_ends_at_its_deadline(deployed: Product, cluster: Cluster) -> None:
    """A frozen GCS: the port answers, for the kernel accepts, and Ray itself never does."""
    ray = cluster.ray.model_copy(update={"join_seconds": 8})
    hasty = cluster.model_copy(update={"ray": ray})
    worker = hasty.workers[0]
    facts = {worker.name: gather_facts.fn(hasty, worker, RUN).data}
    read = files_of(hasty, worker, facts)
    want = containers(
        hasty, worker, facts[worker.name].home, fabric_of(worker, facts), read, "other"
    )[0]
    [gcs] = deployed.named("head", "gcs_server")
    os.kill(gcs, signal.SIGSTOP)
    try:
        with pytest.raises(NotReady) as caught:
            join_worker.fn(hasty, worker, RUN, want)
    finally:
        os.kill(gcs, signal.SIGCONT)
    assert caught.value.node == "worker1"
    # By our deadline or, where Ray's own words came first, by those.
    assert caught.value.brief.startswith(
        ("worker join: not ready after 8 s", "worker join: the Ray head cannot be reached")
    )
    said = deployed.deploy()
    assert "worker join on worker1" in said.changed


def test_an_old_listener_on_the_port_is_not_our_server(
    deployed: Product, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def hold(document: dict[str, Any]) -> None:
        document["environment"]["STUB_HOLD"] = "1"

    held = deployed.but(tmp_path_factory.mktemp("held"), hold)
    running = held.start("deploy")
    running.until(lambda: "cluster verification on head" in running.stderr, timeout=300)
    with in_background(deployed, "head", "old", OLD_SERVER):
        said = running.wait()
    assert said.code == 1
    assert "another process than our server answers on port 8000" in said.error
