"""Two healthy nodes as preflight sees them, and what can be changed about them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from blocks import Cluster
from tasks.docker_facts import parse_docker
from tasks.engine_verdicts import Verdict
from tasks.errors import SparkrailError
from tasks.manifests import File, Manifest
from tasks.node_facts import (
    Address,
    Interface,
    Memory,
    ModelFacts,
    NodeFacts,
    Process,
    parse_facts,
)
from tasks.peers import Login, Peer
from tasks.preflight import Problem, problems

DATA = Path(__file__).parent / "data"
GIB = 2**30
OURS = "b9b5e01d4f6d897faa6ca0f11b0edfd26b15f1f0867bd5c4a429dd637f4130ca"
FOREIGN = "aeab91d42265a999222fec651791ded3038d744a0c0ba659b401ac51c5e2ac0b"

WEIGHTS = Manifest(
    files={
        "config.json": File(size=GIB, sha256="c"),
        "model.safetensors": File(size=2 * GIB, sha256="m"),
        "tokenizer.json": File(size=GIB, sha256="t"),
    }
)
PEERS = {
    "head": Peer(
        node="worker1",
        address="10.77.0.2",
        port=52365,
        tcp="refused",
        packets={9000: "arrived"},
        login=Login(code=0),
    ),
    "worker1": Peer(
        node="head", address="10.77.0.1", port=6379, tcp="open", packets={9000: "arrived"}
    ),
}
ACCEPTED = Verdict(versions={"vllm": "0.32.0", "ray": "2.60.0"})

Change = Callable[[NodeFacts], NodeFacts]


def cluster(**changes: Any) -> Cluster:
    return Cluster.model_validate(
        {
            "name": "lab",
            "head": {"name": "head", "address": "10.88.0.1", "fabric_address": "10.77.0.1"},
            "workers": [{"name": "worker1", "fabric_address": "10.77.0.2"}],
            "image": {"name": "engine:1"},
            "model": {"name": "tiny", "path": "/models/tiny"},
            "serve": {"tensor_parallel": 2},
            **changes,
        }
    )


def healthy(hostname: str, address: str) -> NodeFacts:
    """A captured node, with what a real one has beside it."""
    facts = parse_facts((DATA / "facts/lab-head.json").read_text())
    docker = parse_docker(
        "1.41",
        {**json.loads((DATA / "docker/info-20.10.json").read_text()), "Runtimes": {"nvidia": {}}},
        json.loads((DATA / "docker/image-20.10.json").read_text()),
        [],
    )
    image = docker.image and docker.image.model_copy(update={"size": 10 * GIB})
    disks = tuple(disk.model_copy(update={"free": 100 * GIB}) for disk in facts.disks)
    return facts.model_copy(
        update={
            "hostname": hostname,
            "interfaces": (interface(address),),
            "memory": Memory(total=120 * GIB, available=115 * GIB, free=110 * GIB),
            "docker": docker.model_copy(update={"image": image}),
            "disks": disks,
            "model": ModelFacts(config={"num_attention_heads": 4}),
            "weights": WEIGHTS,
            "peers": (PEERS[hostname],),
        }
    )


def interface(address: str, **changes: Any) -> Interface:
    fields = {"name": "enp1s0f1np1", "state": "UP", "mtu": 9000, "speed": 200000}
    addresses = (Address(address=address, prefix=24),)
    return Interface.model_validate({**fields, "addresses": addresses} | changes)


def nodes(**changed: Change) -> dict[str, NodeFacts | SparkrailError]:
    facts = {"head": healthy("head", "10.77.0.1"), "worker1": healthy("worker1", "10.77.0.2")}
    return {name: changed.get(name, same)(found) for name, found in facts.items()}


def same(facts: NodeFacts) -> NodeFacts:
    return facts


def having(**changes: Any) -> Change:
    return lambda facts: facts.model_copy(update=changes)


def docker(**changes: Any) -> Change:
    def change(facts: NodeFacts) -> NodeFacts:
        assert facts.docker
        return facts.model_copy(update={"docker": facts.docker.model_copy(update=changes)})

    return change


def image(**changes: Any) -> Change:
    def change(facts: NodeFacts) -> NodeFacts:
        assert facts.docker
        assert facts.docker.image
        return docker(image=facts.docker.image.model_copy(update=changes))(facts)

    return change


def free(size: int, **changes: int) -> Change:
    def change(facts: NodeFacts) -> NodeFacts:
        disks = tuple(disk.model_copy(update={"free": size, **changes}) for disk in facts.disks)
        return facts.model_copy(update={"disks": disks})

    return change


def both(*changes: Change) -> Change:
    def change(facts: NodeFacts) -> NodeFacts:
        for each in changes:
            facts = each(facts)
        return facts

    return change


def process(pid: int = 42, **changes: Any) -> Process:
    fields = {"pid": pid, "pgid": pid, "user": "joe", "command": "python3 -m x", "started": 1.0}
    return Process.model_validate({**fields, **changes})


def container(id: str, name: str, label: str = "", state: str = "running") -> dict[str, Any]:
    labels = {"sparkrail.cluster": label} if label else {}
    made = parse_facts((DATA / "facts/lab-head.json").read_text()).time - 3 * 3600
    fields = {"Id": id, "Names": [f"/{name}"], "State": state, "Created": int(made)}
    return {**fields, "Labels": labels}


def containers(*rows: Mapping[str, Any]) -> Change:
    info = json.loads((DATA / "docker/info-20.10.json").read_text())
    return docker(containers=parse_docker("1.41", info, None, rows).containers)


def row(
    check: str,
    facts: Mapping[str, NodeFacts | SparkrailError],
    node: str = "head",
    spec: Cluster | None = None,
    engine: Verdict | None = None,
) -> Problem:
    found = problems(spec or cluster(), facts, engine)
    return next(row for row in found if (row.check, row.node) == (check, node))
