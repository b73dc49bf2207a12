"""When a step of a deploy has begun, seen from outside; and that nothing is left of any run."""

from collections.abc import Callable
from typing import Any

from tests.lab.product import STUB_TAG, Product, Running, poll

NODES = ("head", "worker1")


# After a link was down for a minute, TCP may wait for most of another until it tells the node's
# sshd that a connection has ended; what ran by that connection ends then.
AFTER_AN_OUTAGE = 120.0


def no_run_is_left(cluster: Product, timeout: float = 20) -> None:
    """No process of any run, and nobody in the lock."""
    poll(lambda: not cluster.of_runs(), timeout, what=cluster.of_runs)
    assert cluster.lock_owner() is None


def nothing_is_left(cluster: Product, timeout: float = 20) -> None:
    """One Ray and one server run, and nothing else of any run."""
    no_run_is_left(cluster, timeout)
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


def has(where: str, command: str) -> Callable[[Product], Any]:
    """Whether a process of that name runs there."""
    return lambda cluster: cluster.named(where, command)


def is_receiving(cluster: Product) -> bool:
    return cluster.runs("worker1", "weights_receive")


def is_loading(cluster: Product) -> bool:
    return cluster.runs("worker1", "docker load")


def loads_its_weights(cluster: Product) -> bool:
    """Whether the fast engine waits for SIGUSR1, as with STUB_HOLD; it may not be there yet."""
    said = cluster.on("head", f"docker logs {cluster.server} 2>&1 || true")
    return "loading weights" in said


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


def until_begun(running: Running, cluster: Product, step: str, begun: Begun) -> None:
    """Wait until the step has begun, or has just ended where it takes no time."""
    rows, seen = begun
    running.until_ended(*rows)
    if seen:
        running.until(lambda: f"  {step} on " in running.stderr or seen(cluster))
