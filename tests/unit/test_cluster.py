"""The spec: every mistake is named with its field, its value and what is allowed, all at once."""

from typing import Any

import pytest
from pydantic import ValidationError

from blocks import Cluster
from blocks.mistakes import field_path, shown
from tests.unit.specs import DOCUMENT, merged

HEAD = DOCUMENT["head"]
WORKER = DOCUMENT["workers"][0]


def mistakes(document: Any) -> list[str]:
    try:
        Cluster.model_validate(document)
    except ValidationError as error:
        return [f"{field_path(each['loc'])}: {each['msg']}" for each in error.errors()]
    return []


def worker(**changes: Any) -> dict[str, Any]:
    return {"workers": [{**WORKER, **changes}]}


NAME = "allowed: lower-case letters, digits and inner dashes, at most 40 characters"
HOST = "allowed: an IPv4 address or a host name, without user and port"
IPV4 = "allowed: an IPv4 address such as 192.168.100.1, without a prefix length"
REACHABLE = "allowed: an IPv4 address that other nodes can reach"
NOT_A_NODE = "that is a network's or a broadcast address; allowed: a node's own"
IMAGE = "allowed: an image name such as vllm/vllm-openai:v0.11.0, lower case"
FOLDER = "allowed: a folder of its own, such as /models/NAME"
MOUNTED = "allowed: a path without ':', ',' and line breaks (docker mounts it)"
ABSOLUTE = "allowed: an absolute path without '..'"
NODE_KEYS = "name, fabric_address, user, port, address, proxy_command, gpus, environment"
PER_NODE = (
    "differs per node; leave it out (it follows from fabric_address), or set it in the environment "
    "of each node"
)
TEXT = "allowed: text; quote it, so that it arrives as you wrote it"
ZONES = "allowed: such as Europe/Berlin, America/New_York or Etc/UTC"
FIVE_FIELDS = (
    "allowed: the five fields minute, hour, day of month, month, day of week, such as 0 4 * * *"
)
TWO_WORDS = "two words in one; allowed: one per item, or --name=value"

