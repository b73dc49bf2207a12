"""A run that is killed, interrupted or not alone: what it leaves, and that the next one goes on."""

import signal
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.lab.product import DONE, FAILED, LOCKED, STUB_TAG, Product, Running, poll

pytestmark = pytest.mark.lab

NODES = ("head", "worker1")
ROUNDS = count(1)


@pytest.fixture(scope="module")
def cluster(stub: Product) -> Iterator[Product]:
    stub.deploy()
    yield stub


def changed_spec(cluster: Product, folder: Path, **variables: str) -> Product:
    """Another spec, for which every container is started anew."""
    variables["ROUND"] = str(next(ROUNDS))
    return cluster.but(folder, lambda spec: spec["environment"].update(variables))


def nothing_is_left(cluster: Product) -> None:
    """One Ray and one server run, and nothing else of any run."""
    poll(lambda: not cluster.of_runs(), what=cluster.of_runs)
    assert cluster.lock_owner() is None
    for name in cluster.nodes:
        wanted = {cluster.ray, cluster.server} if name == "head" else {cluster.ray}
        assert set(cluster.containers(name, "--all")) == wanted
        assert len(cluster.named(name, "raylet")) == 1
        assert len(cluster.on(name, "docker volume ls --quiet").splitlines()) == 1
        images = cluster.on(name, "docker image ls --format '{{.Repository}}:{{.Tag}}'").split()
        assert sorted(images) == ["sparkrail/engine:lab", STUB_TAG]
        aside = (
            "find /root/.sparkrail/* /models -name '*.tmp' -o -name '*.partial' -o -name '.rsync*'"
        )
        assert cluster.on(name, aside) == ""
    assert len(cluster.named("head", "gcs_server")) == 1
    assert len(cluster.named("head", "vllm")) == 1


# --- killed at every step -------------------------------------------------------------------------


def damage_weights(cluster: Product) -> None:
    cluster.on("worker1", "for file in /models/tiny/*.safetensors; do echo >> $file; done")


def move_tag(cluster: Product) -> None:
    cluster.on("worker1", f"docker tag sparkrail/engine:lab {STUB_TAG}")


def edit_scripts(cluster: Product) -> None:
    for name in NODES:
        cluster.on(name, f"echo '# edited' >> /root/.sparkrail/{cluster.name}/run/launch")


def has(where: str, command: str) -> Callable[[Product], Any]:
    """Whether a process of that name runs there."""
    return lambda cluster: cluster.named(where, command)


def is_loading(cluster: Product) -> bool:
    return cluster.runs("worker1", "docker load")


def on_all(step: str) -> list[str]:
    return [f"{step} on {name}" for name in NODES]


def wait_for_step(cluster: Product, running: Running, step: str) -> None:
    """Returns as soon as the step has begun, or has just ended where it takes no time."""
    rows, begun = BEGINS[step]
    running.until_ended(*rows)
    if begun:
        running.until(lambda: f"  {step} on worker1" in running.stderr or begun(cluster))


BEGINS: dict[str, tuple[list[str], Callable[[Product], Any] | None]] = {
    "lock": ([], Product.of_runs),
    "facts": (["lock on head"], Product.of_runs),
    "preflight": (on_all("facts"), None),
    "image transfer": (on_all("facts"), is_loading),
    "weights sync": (on_all("facts"), has("worker1", "rsync")),
    "script relay": (on_all("image transfer"), None),
    "decide": (on_all("script relay"), None),
    "stop": (["fabric proof on head"], None),
    "GPU residue cleanup": (on_all("stop"), None),
    "Ray head start": (on_all("GPU residue cleanup"), has("head", "gcs_server")),
    "worker join": (["Ray head start on head"], has("worker1", "raylet")),
    "cluster verification": (["worker join on worker1"], None),
    "vLLM serve": (["cluster verification on head"], has("head", "vllm")),
    "record": (["vLLM serve on head"], None),
}


@pytest.mark.parametrize(
    ("step", "drift"),
    [
        ("lock", edit_scripts),
        ("facts", edit_scripts),
        ("preflight", edit_scripts),
        ("image transfer", move_tag),
        ("weights sync", damage_weights),
        ("script relay", edit_scripts),
        ("decide", edit_scripts),
    ],
)
def test_killed_before_stop(cluster: Product, step: str, drift: Callable[[Product], None]) -> None:
    """The running release is not touched: it goes on, whatever happens to the run."""
    before = [cluster.containers(name) for name in NODES]
    drift(cluster)
    running = cluster.start("deploy")
    wait_for_step(cluster, running, step)
    running.kill()
    cluster.deploy()
    nothing_is_left(cluster)
    assert [cluster.containers(name) for name in NODES] == before
    assert cluster.answer() == " of the stub"


@pytest.mark.parametrize(
    "step",
    [
        "stop",
        "GPU residue cleanup",
        "Ray head start",
        "worker join",
        "cluster verification",
        "vLLM serve",
        "record",
    ],
)
def test_killed_from_stop_on(cluster: Product, tmp_path: Path, step: str) -> None:
    product = changed_spec(cluster, tmp_path)
    running = product.start("deploy")
    wait_for_step(product, running, step)
    running.kill()
    product.deploy()
    nothing_is_left(product)
    assert product.answer() == " of the stub"


# --- interrupted by Ctrl-C ------------------------------------------------------------------------


def interrupt(running: Running) -> str:
    """What it says when it is interrupted."""
    running.process.send_signal(signal.SIGINT)
    said = running.wait(timeout=20)
    print(f"ended {said.seconds:.1f} s after its start")
    assert said.code == FAILED
    assert "interrupted" in said.stderr
    return said.stderr


def test_interrupted_during_the_image_transfer(cluster: Product) -> None:
    cluster.deploy()
    before = [cluster.containers(name) for name in NODES]
    move_tag(cluster)
    running = cluster.start("deploy")
    running.until(lambda: is_loading(cluster))
    interrupt(running)
    poll(lambda: not cluster.of_runs(), what=cluster.of_runs)
    assert cluster.lock_owner() is None
    assert [cluster.containers(name) for name in NODES] == before
    assert cluster.answer() == " of the stub"
    cluster.deploy()
    nothing_is_left(cluster)


def test_interrupted_while_serve_is_waited_for(cluster: Product, tmp_path: Path) -> None:
    held = changed_spec(cluster, tmp_path, STUB_HOLD="1")
    running = held.start("deploy")
    running.until(lambda: held.named("head", "vllm"))
    interrupt(running)
    poll(lambda: not held.of_runs(), what=held.of_runs)
    assert held.lock_owner() is None
    cluster.deploy()
    nothing_is_left(cluster)


# --- two at once ----------------------------------------------------------------------------------


def test_two_at_once(cluster: Product, tmp_path: Path) -> None:
    held = changed_spec(cluster, tmp_path, STUB_HOLD="1")
    running = held.start("deploy")
    running.until(lambda: held.named("head", "vllm"))
    owner = held.lock_owner()
    assert owner is not None
    for verb in ("deploy", "destroy"):
        refused = cluster.run(verb)
        assert refused.code == LOCKED
        assert f"stub is worked on by run {owner['run']} of {owner['who']}, since " in refused.error
    # Looking is allowed.
    assert cluster.run("check").code == DONE
    assert cluster.run("deploy", "--dry-run").code == DONE
    held.send_signal("head", "vllm", signal.SIGUSR1)
    assert running.wait().code == DONE
    cluster.deploy()
    nothing_is_left(cluster)
