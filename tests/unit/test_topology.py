"""What each node gets, and that a digest changes exactly when something that matters does."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from blocks import Cluster, Node
from tasks.topology import (
    STAY,
    ContainerSpec,
    Fabric,
    Files,
    Secrets,
    arguments,
    containers,
    digest_of,
    environment,
    files,
    ray_container,
    serve_container,
    staying,
)
from tests.unit.specs import merged, spec

HEAD_PORT = Fabric(interface="enp1s0f1np1", rdma=("rocep1s0f1:1",))
WORKER_PORT = Fabric(interface="enP2p1s0f0np0", rdma=("roceP2p1s0f0:1", "mlx5_1:1"))
PLAIN = Fabric(interface="eth1")
STAY_TEXT = json.dumps(STAY)
ALWAYS = {
    "SPARKRAIL_HEAD": "10.77.0.1",
    "SPARKRAIL_RAY_PORT": "6379",
    "SPARKRAIL_GPUS": "1",
    "SPARKRAIL_STAY": STAY_TEXT,
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
WORKER = {"name": "worker1", "fabric_address": "10.77.0.2"}


def without_shown(values: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in values.items() if name != "SPARKRAIL_SHOWN"}


# --- environment --------------------------------------------------------------------------------


def test_the_head_names_its_own_interface_and_rdma_port() -> None:
    cluster = spec()
    assert without_shown(environment(cluster, cluster.head, HEAD_PORT)) == ALWAYS | {
        "VLLM_HOST_IP": "10.77.0.1",
        "GLOO_SOCKET_IFNAME": "enp1s0f1np1",
        "TP_SOCKET_IFNAME": "enp1s0f1np1",
        "NCCL_SOCKET_IFNAME": "=enp1s0f1np1",
        "NCCL_IB_HCA": "=rocep1s0f1:1",
        "UCX_NET_DEVICES": "rocep1s0f1:1",
    }


def test_a_worker_names_its_own_and_not_the_head_s() -> None:
    cluster = spec()
    assert without_shown(environment(cluster, cluster.workers[0], WORKER_PORT)) == ALWAYS | {
        "VLLM_HOST_IP": "10.77.0.2",
        "GLOO_SOCKET_IFNAME": "enP2p1s0f0np0",
        "TP_SOCKET_IFNAME": "enP2p1s0f0np0",
        "NCCL_SOCKET_IFNAME": "=enP2p1s0f0np0",
        "NCCL_IB_HCA": "=roceP2p1s0f0:1,mlx5_1:1",
        "UCX_NET_DEVICES": "roceP2p1s0f0:1,mlx5_1:1",
    }


def test_without_rdma_there_is_no_hca_at_all() -> None:
    cluster = spec()
    values = environment(cluster, cluster.head, PLAIN)
    assert "NCCL_IB_HCA" not in values
    assert values["UCX_NET_DEVICES"] == "eth1"


@pytest.mark.parametrize(
    ("changes", "name", "head", "worker"),
    [
        pytest.param({}, "SPARKRAIL_OBJECT_STORE", None, None, id="no size of the object store"),
        pytest.param(
            {"ray": {"object_store_mib": 200}},
            "SPARKRAIL_OBJECT_STORE",
            "209715200",
            "209715200",
            id="a size of the object store, in bytes",
        ),
        pytest.param(
            {"environment": {"NCCL_DEBUG": "INFO"}}, "NCCL_DEBUG", "INFO", "INFO", id="for all"
        ),
        pytest.param(
            {"head": {"environment": {"GLOO_SOCKET_IFNAME": "bond0"}}},
            "GLOO_SOCKET_IFNAME",
            "bond0",
            "eth1",
            id="one node's own interface",
        ),
        pytest.param(
            {"head": {"environment": {"GLOO_SOCKET_IFNAME": ""}}},
            "GLOO_SOCKET_IFNAME",
            "eth1",
            "eth1",
            id="an interface that is left empty",
        ),
        pytest.param(
            {
                "environment": {"NCCL_DEBUG": "INFO"},
                "workers": [WORKER | {"environment": {"NCCL_DEBUG": "WARN"}}],
            },
            "NCCL_DEBUG",
            "INFO",
            "WARN",
            id="a node's value above that for all",
        ),
        pytest.param(
            {"environment": {"HF_HUB_OFFLINE": ""}},
            "HF_HUB_OFFLINE",
            None,
            None,
            id="an empty value takes ours away",
        ),
        pytest.param(
            {"ray": {"port": 6400}}, "SPARKRAIL_RAY_PORT", "6400", "6400", id="another Ray port"
        ),
    ],
)
def test_values_of_the_spec(
    changes: dict[str, Any], name: str, head: str | None, worker: str | None
) -> None:
    cluster = spec(**changes)
    found = [environment(cluster, node, PLAIN).get(name) for node in cluster.nodes]
    assert found == [head, worker]


def test_no_variable_is_ever_empty() -> None:
    cluster = spec(environment={"A": "", "B": "b"})
    values = environment(cluster, cluster.head, PLAIN, Secrets(environment={"C": ""}))
    assert [name for name, value in values.items() if not value] == []


SECRETS = Secrets(api_key="sk-key", environment={"HF_TOKEN": "hf-token", "NCCL_DEBUG": "hidden"})


def test_the_api_key_is_for_the_head_only_and_other_secrets_for_every_node() -> None:
    cluster = spec()
    head, worker = (environment(cluster, node, PLAIN, SECRETS) for node in cluster.nodes)
    assert head["VLLM_API_KEY"] == "sk-key"
    assert "sk-key" not in str(worker)
    assert (head["HF_TOKEN"], worker["HF_TOKEN"]) == ("hf-token", "hf-token")


def test_what_may_be_shown_never_names_a_secret() -> None:
    """Not even where the spec has a plain value of the same name."""
    cluster = spec(environment={"NCCL_DEBUG": "INFO", "PLAIN": "1", "EMPTY": ""})
    values = environment(cluster, cluster.head, PLAIN, SECRETS)
    assert values["NCCL_DEBUG"] == "hidden"
    assert values["SPARKRAIL_SHOWN"] == (
        "SPARKRAIL_HEAD SPARKRAIL_RAY_PORT SPARKRAIL_GPUS SPARKRAIL_STAY VLLM_HOST_IP "
        "GLOO_SOCKET_IFNAME TP_SOCKET_IFNAME NCCL_SOCKET_IFNAME UCX_NET_DEVICES "
        "RAY_USAGE_STATS_ENABLED VLLM_DO_NOT_TRACK HF_HUB_OFFLINE PLAIN"
    )


def test_secrets_show_in_no_repr() -> None:
    cluster = spec()
    relayed = files(cluster, cluster.head, PLAIN, SECRETS)
    assert repr(SECRETS) == "Secrets()"
    assert (repr(relayed), str(relayed)) == ("Files()", "")


def test_what_stays_on_a_node_is_all_that_names_its_interfaces_and_address() -> None:
    derived = set(environment(spec(), spec().head, HEAD_PORT))
    named = {name for name in derived if "IFNAME" in name or "IB_" in name or "DEVICES" in name}
    assert set(STAY) == named | {"NCCL_IB_GID_INDEX", "VLLM_HOST_IP", "VLLM_API_KEY"}


def test_what_the_spec_sets_for_one_node_stays_on_every_node() -> None:
    """vLLM would carry the head's NCCL_ variables over, above the workers' own."""
    cluster = spec(
        head={"environment": {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "bond0"}},
        workers=[WORKER | {"environment": {"NCCL_ALGO": "Ring"}}],
    )
    assert staying(cluster) == [*STAY, "NCCL_ALGO", "NCCL_DEBUG"]
    values = environment(cluster, cluster.workers[0], PLAIN)
    assert json.loads(values["SPARKRAIL_STAY"]) == staying(cluster)


# --- vLLM's arguments and the files -------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param(
            {},
            [
                "serve",
                "/models/tiny",
                "--served-model-name=tiny",
                "--host=0.0.0.0",
                "--port=8000",
                "--tensor-parallel-size=2",
                "--pipeline-parallel-size=1",
                "--distributed-executor-backend=ray",
            ],
            id="two nodes",
        ),
        pytest.param(
            {
                "model": {"name": "org/Tiny-1.0", "path": "/models/a b", "trust_remote_code": True},
                "serve": {
                    "host": "10.77.0.1",
                    "port": 8123,
                    "tensor_parallel": 1,
                    "pipeline_parallel": 2,
                    "arguments": ["--max-model-len=256", "--override={\"a\": 'b'}"],
                },
            },
            [
                "serve",
                "/models/a b",
                "--served-model-name=org/Tiny-1.0",
                "--host=10.77.0.1",
                "--port=8123",
                "--tensor-parallel-size=1",
                "--pipeline-parallel-size=2",
                "--distributed-executor-backend=ray",
                "--trust-remote-code",
                "--max-model-len=256",
                "--override={\"a\": 'b'}",
            ],
            id="all that the spec can say",
        ),
    ],
)
def test_arguments(changes: dict[str, Any], words: list[str]) -> None:
    assert list(arguments(spec(**changes))) == words


def test_the_files_of_the_head_and_of_a_worker() -> None:
    cluster = spec()
    head, worker = (files(cluster, node, PLAIN) for node in cluster.nodes)
    assert [(name, mode) for name, _, mode in head.items()] == [
        ("launch", 0o755),
        ("node.env", 0o600),
        ("serve.args", 0o644),
    ]
    assert [(name, mode) for name, _, mode in worker.items()] == [
        ("launch", 0o755),
        ("node.env", 0o600),
    ]
    assert head.launch == worker.launch
    assert head.arguments == (
        b"set -- serve /models/tiny --served-model-name=tiny --host=0.0.0.0 --port=8000 "
        b"--tensor-parallel-size=2 --pipeline-parallel-size=1 "
        b"--distributed-executor-backend=ray\n"
    )
    assert (
        worker.environment
        == (
            "export SPARKRAIL_HEAD=10.77.0.1\n"
            "export SPARKRAIL_RAY_PORT=6379\n"
            "export SPARKRAIL_GPUS=1\n"
            f"export SPARKRAIL_STAY='{STAY_TEXT}'\n"
            "export VLLM_HOST_IP=10.77.0.2\n"
            "export GLOO_SOCKET_IFNAME=eth1\n"
            "export TP_SOCKET_IFNAME=eth1\n"
            "export NCCL_SOCKET_IFNAME==eth1\n"
            "export UCX_NET_DEVICES=eth1\n"
            "export RAY_USAGE_STATS_ENABLED=0\n"
            "export VLLM_DO_NOT_TRACK=1\n"
            "export HF_HUB_OFFLINE=1\n"
            "export SPARKRAIL_SHOWN='"
            "SPARKRAIL_HEAD SPARKRAIL_RAY_PORT SPARKRAIL_GPUS SPARKRAIL_STAY VLLM_HOST_IP "
            "GLOO_SOCKET_IFNAME TP_SOCKET_IFNAME NCCL_SOCKET_IFNAME UCX_NET_DEVICES "
            "RAY_USAGE_STATS_ENABLED VLLM_DO_NOT_TRACK HF_HUB_OFFLINE'\n"
        ).encode()
    )


# --- containers and digests ---------------------------------------------------------------------

Change = Callable[[dict[str, Any]], Any]


def containers_of(
    cluster: Cluster,
    *,
    fabric: Fabric = PLAIN,
    secrets: Secrets | None = None,
    content: str = "sha256:1",
    weights: str = "w1",
    launch: bytes | None = None,
) -> dict[str, ContainerSpec]:
    """By role and node, such as "serve on head"."""

    def of(node: Node) -> tuple[ContainerSpec, ...]:
        found = files(cluster, node, fabric, secrets)
        if launch is not None:
            found = found.model_copy(update={"launch": launch})
        return containers(cluster, node, "/root", fabric, found, content, weights)

    return {f"{each.role} on {node.name}": each for node in cluster.nodes for each in of(node)}


def test_the_containers_of_a_cluster() -> None:
    found = containers_of(spec())
    assert list(found) == ["head on head", "serve on head", "worker on worker1"]
    head, serve, worker = found.values()
    assert (head.name, worker.name, serve.name) == (
        "sparkrail-sparks-ray",
        "sparkrail-sparks-ray",
        "sparkrail-sparks-serve",
    )
    assert [each.command for each in (head, serve, worker)] == [
        ("/bin/sh", "/sparkrail/launch", "head"),
        ("/bin/sh", "/sparkrail/launch", "serve"),
        ("/bin/sh", "/sparkrail/launch", "worker"),
    ]
    assert (head.shares, serve.shares) == ("", "sparkrail-sparks-ray")
    assert {each.folder for each in found.values()} == {"/root/.sparkrail/sparks/run"}
    assert (ray_container(spec()), serve_container(spec())) == (head.name, serve.name)


ALL = ["head on head", "serve on head", "worker on worker1"]


@pytest.mark.parametrize(
    ("changes", "more", "changed"),
    [
        pytest.param({}, {}, [], id="nothing"),
        pytest.param(
            {"serve": {"arguments": ["--max-model-len=256"]}},
            {},
            ["serve on head"],
            id="an argument of vLLM",
        ),
        pytest.param({"serve": {"port": 8001}}, {}, ["serve on head"], id="the port"),
        pytest.param({"model": {"name": "other"}}, {}, ["serve on head"], id="the served name"),
        pytest.param({}, {"weights": "w2"}, ["serve on head"], id="other weights"),
        pytest.param({}, {"secrets": Secrets(api_key="k")}, ALL[:2], id="the API key"),
        pytest.param({}, {"secrets": Secrets(environment={"A": "b"})}, ALL, id="another secret"),
        pytest.param({}, {"content": "sha256:2"}, ALL, id="another image under the same name"),
        pytest.param({}, {"launch": b"#!/bin/sh\n"}, ALL, id="another launch script"),
        pytest.param({}, {"fabric": HEAD_PORT}, ALL, id="another interface"),
        pytest.param({"image": {"name": "engine:2"}}, {}, ALL, id="the image's name"),
        pytest.param({"image": {"shm_mib": 64}}, {}, ALL, id="shared memory"),
        pytest.param({"image": {"gpu_access": "none"}}, {}, ALL, id="access to the GPU"),
        pytest.param({"model": {"path": "/models/b"}}, {}, ALL, id="the path of the weights"),
        pytest.param({"environment": {"NCCL_DEBUG": "INFO"}}, {}, ALL, id="a variable for all"),
        pytest.param(
            {"workers": [WORKER | {"environment": {"NCCL_DEBUG": "INFO"}}]},
            {},
            ALL,
            id="a variable of the worker, which the head must not carry over",
        ),
        pytest.param({"ray": {"port": 6400}}, {}, ALL, id="Ray's port"),
        pytest.param({"ray": {"join_seconds": 30}}, {}, [], id="how long we wait for Ray"),
        pytest.param({"serve": {"ready_minutes": 5}}, {}, [], id="how long we wait for vLLM"),
        pytest.param({"ssh": {"connect_timeout": 3}}, {}, [], id="how we log in"),
        pytest.param({"head": {"address": "10.88.0.9"}}, {}, [], id="where we reach the head"),
        pytest.param({"image": {"source": "control"}}, {}, [], id="where the image comes from"),
    ],
)
def test_a_digest_changes_when_something_that_matters_does(
    changes: dict[str, Any], more: dict[str, Any], changed: list[str]
) -> None:
    before, after = containers_of(spec()), containers_of(spec(**changes), **more)
    assert [role for role in before if before[role].digest != after[role].digest] == changed
    whole = [digest_of(list(found.values())) for found in (before, after)]
    assert (whole[0] != whole[1]) == bool(changed)


def test_merged_documents_do_not_change_their_base() -> None:
    base = {"a": {"b": 1}}
    assert merged(base, {"a": {"c": 2}}) == {"a": {"b": 1, "c": 2}}
    assert base == {"a": {"b": 1}}


def test_files_are_compared_by_content() -> None:
    assert Files(launch=b"a", environment=b"b") == Files(launch=b"a", environment=b"b")