# What is changed in a good spec -> the one mistake of it.
TABLE: dict[str, tuple[dict[str, Any], str]] = {
    "name with capitals": ({"name": "Sparks"}, f"name: {NAME}"),
    "name with a blank": ({"name": "my sparks"}, f"name: {NAME}"),
    "name with shell characters": ({"name": "a;b"}, f"name: {NAME}"),
    "name too long": ({"name": "a" * 41}, f"name: {NAME}"),
    "name empty": ({"name": ""}, f"name: {NAME}"),
    "name with an outer dash": ({"name": "-a"}, f"name: {NAME}"),
    "name is a number": ({"name": 7}, "name: allowed: text"),
    "node name with a dot": ({"head": {"name": "head.local"}}, f"head.name: {NAME}"),
    "unknown key, near one": (
        {"head": {"adress": "x"}},
        f"head.adress: unknown key (did you mean address?); allowed: {NODE_KEYS}, transport",
    ),
    "unknown key, far from all": (
        {"model": {"zzz": 1}},
        "model.zzz: unknown key; allowed: name, path, trust_remote_code",
    ),
    "unknown key of a worker": (
        worker(gpu=1),
        f"workers[0].gpu: unknown key (did you mean gpus?); allowed: {NODE_KEYS}",
    ),
    "head address with a port": ({"head": {"address": "spark1:22"}}, f"head.address: {HOST}"),
    "head address with a user": ({"head": {"address": "me@spark1"}}, f"head.address: {HOST}"),
    "head address out of range": ({"head": {"address": "10.0.0.256"}}, f"head.address: {HOST}"),
    "head address too short": ({"head": {"address": "10.0.1"}}, f"head.address: {HOST}"),
    "head address with empty labels": ({"head": {"address": "a..b"}}, f"head.address: {HOST}"),
    "head address by IPv6": ({"head": {"address": "fe80::1"}}, f"head.address: {HOST}"),
    "head address empty": ({"head": {"address": ""}}, f"head.address: {HOST}"),
    "fabric address by name": (
        worker(fabric_address="spark2"),
        f"workers[0].fabric_address: {IPV4}",
    ),
    "fabric address with a prefix": (
        worker(fabric_address="10.77.0.2/24"),
        f"workers[0].fabric_address: {IPV4}",
    ),
    "fabric address by IPv6": (worker(fabric_address="::1"), f"workers[0].fabric_address: {IPV4}"),
    "fabric address on loopback": (
        worker(fabric_address="127.0.0.1"),
        f"workers[0].fabric_address: {REACHABLE}",
    ),
    "fabric address unspecified": (
        worker(fabric_address="0.0.0.0"),
        f"workers[0].fabric_address: {REACHABLE}",
    ),
    "fabric address of a group": (
        worker(fabric_address="224.0.0.5"),
        f"workers[0].fabric_address: {REACHABLE}",
    ),
    "fabric address of a network": (
        worker(fabric_address="10.77.0.0"),
        f"workers[0].fabric_address: {NOT_A_NODE}",
    ),
    "fabric address of a broadcast": (
        worker(fabric_address="10.77.0.255"),
        f"workers[0].fabric_address: {NOT_A_NODE}",
    ),
    "fabric address taken": (
        worker(fabric_address="10.77.0.1"),
        "workers[0].fabric_address: also used by head; allowed: one per node",
    ),
    "fabric address is the head's other one": (
        worker(fabric_address="10.88.0.1"),
        "workers[0].fabric_address: also used by head; allowed: one per node",
    ),
    "address is the head's": (
        worker(address="10.88.0.1"),
        "workers[0].address: also used by head; allowed: one per node",
    ),
    "node name taken": (
        worker(name="head"),
        "workers[0].name: also used by head; allowed: one per node",
    ),
    "two workers alike": (
        {
            "workers": [WORKER, {**WORKER, "fabric_address": "10.77.0.3"}],
            "serve": {"tensor_parallel": 3},
        },
        "workers[1].name: also used by workers[0]; allowed: one per node",
    ),
    "worker with a proxy command": (
        worker(proxy_command="nc %h %p"),
        "workers[0].proxy_command: only the head has one: workers are reached through the head",
    ),
    "proxy command empty": (
        {"head": {"proxy_command": ""}},
        "head.proxy_command: empty; leave the key out, or give a value",
    ),
    "user with a blank": ({"head": {"user": "a b"}}, "head.user: allowed: a login name"),
    "user is an option": ({"head": {"user": "-oX"}}, "head.user: allowed: a login name"),
    "ssh port zero": ({"head": {"port": 0}}, "head.port: allowed: 1 or more"),
    "ssh port huge": ({"head": {"port": 10**30}}, "head.port: allowed: 65535 or less"),
    "ssh port by name": ({"head": {"port": "ssh"}}, "head.port: allowed: a whole number"),
    "ssh port is true": ({"head": {"port": True}}, "head.port: allowed: a number"),
    "no GPUs": (
        {"head": {"gpus": 0}, "serve": {"tensor_parallel": 1}},
        "head.gpus: allowed: 1 or more",
    ),
    "GPUs are true": ({"head": {"gpus": True}}, "head.gpus: allowed: a number"),
    "workers are no list": (
        {"workers": "w1", "serve": {"tensor_parallel": 1}},
        "workers: allowed: a list, such as [first, second]",
    ),
    "workers are nothing": (
        {"workers": None, "serve": {"tensor_parallel": 1}},
        "workers: allowed: a list, such as [first, second]",
    ),
    "a worker is no mapping": (
        {"workers": ["w1"], "serve": {"tensor_parallel": 1}},
        "workers[0]: allowed: keys with values",
    ),
    "image with capitals": ({"image": {"name": "Foo/bar:1"}}, f"image.name: {IMAGE}"),
    "image with two tags": ({"image": {"name": "foo:1:2"}}, f"image.name: {IMAGE}"),
    "image that is an option": ({"image": {"name": "--rm"}}, f"image.name: {IMAGE}"),
    "image with a blank": ({"image": {"name": "a b"}}, f"image.name: {IMAGE}"),
    "image by digest": (
        {"image": {"name": "foo@sha256:" + "a" * 64}},
        "image.name: allowed: a name with a tag, not with a digest",
    ),
    "image from nowhere": (
        {"image": {"source": "hub"}},
        "image.source: allowed: 'head' or 'control'",
    ),
    "an archive, but the head's image": (
        {"image": {"archive": "/images/engine.tar"}},
        "image.archive: allowed with source: control only; it is a file on the control machine",
    ),
    "too little shared memory": ({"image": {"shm_mib": 1}}, "image.shm_mib: allowed: 64 or more"),
    "model path relative": ({"model": {"path": "models/x"}}, f"model.path: {ABSOLUTE}"),
    "model path in the home folder": ({"model": {"path": "~/x"}}, f"model.path: {ABSOLUTE}"),
    "model path upwards": ({"model": {"path": "/models/../x"}}, f"model.path: {ABSOLUTE}"),
    "model path is the root": ({"model": {"path": "/"}}, f"model.path: {FOLDER}"),
    "model path of the system": ({"model": {"path": "/usr/"}}, f"model.path: {FOLDER}"),
    "model path with a colon": ({"model": {"path": "/models/a:b"}}, f"model.path: {MOUNTED}"),
    "model path with a line break": ({"model": {"path": "/models/a\nb"}}, f"model.path: {MOUNTED}"),
    "served name with a blank": (
        {"model": {"name": "a b"}},
        "model.name: allowed: letters, digits and . _ - / (the served name)",
    ),
    "trust is a word": (
        {"model": {"trust_remote_code": "perhaps"}},
        "model.trust_remote_code: allowed: true or false",
    ),
    "ranks and GPUs differ": (
        {"serve": {"tensor_parallel": 2, "pipeline_parallel": 2}},
        "serve.tensor_parallel: tensor_parallel 2 x pipeline_parallel 2 = 4 ranks, but the nodes "
        "have 2 GPUs; allowed: a product of 2",
    ),
    "ranks and GPUs differ, as text": (
        {"serve": {"tensor_parallel": "4"}},
        "serve.tensor_parallel: tensor_parallel 4 x pipeline_parallel 1 = 4 ranks, but the nodes "
        "have 2 GPUs; allowed: a product of 2",
    ),
    "negative ranks": (
        {"serve": {"tensor_parallel": "-2"}},
        "serve.tensor_parallel: allowed: 1 or more",
    ),
    "port of Ray's dashboard": (
        {"serve": {"port": 8265}},
        "serve.port: reserved for Ray's dashboard; allowed: another port",
    ),
    "port of Ray's workers": (
        {"ray": {"port": 10002}},
        "ray.port: 10002 to 19999 are reserved for Ray's workers; allowed: another port",
    ),
    "port of root": ({"serve": {"port": 80}}, "serve.port: allowed: 1024 or more"),
    "ports clash": (
        {"serve": {"port": 7000}, "ray": {"port": "7000"}},
        "serve.port: equals ray.port; allowed: a port of its own",
    ),
    "port clashes with a default": (
        {"ray": {"port": 8000}},
        "serve.port: equals ray.port; allowed: a port of its own",
    ),
    "port of the head's sshd": (
        {"head": {"port": 2222}, "serve": {"port": 2222}},
        "serve.port: equals head.port, its sshd's; allowed: a port of its own",
    ),
    "arguments in one text": (
        {"serve": {"arguments": "--max-model-len 4096"}},
        "serve.arguments: allowed: a list, such as [first, second]",
    ),
    "two arguments in one": (
        {"serve": {"arguments": ["--max-model-len 4096"]}},
        f"serve.arguments[0]: {TWO_WORDS}",
    ),
    "argument that does not begin": (
        {"serve": {"arguments": ["serve"]}},
        "serve.arguments[0]: allowed first: an option of `vllm serve`, such as --max-model-len",
    ),
    "argument that we derive": (
        {"serve": {"arguments": ["--dtype=auto", "--tensor_parallel_size=2"]}},
        "serve.arguments[1]: --tensor-parallel-size is not yours to set; use serve.tensor_parallel",
    ),
    "argument that is a secret": (
        {"serve": {"arguments": ["--api-key", "x"]}},
        "serve.arguments[0]: --api-key is not yours to set; use api_key of the secrets block",
    ),
    "argument that is a fraction": (
        {"serve": {"arguments": ["--gpu-memory-utilization", 0.9]}},
        f"serve.arguments[1]: {TEXT}",
    ),
    "argument with a line break": (
        {"serve": {"arguments": ["--x", "a\nb"]}},
        "serve.arguments[1]: allowed: text without line breaks and NUL",
    ),
    "listening by name": ({"serve": {"host": "localhost"}}, f"serve.host: {IPV4}"),
    "no time": ({"serve": {"ready_minutes": 0}}, "serve.ready_minutes: allowed: more than 0"),
    "endless time": (
        {"serve": {"stall_minutes": float("inf")}},
        "serve.stall_minutes: allowed: a finite number",
    ),
    "object store too small": (
        {"ray": {"object_store_mib": 10}},
        "ray.object_store_mib: allowed: 80 or more",
    ),
    "variable that is no name": (
        {"environment": {"A B": "1"}},
        "environment.A B: no environment name; allowed: letters, digits and _",
    ),
    "variable that begins with a digit": (
        {"head": {"environment": {"1A": "1"}}},
        "head.environment.1A: no environment name; allowed: letters, digits and _",
    ),
    "variable that we derive": (
        worker(environment={"VLLM_HOST_IP": "10.0.0.1"}),
        "workers[0].environment.VLLM_HOST_IP: not yours to set: it is the node's fabric_address",
    ),
    "variable that differs per node": (
        {"environment": {"GLOO_SOCKET_IFNAME": "eth0"}},
        f"environment.GLOO_SOCKET_IFNAME: {PER_NODE}",
    ),
    "variable that is a secret": (
        {"environment": {"HF_TOKEN": "hf_x"}},
        "environment.HF_TOKEN: not yours to set: put it into hub_token of the secrets block",
    ),
    "variable that looks like a secret": (
        {"environment": {"MY_API_KEY": "x"}},
        "environment.MY_API_KEY: a secret by its name: put it into the secrets block",
    ),
    "variable that is true": ({"environment": {"A": True}}, f"environment.A: {TEXT}"),
    "variable that is a fraction": ({"environment": {"A": 1.10}}, f"environment.A: {TEXT}"),
    "variable that is nothing": ({"environment": {"A": None}}, "environment.A: allowed: text"),
    "variables are a list": ({"environment": ["A=1"]}, "environment: allowed: keys with values"),
    "known hosts empty": (
        {"ssh": {"known_hosts": ""}},
        "ssh.known_hosts: empty; leave the key out, or give a value",
    ),
    "two keys": (
        {"ssh": {"key_file": "x", "credentials": "y"}},
        "ssh.key_file: allowed: key_file or credentials, not both",
    ),
    "nightly without a time zone": (
        {"nightly": {"cron": "0 4 * * *"}},
        "nightly.timezone: missing; it has no default",
    ),
    "a time zone's city alone": (
        {"nightly": {"cron": "0 4 * * *", "timezone": "Berlin"}},
        f"nightly.timezone: no IANA time zone (did you mean Europe/Berlin?); {ZONES}",
    ),
    "a time zone's abbreviation": (
        {"nightly": {"cron": "0 4 * * *", "timezone": "CEST"}},
        f"nightly.timezone: no IANA time zone; {ZONES}",
    ),
    "nightly at an hour that no clock has": (
        {"nightly": {"cron": "0 25 * * *", "timezone": "Etc/UTC"}},
        f"nightly.cron: {FIVE_FIELDS}",
    ),
    "nightly with seconds": (
        {"nightly": {"cron": "0 0 4 * * *", "timezone": "Etc/UTC"}},
        f"nightly.cron: {FIVE_FIELDS}",
    ),
    "nightly by a nickname": (
        {"nightly": {"cron": "@daily", "timezone": "Etc/UTC"}},
        f"nightly.cron: {FIVE_FIELDS}",
    ),
    "secrets by value": (
        {"secrets": {"HF_TOKEN": "x"}},
        "secrets: allowed: text",
    ),
    "secrets by a name that no block has": (
        {"secrets": "My Block"},
        "secrets: allowed: the name of a block: lower-case letters, digits and dashes",
    ),
    "a part is no mapping": (
        {"ray": "yes"},
        "ray: allowed: keys with values",
    ),
}


