"""The cluster spec: what the user wrote in `deployments/clusters/NAME.yaml`, checked as a whole."""

import difflib
import ipaddress
import re
import zoneinfo
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from blocks.mistakes import Location, field_path, in_words
from blocks.residue import Residue
from blocks.values import Number, Spec, User, Words, matching, no_bool, one_line
from blocks.watching import Canary, Watch

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
# Prefect's rule for the names of blocks.
BLOCK_NAME = re.compile(r"[a-z0-9-]{1,100}")
LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
HOST = re.compile(rf"{LABEL}(\.{LABEL})*")
COMPONENT = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
IMAGE = re.compile(
    rf"(?:[a-z0-9]+(?:[.-][a-z0-9]+)*(?::[0-9]{{1,5}})?/)?{COMPONENT}(?:/{COMPONENT})*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
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
    "VLLM_API_KEY": "put it into api_key of the secrets block",
    "HF_TOKEN": "put it into hub_token of the secrets block",
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
    "--hf-token": "hub_token of the secrets block",
}


# Its contents are replaced by the weights.
SYSTEM_FOLDER = re.compile(
    r"/(bin|boot|dev|etc|home|lib|mnt|opt|proc|root|run|sbin|srv|sys|tmp|usr|var)"
)
SECRET_VARIABLE = re.compile(r".*(TOKEN|PASSWORD|SECRET|SECRET_KEY|API_KEY)")

Problem = tuple[Location, object, str]


def _host(value: str) -> str:
    # What looks like an IPv4 address must be one: 10.0.0.256 would be asked of a name server.
    numbers = re.fullmatch(r"[0-9.]+", value)
    if not HOST.fullmatch(value) or len(value) > 253 or (numbers and not _is_ipv4(value)):
        raise ValueError("allowed: an IPv4 address or a host name, without user and port")
    return value


def _is_ipv4(value: str) -> bool:
    try:
        ipaddress.IPv4Address(value)
    except ValueError:
        return False
    return True


def _fabric_address(value: str) -> str:
    if not _is_ipv4(value):
        raise ValueError("allowed: an IPv4 address such as 192.168.100.1, without a prefix length")
    address = ipaddress.IPv4Address(value)
    odd = address.is_loopback or address.is_multicast or address.is_reserved
    if odd or address in ipaddress.IPv4Network("0.0.0.0/8"):
        raise ValueError("allowed: an IPv4 address that other nodes can reach")
    if value.endswith((".0", ".255")):
        raise ValueError("that is a network's or a broadcast address; allowed: a node's own")
    return value


def _bind_address(value: str) -> str:
    return value if value == "0.0.0.0" else _fabric_address(value)


def _folder(value: str) -> str:
    path = PurePosixPath(value)
    if not path.is_absolute() or ".." in path.parts:
        raise ValueError("allowed: an absolute path without '..'")
    if len(path.parts) < 2 or SYSTEM_FOLDER.fullmatch(str(path)):
        raise ValueError("allowed: a folder of its own, such as /models/NAME")
    if any(character in value for character in ":,\n\0"):
        raise ValueError("allowed: a path without ':', ',' and line breaks (docker mounts it)")
    return str(path)


def _number_as_text(value: object) -> object:
    if isinstance(value, bool | float):
        raise ValueError("allowed: text; quote it, so that it arrives as you wrote it")
    return str(value) if isinstance(value, int) else value


def _cron(value: str) -> str:
    # Imported here: only a spec with a schedule waits for it.
    from prefect.client.schemas.schedules import CronSchedule

    # The scheduler would take a sixth field for seconds.
    if len(value.split()) == 5:
        try:
            CronSchedule(cron=value)
        except ValueError:
            pass
        else:
            return " ".join(value.split())
    raise ValueError(
        "allowed: the five fields minute, hour, day of month, month, day of week, such as 0 4 * * *"
    )


