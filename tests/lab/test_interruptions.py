"""A run that is killed, interrupted or not alone: what it leaves, and that the next one goes on."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.docker_engine import cut_removal_short
from tests.lab.holds import held_load
from tests.lab.moments import (
    BEFORE_STOP,
    FROM_STOP_ON,
    NODES,
    Begun,
    loads_its_weights,
    no_run_is_left,
    nothing_is_left,
    until_begun,
)
from tests.lab.product import FAILED, LOCKED, STUB_TAG, Product, Running

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def cluster(stub: Product) -> Iterator[Product]:
    stub.deploy()
    yield stub


@pytest.fixture(scope="module")
def held(cluster: Product, tmp_path_factory: pytest.TempPathFactory) -> Product:
    """Another spec, for which every container is started anew; its server loads until SIGUSR1."""
    return cluster.but(
        tmp_path_factory.mktemp("held"),
        lambda spec: spec["environment"].update(STUB_HOLD="1"),
    )


# --- killed at every step -------------------------------------------------------------------------


def kill_at(cluster: Product, step: str, begun: Begun) -> None:
    """Kill a deploy when the step has begun, or has just ended where it takes no time."""
    running = cluster.start("deploy")
    until_begun(running, cluster, step, begun)
    running.kill()


def test_killed_before_stop(cluster: Product) -> None:
    """The running release goes on, whatever happens to the runs."""
    before = [cluster.containers(name) for name in NODES]
    cluster.on("worker1", f"docker tag sparkrail/engine:lab {STUB_TAG}")
    cluster.on("worker1", "for file in /models/tiny/*.safetensors; do echo >> $file; done")
    for name in NODES:
        cluster.on(name, f"echo '# edited' >> /root/.sparkrail/{cluster.name}/run/launch")
    for step, begun in BEFORE_STOP.items():
        kill_at(cluster, step, begun)
    cluster.deploy()
    nothing_is_left(cluster)
    assert [cluster.containers(name) for name in NODES] == before
    assert cluster.answer() == " of the stub"


def test_killed_from_stop_on(cluster: Product, tmp_path: Path) -> None:
    """Each run goes on where the one before was killed."""
    changed = cluster.but(tmp_path, lambda spec: spec["environment"].update(CHANGED="1"))
    for step, begun in FROM_STOP_ON.items():
        kill_at(changed, step, begun)
    changed.deploy()
    nothing_is_left(changed)
    assert changed.answer() == " of the stub"


@pytest.mark.parametrize("name", ["server", "ray"])
def test_a_power_cut_in_mid_removal(cluster: Product, name: str) -> None:
    """docker calls such a container dead; it can neither be updated nor tell its log."""
    container = getattr(cluster, name)
    cut_removal_short(cluster, "head", container)
    assert cluster.on("head", f"docker inspect -f '{{{{.State.Status}}}}' {container}") == "dead"
    cluster.deploy()
    nothing_is_left(cluster)
    assert cluster.answer() == " of the stub"


# --- interrupted by Ctrl-C ------------------------------------------------------------------------


def interrupt(running: Running) -> None:
    running.process.send_signal(signal.SIGINT)
    said = running.wait(timeout=20)
    assert said.code == FAILED
    assert "interrupted" in said.stderr


def test_interrupted_during_the_image_transfer(cluster: Product) -> None:
    before = [cluster.containers(name) for name in NODES]
    right = cluster.on("worker1", f"docker image inspect --format '{{{{.Id}}}}' {STUB_TAG}")
    cluster.on("worker1", f"docker tag sparkrail/engine:lab {STUB_TAG}")
    with held_load(cluster) as hold:
        running = cluster.start("deploy")
        running.until(hold.reached)
        interrupt(running)
        no_run_is_left(cluster)
    assert [cluster.containers(name) for name in NODES] == before
    assert cluster.answer() == " of the stub"
    # What the next transfer would put right, in less than its time.
    replaced = "docker image ls --format '{{.Repository}}:{{.Tag}}' sparkrail/stub-replaced"
    cluster.on("worker1", f"docker tag {right} {STUB_TAG}; {replaced} | xargs -r docker image rm")


def test_two_at_once_and_interrupted_while_serve_is_waited_for(held: Product) -> None:
    running = held.start("deploy")
    running.until_ended("cluster verification on head")
    running.until(lambda: held.named("head", "vllm"))
    owner = held.lock_owner()
    assert owner is not None
    refused = held.run("deploy")
    assert refused.code == LOCKED
    assert f"stub is worked on by run {owner['run']} of {owner['who']}, since " in refused.error
    interrupt(running)
    no_run_is_left(held)

    running = held.start("deploy")
    running.until_ended("cluster verification on head")
    # Before it says so, the signal would end it.
    running.until(lambda: loads_its_weights(held))
    held.send_signal("head", "vllm", signal.SIGUSR1)
    assert running.wait().code == 0
    nothing_is_left(held)