@pytest.mark.parametrize(
    ("changes", "message"), [pytest.param(*row, id=state) for state, row in TABLE.items()]
)
def test_a_mistake_is_named(changes: dict[str, Any], message: str) -> None:
    assert mistakes(merged(DOCUMENT, changes)) == [message]


@pytest.mark.parametrize("part", ["name", "head", "image", "model", "serve"])
def test_a_part_without_default_is_asked_for(part: str) -> None:
    document = {key: value for key, value in DOCUMENT.items() if key != part}
    assert f"{part}: missing; it has no default" in mistakes(document)


def test_the_head_needs_an_address_and_a_worker_a_fabric_address() -> None:
    document = DOCUMENT | {
        "head": {"name": "head", "fabric_address": "10.77.0.1"},
        "workers": [{"name": "worker1"}],
    }
    assert mistakes(document) == [
        "head.address: missing; it has no default",
        "workers[0].fabric_address: missing; it has no default",
    ]


def test_all_mistakes_come_at_once_in_the_order_of_the_spec() -> None:
    """Rules between fields too, although single fields are wrong."""
    document = {
        "surprise": 1,
        "environment": {"A B": 1, "HF_TOKEN": "x"},
        "serve": {"tensor_parallel": 3, "port": "x", "arguments": ["--port=1"]},
        "model": {"name": "a b"},
        "workers": [{"name": "head", "fabric_address": "x"}],
        "head": {"name": "head", "port": "y"},
        "name": "NAME",
    }
    assert [line.split(": ")[0] for line in mistakes(document)] == [
        "name",
        "head.fabric_address",
        "head.port",
        "head.address",
        "workers[0].fabric_address",
        "workers[0].name",
        "image",
        "model.name",
        "model.path",
        "serve.port",
        "serve.tensor_parallel",
        "serve.arguments[0]",
        "environment.A B",
        "environment.HF_TOKEN",
        "surprise",
    ]


