"""The cluster spec: what the user wrote in `deployments/clusters/NAME.yaml`, checked as a whole."""

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}")
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
IMAGE = re.compile(
    r"[a-z0-9]+([._/:-]+[a-z0-9]+)*(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?"
)
SERVED_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,126}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# Ports that Ray takes by itself on every node (`ray start --help`, Ray 2.60).
RAY_OWN_PORTS = {8265: "Ray's dashboard", 10001: "Ray's client server", 52365: "Ray's agent"}
RAY_WORKER_PORTS = range(10002, 20000)

# One fabric address per node is the single source of these; a value from outside can only disagree.
DERIVED_VARIABLES = {
    "VLLM_HOST_IP": "it is the node's fabric_address",
    "RAY_ADDRESS": "it is the head's fabric_address and ray.port",
    "RAY_NODE_IP_ADDRESS": "it is the node's fabric_address",
    "VLLM_PORT": "set serve.port",
    "VLLM_API_KEY": "put it into the secrets block",
}
# Interface names differ per node, so that one value for all of them is always a mistake.
PER_NODE_VARIABLES = (
    "GLOO_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_HCA",
    "NCCL_IB_GID_INDEX",
    "UCX_NET_DEVICES",
)
DERIVED_ARGUMENTS = {
    "--model": "model.path",
    "--served-model-name": "model.name",
    "--host": "serve.host",
    "--port": "serve.port",
    "--tensor-parallel-size": "serve.tensor_parallel",
    "-tp": "serve.tensor_parallel",
    "--pipeline-parallel-size": "serve.pipeline_parallel",
    "-pp": "serve.pipeline_parallel",
    "--distributed-executor-backend": "nothing, it is always ray",
    "--trust-remote-code": "model.trust_remote_code",
    "--api-key": "api_key of the secrets block",
}


Location = tuple[str | int, ...]
Problem = tuple[Location, object, str]


def _matching(pattern: re.Pattern[str], allowed: str) -> AfterValidator:
    def check(value: str) -> str:
        if not pattern.fullmatch(value):
            raise ValueError(f"allowed: {allowed}")
        return value

    return AfterValidator(check)


def _ipv4(value: str) -> str:
    try:
        address = ipaddress.IPv4Address(value)
    except ValueError:
        raise ValueError("allowed: an IPv4 address such as 192.168.100.1") from None
    if address.is_loopback or address.is_unspecified or address.is_multicast:
        raise ValueError("allowed: an IPv4 address that other nodes can reach")
    return str(address)


def _absolute(value: str) -> str:
    path = PurePosixPath(value)
    if not path.is_absolute() or len(path.parts) < 2 or ".." in path.parts:
        raise ValueError("allowed: an absolute path below /, without '..'")
    if any(character in value for character in ":,\n\0"):
        raise ValueError("allowed: a path without ':', ',' and line breaks (docker mounts it)")
    return str(path)


def _text(value: str) -> str:
    if "\0" in value or "\n" in value:
        raise ValueError("allowed: text without line breaks and NUL")
    return value


def _variables(values: dict[str, str]) -> dict[str, str]:
    problems = []
    for name in values:
        if not VARIABLE.fullmatch(name):
            problems.append(f"{name!r} is not an environment name (letters, digits, _)")
        elif name in DERIVED_VARIABLES:
            problems.append(f"{name} is not yours to set: {DERIVED_VARIABLES[name]}")
    if problems:
        raise ValueError("; ".join(problems))
    return values


def _port(value: int) -> int:
    if value in RAY_OWN_PORTS:
        raise ValueError(f"reserved for {RAY_OWN_PORTS[value]}; allowed: another port")
    if value in RAY_WORKER_PORTS:
        raise ValueError("10002 to 19999 are reserved for Ray's workers; allowed: another port")
    return value


