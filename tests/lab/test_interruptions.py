"""A run that is killed, interrupted or not alone: what it leaves, and that the next one goes on."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.product import FAILED, LOCKED, STUB_TAG, Product, Running, poll

pytestmark = [pytest.mark.lab, pytest.mark.extended]

NODES = ("head", "worker1")


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


def no_run_is_left(cluster: Product) -> None:
    """No process of any run, and nobody in the lock."""
    poll(lambda: not cluster.of_runs(), what=cluster.of_runs)
    assert cluster.lock_owner() is None


def nothing_is_left(cluster: Product) -> None:
    """One Ray and one server run, and nothing else of any run."""
    no_run_is_left(cluster)
    for name in NODES:
        wanted = {cluster.ray, cluster.server} if name == "head" else {cluster.ray}
        assert set(cluster.containers(name, "--all")) == wanted
        assert len(cluster.named(name, "raylet")) == 1
        assert len(cluster.on(name, "docker volume ls --quiet").splitlines()) == 1
        images = cluster.on(name, "docker image ls --format '{{.Repository}}:{{.Tag}}'").split()
        assert sorted(images) == ["sparkrail/engine:lab", STUB_TAG]
        assert cluster.on(name, "find /root/.sparkrail/* /models -name '*.tmp' -o -name '.*'") == ""
    assert len(cluster.named("head", "gcs_server")) == 1
    assert len(cluster.named("head", "vllm")) == 1


# --- killed at every step -------------------------------------------------------------------------


def has(where: str, command: str) -> Callable[[Product], Any]:
    """Whether a process of that name runs there."""
    return lambda cluster: cluster.named(where, command)


def is_receiving(cluster: Product) -> bool:
    return cluster.runs("worker1", "weights_receive")


def is_loading(cluster: Product) -> bool:
    return cluster.runs("worker1", "docker load")


def on_all(step: str) -> list[str]:
    return [f"{step} on {name}" for name in NODES]


# When a step has begun: the rows that have ended then, and what is seen of it on the nodes.
Begun = tuple[list[str], Callable[[Product], Any] | None]
BEFORE_STOP: dict[str, Begun] = {
    "lock": ([], Product.of_runs),
    "facts": (["lock on head"], Product.of_runs),
    "preflight": (on_all("facts"), None),
    "image transfer": (["preflight on head"], is_loading),
    "weights sync": (["weights sync on head"], is_receiving),
    "script relay": (["image transfer on worker1", "weights sync on worker1"], None),
    "decide": (on_all("script relay"), None),
}
FROM_STOP_ON: dict[str, Begun] = {
    "stop": (["decide on head"], lambda cluster: not cluster.named("head", "vllm")),
    "GPU residue cleanup": (["fabric proof on head"], None),
    "Ray head start": (on_all("GPU residue cleanup"), has("head", "gcs_server")),
    "worker join": (["Ray head start on head"], has("worker1", "raylet")),
    "cluster verification": (["worker join on worker1"], None),
    "vLLM serve": (["cluster verification on head"], has("head", "vllm")),
    # What a kill during `vLLM serve` leaves may answer by now, and `decide` be the last to look.
    "record": (["decide on head"], None),
}


def kill_at(cluster: Product, step: str, begun: Begun) -> None:
    """Kill a deploy when the step has begun, or has just ended where it takes no time."""
    rows, seen = begun
    running: Running = cluster.start("deploy")
    running.until_ended(*rows)
    if seen:
        running.until(lambda: f"  {step} on " in running.stderr or seen(cluster))
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
    running = cluster.start("deploy")
    running.until(lambda: is_loading(cluster))
    interrupt(running)
    no_run_is_left(cluster)
    assert not is_loading(cluster)
    assert [cluster.containers(name) for name in NODES] == before
    assert cluster.answer() == " of the stub"
    # What the next transfer would put right, in less than its time.
    replaced = "docker image ls --format '{{.Repository}}:{{.Tag}}' sparkrail/stub-replaced"
    cluster.on("worker1", f"docker tag {right} {STUB_TAG}; docker image rm $({replaced})")


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
    running.until(
        lambda: "loading weights" in held.on("head", f"docker logs {held.server} 2>&1 || true")
    )
    held.send_signal("head", "vllm", signal.SIGUSR1)
    assert running.wait().code == 0
    nothing_is_left(held)