def test_a_secret_in_the_wrong_place_is_not_repeated() -> None:
    document = merged(DOCUMENT, {"environment": {"HF_TOKEN": "hf_secret"}})
    with pytest.raises(ValidationError) as caught:
        Cluster.model_validate(document)
    assert "hf_secret" not in str(caught.value)


def test_braces_in_a_value_stay_braces() -> None:
    assert mistakes(merged(DOCUMENT, {"environment": {"{a}": "1"}})) == [
        "environment.{a}: no environment name; allowed: letters, digits and _"
    ]


@pytest.mark.parametrize("document", [None, [], "text", 7])
def test_a_document_that_is_no_mapping(document: object) -> None:
    assert mistakes(document) == ["the document: allowed: keys with values"]


@pytest.mark.parametrize(
    "name",
    [
        "engine",
        "engine:1",
        "vllm/vllm-openai:v0.11.0",
        "nvcr.io/nvidia/vllm:25.09-py3",
        "localhost:5000/a/b_c__d-e:X_1.2",
    ],
)
def test_image_names_of_docker_are_allowed(name: str) -> None:
    assert mistakes(merged(DOCUMENT, {"image": {"name": name}})) == []


@pytest.mark.parametrize(
    "name", ["spark-1", "spark1.local", "10.0.0.1", "a", "xn--bcher-kva.example"]
)
def test_host_names_are_allowed(name: str) -> None:
    assert mistakes(merged(DOCUMENT, {"head": {"address": name}})) == []