Name = Annotated[
    str, _matching(NAME, "lower-case letters, digits and inner dashes, at most 40 characters")
]
Fabric = Annotated[str, AfterValidator(_ipv4)]
Host = Annotated[str, _matching(HOST, "an IPv4 address or a host name")]
User = Annotated[str, _matching(USER, "a login name")]
Port = Annotated[int, Field(ge=1024, le=65535), AfterValidator(_port)]
Text = Annotated[str, AfterValidator(_text)]
Variables = Annotated[dict[str, Text], AfterValidator(_variables)]


class Spec(BaseModel):
    """Base of every part: frozen, and a key that we do not know is a mistake."""

    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=True)


class Ssh(Spec):
    """How the control machine logs in; addresses and users stand with each node."""

    known_hosts: str = "~/.ssh/known_hosts"
    key_file: str | None = None
    credentials: str | None = Field(None, description="Name of an ssh-credentials block.")
    connect_timeout: int = Field(8, ge=1, le=60, description="Seconds for one hop.")


class Node(Spec):
    """A machine with GPUs that we reach by SSH."""

    name: Name
    fabric_address: Fabric
    user: User = "root"
    port: int = Field(22, ge=1, le=65535)
    address: Host = ""
    proxy_command: Text | None = None
    gpus: int = Field(1, ge=1, le=64)
    environment: Variables = {}

    @model_validator(mode="after")
    def _reached_over_the_fabric(self) -> Self:
        if not self.address:
            object.__setattr__(self, "address", self.fabric_address)
        return self


class Worker(Node):
    """A node that only the head reaches; its `address` is the one the head dials."""

    proxy_command: None = None


class Head(Node):
    """The only node that the control machine reaches."""

    address: Host


class Image(Spec):
    """The engine image, with vLLM and Ray in it."""

    name: Annotated[
        str, _matching(IMAGE, "an image name such as vllm/vllm-openai:v0.11.0, lower case")
    ]
    source: Literal["head", "control"] = "head"
    gpu_access: Literal["nvidia", "none"] = "nvidia"
    shm_mib: int = Field(10240, ge=64)


class Model(Spec):
    """The weights, at the same path on every node and in the containers."""

    name: Annotated[str, _matching(SERVED_NAME, "letters, digits and . _ - / (the served name)")]
    path: Annotated[str, AfterValidator(_absolute)]
    trust_remote_code: bool = False


class Serve(Spec):
    """The vLLM server on the head."""

    port: Port = 8000
    host: Fabric | Literal["0.0.0.0"] = "0.0.0.0"
    tensor_parallel: int = Field(ge=1)
    pipeline_parallel: int = Field(1, ge=1)
    arguments: tuple[Text, ...] = ()
    ready_minutes: float = Field(60, gt=0, description="The longest a start may take.")
    stall_minutes: float = Field(20, gt=0, description="The longest it may take without progress.")


class Ray(Spec):
    """The Ray cluster that the tensor-parallel ranks run on."""

    port: Port = 6379
    object_store_mib: int | None = Field(None, ge=80)
    join_seconds: int = Field(90, ge=5)


class Cluster(Spec):
    """The whole spec of one model on its nodes."""

    name: Name
    ssh: Ssh = Ssh()
    head: Head
    workers: tuple[Worker, ...] = ()
    image: Image
    model: Model
    serve: Serve
    ray: Ray = Ray()
    environment: Variables = {}
    secrets: str | None = Field(None, description="Name of an engine-secrets block.")

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.head, *self.workers)

    @property
    def gpus(self) -> int:
        return sum(node.gpus for node in self.nodes)

    @model_validator(mode="wrap")
    @classmethod
    def _all_problems_at_once(cls, data: Any, handler: Callable[[Any], Self]) -> Self:
        """Rules between fields are checked even where single fields are wrong."""
        errors: list[Any] = []
        cluster = None
        try:
            cluster = handler(data)
        except ValidationError as error:
            errors = error.errors(include_url=False, include_context=False)
        if isinstance(data, Mapping):
            errors += cross_field_problems(data)
        if cluster is None or errors:
            raise ValidationError.from_exception_data(
                cls.__name__, [_line_error(problem) for problem in errors]
            )
        return cluster