def _timezone(value: str) -> str:
    zones = zoneinfo.available_timezones()
    if value in zones:
        return value
    cities = {zone.rpartition("/")[2].lower(): zone for zone in sorted(zones) if "/" in zone}
    asked = value.rpartition("/")[2].lower().replace(" ", "_")
    near = difflib.get_close_matches(asked, cities, n=1, cutoff=0.8)
    hint = f" (did you mean {cities[near[0]]}?)" if near else ""
    raise ValueError(
        f"no IANA time zone{hint}; allowed: such as Europe/Berlin, America/New_York or Etc/UTC"
    )


def _none_on_workers(value: object) -> None:
    if value is not None:
        raise ValueError("only the head has one: workers are reached through the head")


def _port(value: int) -> int:
    if value in RAY_OWN_PORTS:
        raise ValueError(f"reserved for {RAY_OWN_PORTS[value]}; allowed: another port")
    if value in RAY_WORKER_PORTS:
        raise ValueError("10002 to 19999 are reserved for Ray's workers; allowed: another port")
    return value


Name = Annotated[
    str, matching(NAME, "lower-case letters, digits and inner dashes, at most 40 characters")
]
BlockName = Annotated[
    str, matching(BLOCK_NAME, "the name of a block: lower-case letters, digits and dashes")
]
Fabric = Annotated[str, AfterValidator(_fabric_address)]
Host = Annotated[str, AfterValidator(_host)]
SshPort = Annotated[Number, Field(ge=1, le=65535)]
Port = Annotated[Number, Field(ge=1024, le=65535), AfterValidator(_port)]
Mib = Annotated[Number, Field(le=1024 * 1024)]
Minutes = Annotated[float, Field(gt=0, le=1440, allow_inf_nan=False), BeforeValidator(no_bool)]
Text = Annotated[str, BeforeValidator(_number_as_text), AfterValidator(one_line)]
Variables = dict[str, Text]


class Ssh(Spec):
    """How the control machine logs in; addresses and users stand with each node."""

    known_hosts: Words = "~/.ssh/known_hosts"
    key_file: Words | None = None
    credentials: BlockName | None = Field(None, description="Name of an ssh-credentials block.")
    connect_timeout: Number = Field(8, ge=1, le=60, description="Seconds for one hop.")


class Node(Spec):
    """A machine with GPUs that we reach by SSH."""

    name: Name
    fabric_address: Fabric
    user: User = "root"
    port: SshPort = 22
    address: Host = ""
    proxy_command: Words | None = None
    gpus: Number = Field(1, ge=1, le=64)
    environment: Variables = Field({})

    @model_validator(mode="after")
    def _reached_over_the_fabric(self) -> Self:
        if not self.address:
            object.__setattr__(self, "address", self.fabric_address)
        return self


class Worker(Node):
    """A node that only the head reaches; its `address` is the one the head dials."""

    proxy_command: Annotated[None, BeforeValidator(_none_on_workers)] = None


class Head(Node):
    """The only node that the control machine reaches."""

    address: Host
    transport: Literal["ssh", "local"] = Field("ssh", description="local: this very machine.")


class Image(Spec):
    """The engine image, with vLLM and Ray in it."""

    name: Annotated[
        str, matching(IMAGE, "an image name such as vllm/vllm-openai:v0.11.0, lower case")
    ]
    source: Literal["head", "control"] = "head"
    archive: Words | None = Field(
        None, description="A file of docker save on the control machine, instead of its docker."
    )
    gpu_access: Literal["nvidia", "none"] = "nvidia"
    shm_mib: Mib = Field(10240, ge=64)


class Model(Spec):
    """The weights, at the same path on every node and in the containers."""

    name: Annotated[str, matching(SERVED_NAME, "letters, digits and . _ - / (the served name)")]
    path: Annotated[str, AfterValidator(_folder)]
    trust_remote_code: bool = False


class Weights(Spec):
    """How the model's files go from the head to the workers."""

    transport: Literal["streams", "rsync"] = "streams"
    connections: Number = Field(4, ge=1, le=16, description="Side by side, to each worker.")
    remove_extra: bool = Field(False, description="Whether files the head lacks are removed.")