def test_numbers_may_be_texts_and_texts_numbers() -> None:
    cluster = Cluster.model_validate(
        merged(
            DOCUMENT,
            {
                "serve": {"tensor_parallel": "2", "arguments": ["--max-model-len", 4096]},
                "environment": {"NCCL_DEBUG_LEVEL": 1, "EMPTY": ""},
                "model": {"path": "/models//tiny/"},
            },
        )
    )
    assert cluster.serve.tensor_parallel == 2
    assert cluster.serve.arguments == ("--max-model-len", "4096")
    assert cluster.environment == {"NCCL_DEBUG_LEVEL": "1", "EMPTY": ""}
    assert cluster.model.path == "/models/tiny"


def test_a_worker_is_reached_by_its_fabric_address_unless_it_has_another() -> None:
    assert Cluster.model_validate(DOCUMENT).workers[0].address == "10.77.0.2"
    other = merged(DOCUMENT, worker(address="worker1.lan"))
    assert Cluster.model_validate(other).workers[0].address == "worker1.lan"


def test_nodes_and_gpus_are_those_of_head_and_workers() -> None:
    changes = {"head": {"gpus": 4}, **worker(gpus=4), "serve": {"tensor_parallel": 8}}
    cluster = Cluster.model_validate(merged(DOCUMENT, changes))
    assert [node.name for node in cluster.nodes] == ["head", "worker1"]
    assert cluster.gpus == 8


def test_one_node_is_a_cluster_too() -> None:
    assert mistakes(merged(DOCUMENT, {"workers": [], "serve": {"tensor_parallel": 1}})) == []


def test_a_spec_survives_json() -> None:
    """Prefect hands specs on as JSON."""
    cluster = Cluster.model_validate(DOCUMENT)
    assert Cluster.model_validate_json(cluster.model_dump_json()) == cluster


def test_a_spec_is_frozen() -> None:
    with pytest.raises(ValidationError):
        setattr(Cluster.model_validate(DOCUMENT), "name", "other")  # noqa: B010 - mypy knows


@pytest.mark.parametrize(
    ("value", "text"),
    [
        pytest.param("a", '"a"', id="text"),
        pytest.param(None, "null", id="nothing"),
        pytest.param({"a": ["ü"]}, '{"a": ["ü"]}', id="mapping"),
        pytest.param("x" * 100, '"' + "x" * 78 + "…", id="long"),
    ],
)
def test_values_are_shown_in_one_short_line(value: object, text: str) -> None:
    assert shown(value) == text