def _line_error(problem: Any) -> Any:
    # A message is a template in pydantic: braces of a user's value must not be read as fields.
    message = problem["msg"].replace("{", "{{").replace("}", "}}")
    kind = PydanticCustomError("spec", message)
    return {"type": kind, "loc": problem["loc"], "input": problem.get("input")}


def cross_field_problems(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rules between fields, on the raw document: absent or malformed parts are passed over."""
    return [
        {"loc": location, "msg": message, "input": value}
        for rule in (_duplicates, _parallelism, _ports, _interface_names, _arguments, _image_source)
        for location, value, message in rule(data)
    ]


def _part(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = data.get(key)
    return part if isinstance(part, Mapping) else {}


def _raw_nodes(data: Mapping[str, Any]) -> Iterator[tuple[Location, Mapping[str, Any]]]:
    yield ("head",), _part(data, "head")
    workers = data.get("workers")
    for index, worker in enumerate(workers if isinstance(workers, list | tuple) else ()):
        if isinstance(worker, Mapping):
            yield ("workers", index), worker


def _duplicates(data: Mapping[str, Any]) -> Iterator[Problem]:
    seen: dict[tuple[str, object], str] = {}
    for location, node in _raw_nodes(data):
        where = ".".join(map(str, location))
        for field in ("name", "fabric_address", "address"):
            value = node.get(field)
            if not isinstance(value, str):
                continue
            first = seen.setdefault((field, value), where)
            if first != where:
                yield (*location, field), value, f"also used by {first}; allowed: one per node"


def _parallelism(data: Mapping[str, Any]) -> Iterator[Problem]:
    serve = _part(data, "serve")
    tensor, pipeline = serve.get("tensor_parallel"), serve.get("pipeline_parallel", 1)
    counts = [node.get("gpus", 1) for _, node in _raw_nodes(data)]
    if not all(isinstance(number, int) for number in (tensor, pipeline, *counts)):
        return
    if tensor * pipeline != sum(counts):
        yield (
            ("serve", "tensor_parallel"),
            tensor,
            f"tensor_parallel {tensor} x pipeline_parallel {pipeline} = {tensor * pipeline} ranks, "
            f"but the nodes have {sum(counts)} GPUs; allowed: a product of {sum(counts)}",
        )


def _ports(data: Mapping[str, Any]) -> Iterator[Problem]:
    serve, ray = _part(data, "serve").get("port", 8000), _part(data, "ray").get("port", 6379)
    if serve == ray:
        yield ("serve", "port"), serve, "equals ray.port; allowed: a port of its own"


def _interface_names(data: Mapping[str, Any]) -> Iterator[Problem]:
    for name in _part(data, "environment"):
        if name in PER_NODE_VARIABLES:
            yield (
                ("environment", name),
                data["environment"][name],
                "names differ per node; leave it out (it follows from fabric_address) or set it "
                "in the environment of each node",
            )


def _arguments(data: Mapping[str, Any]) -> Iterator[Problem]:
    arguments = _part(data, "serve").get("arguments")
    for index, argument in enumerate(arguments if isinstance(arguments, list | tuple) else ()):
        flag = str(argument).partition("=")[0].replace("_", "-")
        if flag in DERIVED_ARGUMENTS:
            yield (
                ("serve", "arguments", index),
                argument,
                f"{flag} is not yours to set; use {DERIVED_ARGUMENTS[flag]}",
            )


def _image_source(data: Mapping[str, Any]) -> Iterator[Problem]:
    name = _part(data, "image").get("name")
    if isinstance(name, str) and "@sha256:" in name:
        # docker save and load lose a registry's digest, so that a worker could never be equal.
        yield ("image", "name"), name, "allowed: a name with a tag, not with a digest"