class Serve(Spec):
    """The vLLM server on the head."""

    port: Port = 8000
    host: Annotated[str, AfterValidator(_bind_address)] = "0.0.0.0"
    tensor_parallel: Number = Field(ge=1, le=4096)
    pipeline_parallel: Number = Field(1, ge=1, le=4096)
    arguments: tuple[Text, ...] = ()
    ready_minutes: Minutes = Field(60, description="The longest a start may take.")
    stall_minutes: Minutes = Field(20, description="The longest it may take without progress.")


class Ray(Spec):
    """The Ray cluster that the tensor-parallel ranks run on."""

    port: Port = 6379
    object_store_mib: Mib | None = Field(None, ge=80)
    join_seconds: Number = Field(90, ge=5, le=3600)


class Proof(Spec):
    """The all-reduce over the fabric that must succeed before the old release is stopped."""

    enabled: bool = True
    slow_mib_s: Number = Field(300, ge=0, description="Below it, the fabric is reported as slow.")


class Nightly(Spec):
    """When `sparkrail register` has the cluster redeployed by itself."""

    cron: Annotated[str, AfterValidator(_cron)]
    timezone: Annotated[str, AfterValidator(_timezone)]
    restart: Literal["if-changed", "always"] = "if-changed"


class Cluster(Spec):
    """The whole spec of one model on its nodes."""

    name: Name
    ssh: Ssh = Ssh()
    head: Head
    workers: tuple[Worker, ...] = ()
    image: Image
    model: Model
    weights: Weights = Weights()
    serve: Serve
    ray: Ray = Ray()
    proof: Proof = Proof()
    residue: Residue = Residue()
    canary: Canary = Canary()
    environment: Variables = Field({})
    secrets: BlockName | None = Field(None, description="Name of an engine-secrets block.")
    nightly: Nightly | None = None
    watch: Watch = Watch()

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
            errors = [
                {**problem, "msg": in_words(cls, problem)}
                for problem in error.errors(include_url=False)
            ]
        if isinstance(data, Mapping):
            errors += cross_field_problems(data)
        if cluster is None or errors:
            raise ValidationError.from_exception_data(
                cls.__name__, [_line_error(problem) for problem in sorted(errors, key=_place)]
            )
        return cluster


def _place(problem: Mapping[str, Any]) -> int:
    parts = [*Cluster.model_fields]
    top = problem["loc"][0] if problem["loc"] else ""
    return parts.index(top) if top in parts else len(parts)


def _line_error(problem: Any) -> Any:
    kind = PydanticCustomError(
        "missing" if problem.get("type") == "missing" else "spec", problem["msg"]
    )
    return {"type": kind, "loc": problem["loc"], "input": problem.get("input")}


