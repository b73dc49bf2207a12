"""Reading a node: one relayed script for the machine, and beside it the docker API."""

import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import docker
from docker.errors import ImageNotFound

from blocks import Cluster, Node
from tasks.converge import Outcome, Run, step
from tasks.docker_facts import CONTAINERD_ROOT, DOCKER_ROOT, DockerFacts, parse_docker
from tasks.engines import engine
from tasks.errors import CommandFailed
from tasks.node_facts import Interface, NodeFacts, parse_facts
from tasks.peers import observe_peers
from tasks.remote import Remote, connect
from tasks.weights import glance

__all__ = ["DockerFacts", "Interface", "NodeFacts", "gather_facts", "observe_facts", "parse_facts"]

T = TypeVar("T")
PROGRAM = (Path(__file__).parent / "relayed" / "facts.py").read_bytes()
PROGRAMS = ("rsync", "ssh", "docker", "nvidia-container-runtime-hook")
PROGRAM_TIMEOUT = 10  # Seconds for nvidia-smi, which hangs when the driver does.
DOCKER_TIMEOUT = 15
# What of a model's config.json tells whether it fits.
CONFIG = (
    "model_type",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "max_position_embeddings",
    "dtype",
    "torch_dtype",
    "kv_lora_rank",
    "sliding_window",
    "layer_types",
)


def arguments(cluster: Cluster, *more: str) -> str:
    """What the relayed script is asked for."""
    paths = dict.fromkeys((DOCKER_ROOT, CONTAINERD_ROOT, cluster.model.path, *more))
    return json.dumps(
        {
            "paths": list(paths),
            "model": cluster.model.path,
            "config": CONFIG,
            "programs": PROGRAMS,
            "timeout": PROGRAM_TIMEOUT,
        }
    )


def observe_facts(cluster: Cluster, node: Node) -> NodeFacts:
    """Ask the script and docker side by side; a docker that fails is a fact, no error."""
    remote = connect(cluster, node)
    asked = _in_background(lambda: observe_docker(cluster, node))
    facts = observe_script(remote, arguments(cluster))
    try:
        found = asked.result(timeout=DOCKER_TIMEOUT)
    except TimeoutError:
        return facts.model_copy(update={"docker_error": f"no answer within {DOCKER_TIMEOUT} s"})
    except CommandFailed as error:
        said = "\n".join(part for part in (error.brief, error.details) if part)
        return facts.model_copy(update={"docker_error": said})
    facts = facts.model_copy(update={"docker": found})
    if facts.disk_of(found.root) is None:
        disks = observe_script(remote, arguments(cluster, found.root)).disks
        facts = facts.model_copy(update={"disks": disks})
    return facts


def observe_script(remote: Remote, wanted: str) -> NodeFacts:
    # Isolated: a json.py in the home folder, or PYTHON variables, must not change the answer.
    argv = ("python3", "-IS", "-", wanted)
    said = remote.run(argv, stdin=PROGRAM, timeout=3 * PROGRAM_TIMEOUT).stdout
    now = time.time()
    facts = parse_facts(said)
    return facts.model_copy(update={"clock_offset": facts.time - now})


def observe_docker(cluster: Cluster, node: Node) -> DockerFacts:
    with engine(cluster, node) as client:
        api: Any = client.api
        return parse_docker(
            api.api_version,
            api.info(),
            _image(client, cluster.image.name),
            api.containers(all=True),
        )


def _image(client: docker.DockerClient, name: str) -> Mapping[str, Any] | None:
    try:
        return client.images.get(name).attrs
    except ImageNotFound:
        return None


def _in_background(ask: Callable[[], T]) -> Future[T]:
    """Of a daemon thread: a docker that hangs must not hold up the end of this process."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(ask())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="sparkrail-docker-facts", daemon=True).start()
    return future


def gib(size: int) -> str:
    return f"{size / 2**30:.0f} GiB" if size >= 2**30 * 10 else f"{size / 2**30:.1f} GiB"


def summary(node: Node, facts: NodeFacts) -> str:
    """Such as: GB10 x1, 121 GiB, enp1s0f1np1."""
    names = list(dict.fromkeys(gpu.name.removeprefix("NVIDIA ") for gpu in facts.gpus))
    gpus = f"{', '.join(names)} x{len(facts.gpus)}" if names else "no GPU"
    interface = facts.interface_of(node.fabric_address)
    fabric = interface.name if interface else f"{node.fabric_address} on no interface"
    return f"{gpus}, {gib(facts.memory.total)}, {fabric}"


@step("facts")
def gather_facts(cluster: Cluster, node: Node, run: Run) -> Outcome:  # noqa: ARG001 - as every step
    """Everything that the later steps decide on, all asked at once."""
    remote = connect(cluster, node)
    with ThreadPoolExecutor(3) as pool:
        machine = pool.submit(observe_facts, cluster, node)
        weights = pool.submit(glance, cluster, node)
        peers = pool.submit(observe_peers, cluster, node, remote)
    found = {"weights": weights.result(), "peers": peers.result()}
    facts = machine.result().model_copy(update=found)
    return Outcome(
        step="facts",
        node=node.name,
        status="unchanged",
        detail=summary(node, facts),
        data=facts,
    )


# Logging in has its own attempts; a node that stays silent is told soon, not tried for long.
gather_facts = gather_facts.with_options(retries=0)