def cross_field_problems(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rules between fields, on the raw document: absent or malformed parts are passed over."""
    rules = (
        _duplicates,
        _parallelism,
        _ports,
        _variables,
        _arguments,
        _image_source,
        _one_key,
        _local_head,
    )
    return [
        {"loc": location, "msg": message, "input": value}
        for rule in rules
        for location, value, message in rule(data)
    ]


def _part(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = data.get(key)
    return part if isinstance(part, Mapping) else {}


def _int(value: object) -> int | None:
    """A number, also as the text that a file holds; None where it is neither."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value.strip()):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _raw_nodes(data: Mapping[str, Any]) -> Iterator[tuple[Location, Mapping[str, Any]]]:
    yield ("head",), _part(data, "head")
    workers = data.get("workers")
    for index, worker in enumerate(workers if isinstance(workers, list | tuple) else ()):
        if isinstance(worker, Mapping):
            yield ("workers", index), worker


def _duplicates(data: Mapping[str, Any]) -> Iterator[Problem]:
    names: dict[str, Location] = {}
    addresses: dict[str, Location] = {}
    fields = (("name", names), ("fabric_address", addresses), ("address", addresses))
    for location, node in _raw_nodes(data):
        for field, seen in fields:
            value = node.get(field)
            if isinstance(value, str) and value:
                first = seen.setdefault(value.strip(), location)
                if first != location:
                    also = field_path(first)
                    yield (*location, field), value, f"also used by {also}; allowed: one per node"


def _parallelism(data: Mapping[str, Any]) -> Iterator[Problem]:
    serve = _part(data, "serve")
    tensor, pipeline = _int(serve.get("tensor_parallel")), _int(serve.get("pipeline_parallel", 1))
    counts = [_int(node.get("gpus", 1)) for _, node in _raw_nodes(data)]
    known = [count for count in counts if count is not None]
    if tensor is None or pipeline is None or len(known) < len(counts):
        return
    ranks, gpus = tensor * pipeline, sum(known)
    if ranks != gpus:
        yield (
            ("serve", "tensor_parallel"),
            tensor,
            f"tensor_parallel {tensor} x pipeline_parallel {pipeline} = {ranks} ranks, "
            f"but the nodes have {gpus} GPUs; allowed: a product of {gpus}",
        )


def _ports(data: Mapping[str, Any]) -> Iterator[Problem]:
    taken = {_int(_part(data, "head").get("port", 22)): "head.port, its sshd's"}
    for part, default in (("ray", 6379), ("serve", 8000)):
        port = _int(_part(data, part).get("port", default))
        if port is not None and port in taken:
            yield (part, "port"), port, f"equals {taken[port]}; allowed: a port of its own"
        taken[port] = f"{part}.port"


def _variables(data: Mapping[str, Any]) -> Iterator[Problem]:
    for location, part in ((), data), *_raw_nodes(data):
        for name, value in _part(part, "environment").items():
            where = (*location, "environment", name)
            if not VARIABLE.fullmatch(str(name)):
                yield where, value, "no environment name; allowed: letters, digits and _"
            elif name in DERIVED_VARIABLES:
                yield where, "(not shown)", f"not yours to set: {DERIVED_VARIABLES[name]}"
            elif name.startswith("SPARKRAIL_"):
                yield where, "(not shown)", "not yours to set: the launch script's own"
            elif SECRET_VARIABLE.fullmatch(name):
                yield where, "(not shown)", "a secret by its name: put it into the secrets block"
            elif name in PER_NODE_VARIABLES and not location:
                yield (
                    where,
                    value,
                    "differs per node; leave it out (it follows from fabric_address), or set it "
                    "in the environment of each node",
                )


def _arguments(data: Mapping[str, Any]) -> Iterator[Problem]:
    arguments = _part(data, "serve").get("arguments")
    for index, argument in enumerate(arguments if isinstance(arguments, list | tuple) else ()):
        text = str(argument)
        flag = text.partition("=")[0].replace("_", "-")
        if flag in DERIVED_ARGUMENTS:
            message = f"{flag} is not yours to set; use {DERIVED_ARGUMENTS[flag]}"
        elif text.startswith("-") and " " in flag.strip():
            message = "two words in one; allowed: one per item, or --name=value"
        elif index == 0 and not text.startswith("-"):
            message = "allowed first: an option of `vllm serve`, such as --max-model-len"
        else:
            continue
        yield ("serve", "arguments", index), argument, message


def _image_source(data: Mapping[str, Any]) -> Iterator[Problem]:
    image = _part(data, "image")
    name = image.get("name")
    if image.get("archive") and image.get("source") != "control":
        message = "allowed with source: control only; it is a file on the control machine"
        yield ("image", "archive"), image["archive"], message
    if isinstance(name, str) and "@sha256:" in name:
        # docker save and load lose a registry's digest, so that a worker could never be equal.
        yield ("image", "name"), name, "allowed: a name with a tag, not with a digest"


def _one_key(data: Mapping[str, Any]) -> Iterator[Problem]:
    ssh = _part(data, "ssh")
    if ssh.get("key_file") and ssh.get("credentials"):
        yield ("ssh", "key_file"), ssh["key_file"], "allowed: key_file or credentials, not both"


def _local_head(data: Mapping[str, Any]) -> Iterator[Problem]:
    head = _part(data, "head")
    if head.get("transport") == "local" and head.get("proxy_command"):
        yield ("head", "proxy_command"), head["proxy_command"], "allowed with transport ssh only"
