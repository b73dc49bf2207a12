"""Containers: what docker reports, and the steps from there to what we want."""

from collections.abc import Iterator
from typing import Any

import docker
import docker.models.containers as models
import pytest
from docker.errors import APIError, NotFound

from tasks import remote
from tasks.containers import (
    CLUSTER_LABEL,
    DIGEST_LABEL,
    RUN_LABEL,
    SHARES_LABEL,
    Container,
    Create,
    Remove,
    act,
    create,
    log_tail,
    observe,
    options,
    parse_container,
    plan,
    refuse_foreign,
)
from tasks.containers import remove as remove_container
from tasks.errors import Cancelled, NotOurs
from tasks.topology import ContainerSpec

RAY = ContainerSpec(
    name="sparkrail-sparks-ray",
    role="head",
    image="engine:1",
    image_content="sha256:1",
    command=("/bin/sh", "/sparkrail/launch", "head"),
    folder="/root/.sparkrail/sparks/run",
    model="/models/tiny",
    gpu_access="nvidia",
    shm_mib=10240,
    rdma=False,
    files=("a", "b"),
    boot="boot-1",
)
SERVE = RAY.model_copy(
    update={
        "name": "sparkrail-sparks-serve",
        "role": "serve",
        "command": ("/bin/sh", "/sparkrail/launch", "serve"),
        "shares": RAY.name,
    }
)


def container(want: ContainerSpec, **changes: Any) -> Container:
    """A container as this run made it."""
    labels = {CLUSTER_LABEL: "sparks", DIGEST_LABEL: want.digest, RUN_LABEL: "run-1"}
    if want.shares:
        labels[SHARES_LABEL] = "ray-id"
    labels |= changes.pop("labels", {})
    found = {"id": "ray-id", "name": want.name, "state": "running", "labels": labels}
    return Container(**found | changes)


# --- what docker reports ------------------------------------------------------------------------


def test_a_row_of_docker_s_list() -> None:
    row = {
        "Id": "b9b5e01d4f6d",
        "Names": ["/sparkrail-sparks-ray"],
        "State": "exited",
        "Created": 1700000000,
        "ImageID": "sha256:1",
        "Labels": {"sparkrail.cluster": "sparks"},
        "Status": "Exited (1) 2 minutes ago",
    }
    assert parse_container(row) == Container(
        id="b9b5e01d4f6d",
        name="sparkrail-sparks-ray",
        state="exited",
        created=1700000000,
        image="sha256:1",
        labels={"sparkrail.cluster": "sparks"},
    )


@pytest.mark.parametrize(
    ("state", "running"),
    [
        ("running", True),
        ("created", False),
        ("restarting", False),
        ("removing", False),
        ("paused", False),
        ("exited", False),
        ("dead", False),
    ],
)
def test_only_one_state_is_running(state: str, running: bool) -> None:
    row = {"Id": "1", "Names": ["/x"], "State": state, "Labels": None}
    assert parse_container(row).running is running


class Listing:
    """A docker client that knows these containers, and writes down what it is asked to do."""

    def __init__(self, *rows: dict[str, Any]) -> None:
        # `client.containers` and `client.api.containers()` are both this object.
        self.api = self.containers = self
        self.rows = rows
        self.did: list[str] = []
        self.refuses: dict[str, Exception] = {}
        self.status = "running"

    def __call__(self, *, all: bool) -> list[dict[str, Any]]:
        assert all, "stopped containers hold their name too"
        return list(self.rows)

    def get(self, id: str) -> "Listing":
        self._do(f"get {id}")
        return self

    @property
    def id(self) -> str:
        return "ray-id"

    def update(self, restart_policy: dict[str, Any]) -> None:
        self._do(f"update {restart_policy['Name']}")

    def stop(self, timeout: int) -> None:
        self._do(f"stop {timeout}")

    def remove(self, **how: bool) -> None:
        self._do(f"remove {how}")

    def logs(self, name: str, tail: int) -> bytes:
        self._do(f"logs {name} {tail}")
        return b""

    def wait(self, *, condition: str, timeout: int) -> None:
        assert timeout > 0
        self._do(f"wait {condition}")

    def start(self) -> None:
        self._do("start")

    def create(self, image: str, command: list[str], **more: Any) -> "Listing":
        self.created = more
        self._do(f"create {image} {command}")
        return self

    def _do(self, what: str) -> None:
        self.did.append(what)
        for name, error in self.refuses.items():
            if what.startswith(name):
                raise error


def row(name: str) -> dict[str, Any]:
    return {"Id": name, "Names": [f"/{name}"], "State": "running"}


def client(*rows: dict[str, Any]) -> Any:
    return Listing(*rows)


def test_only_the_whole_name_counts() -> None:
    """docker's own filter finds parts of names."""
    names = ("sparkrail-sparks-ray", "old-sparkrail-sparks-ray", "sparkrail-sparks-ray2")
    nameless = {"Id": "gone", "Names": None, "State": "removing"}
    found = observe(client(*map(row, names), nameless), ("sparkrail-sparks-ray",))
    assert list(found) == ["sparkrail-sparks-ray"]


# --- plan ---------------------------------------------------------------------------------------

ANEW = container(RAY, id="new-ray-id")


@pytest.mark.parametrize(
    ("want", "have", "restart", "steps"),
    [
        pytest.param(RAY, [], "if-changed", ["start sparkrail-sparks-ray"], id="absent"),
        pytest.param(RAY, [container(RAY)], "if-changed", [], id="as wanted"),
        pytest.param(
            RAY,
            [container(RAY, labels={RUN_LABEL: "run-0"})],
            "if-changed",
            [],
            id="of another run",
        ),
        pytest.param(
            RAY,
            [container(RAY, state="exited")],
            "if-changed",
            [
                "remove sparkrail-sparks-ray (it is exited)",
                "start sparkrail-sparks-ray",
            ],
            id="stopped",
        ),
        pytest.param(
            RAY,
            [container(RAY, state="restarting")],
            "if-changed",
            [
                "remove sparkrail-sparks-ray (it is restarting)",
                "start sparkrail-sparks-ray",
            ],
            id="in a crash loop",
        ),
        pytest.param(
            RAY,
            [container(RAY, labels={DIGEST_LABEL: "other"})],
            "if-changed",
            [
                "remove sparkrail-sparks-ray (its spec has changed)",
                "start sparkrail-sparks-ray",
            ],
            id="drifted",
        ),
        pytest.param(
            SERVE, [container(SERVE, id="s"), container(RAY)], "if-changed", [], id="beside its Ray"
        ),
        pytest.param(
            SERVE,
            [container(SERVE, id="s"), ANEW],
            "if-changed",
            [
                "remove sparkrail-sparks-serve (sparkrail-sparks-ray was started anew)",
                "start sparkrail-sparks-serve",
            ],
            id="beside a Ray that was started anew",
        ),
        pytest.param(
            SERVE,
            [container(SERVE, id="s")],
            "if-changed",
            [
                "remove sparkrail-sparks-serve (sparkrail-sparks-ray was started anew)",
                "start sparkrail-sparks-serve",
            ],
            id="beside no Ray",
        ),
        pytest.param(RAY, [container(RAY)], "always", [], id="always, but this run started it"),
        pytest.param(
            RAY,
            [container(RAY, labels={RUN_LABEL: "run-0"})],
            "always",
            [
                "remove sparkrail-sparks-ray (a restart was asked for)",
                "start sparkrail-sparks-ray",
            ],
            id="always, and another run started it",
        ),
    ],
)
def test_plan(want: ContainerSpec, have: list[Container], restart: str, steps: list[str]) -> None:
    found = {each.name: each for each in have}
    assert [str(step) for step in plan(want, found, "run-1", restart)] == steps


@pytest.mark.parametrize(
    "labels",
    [
        pytest.param({}, id="without any label"),
        pytest.param({CLUSTER_LABEL: "other"}, id="of another cluster"),
    ],
)
def test_a_container_that_is_not_ours_is_refused(labels: dict[str, str]) -> None:
    foreign = Container(id="b9b5e01d4f6d897f", name=RAY.name, state="running", labels=labels)
    with pytest.raises(NotOurs) as caught:
        refuse_foreign("sparks", "worker1", {RAY.name: foreign})
    assert str(caught.value) == (
        "worker1: container sparkrail-sparks-ray (b9b5e01d4f6d) was not started by sparkrail\n"
        "Rename or remove it: docker rm -f sparkrail-sparks-ray"
    )


def test_ours_is_not_refused() -> None:
    refuse_foreign("sparks", "worker1", {RAY.name: container(RAY)})


# --- acting -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("want", "grace"),
    [
        pytest.param(SERVE, 20, id="the server may end what it answers"),
        pytest.param(RAY, 1, id="Ray has nothing to end"),
    ],
)
def test_a_container_is_told_not_to_come_back_before_it_is_stopped(
    want: ContainerSpec, grace: int
) -> None:
    docker = client()
    remove_container(docker, container(want))
    assert docker.did == [
        "get ray-id",
        "update no",
        f"stop {grace}",
        "remove {'force': True, 'v': True}",
    ]


@pytest.mark.parametrize("at", ["get", "update", "stop", "remove"])
def test_that_it_is_gone_already_is_fine(at: str) -> None:
    docker = client()
    docker.refuses = {at: NotFound("no such container")}
    remove_container(docker, container(RAY))


@pytest.mark.parametrize("status", ["dead", "removing"])
def test_one_whose_removal_was_cut_short_is_removed_again(status: str) -> None:
    """After a reboot of the node in mid-removal docker calls it dead, and updates it no more."""
    docker = client()
    docker.status = status
    docker.refuses = {"update": APIError("container is marked for removal")}
    remove_container(docker, container(RAY))
    assert docker.did == ["get ray-id", "remove {'force': True, 'v': True}"]


def test_one_that_ends_just_when_it_is_to_be_stopped_is_removed() -> None:
    docker = client()
    docker.refuses = {"update": APIError("cannot update a stopped container: unknown")}
    remove_container(docker, container(RAY))
    assert docker.did[-1] == "remove {'force': True, 'v': True}"


def test_the_end_of_a_removal_that_is_in_progress_is_awaited() -> None:
    """As that of a run which was killed just then."""
    docker = client()
    docker.refuses = {"remove": APIError("removal of container ray-id is already in progress")}
    remove_container(docker, container(RAY))
    assert docker.did[-1] == "wait removed"


@pytest.mark.parametrize(
    "error",
    [
        NotFound("no such container"),
        APIError("can not get logs from container which is dead or marked for removal"),
    ],
)
def test_one_that_has_no_log_any_more_has_said_nothing(error: APIError) -> None:
    docker = client()
    docker.refuses = {"logs": error}
    assert log_tail(docker, "sparkrail-sparks-ray") == ""


def test_what_docker_refuses_to_remove_is_told() -> None:
    docker = client()
    docker.refuses = {"remove": APIError("device or resource busy")}
    with pytest.raises(APIError, match="busy"):
        remove_container(docker, container(RAY))


def test_a_new_container_carries_our_labels() -> None:
    docker = client()
    create(docker, "sparks", "head", "run-1", SERVE)
    assert docker.did == [
        "get sparkrail-sparks-ray",
        "create engine:1 ['/sparkrail/launch', 'serve']",
        "start",
    ]
    assert docker.created["labels"] == {
        "sparkrail.cluster": "sparks",
        "sparkrail.digest": SERVE.digest,
        "sparkrail.run": "run-1",
        "sparkrail.shares": "ray-id",
        "sparkrail.boot": "boot-1",
    }


def test_one_that_cannot_start_does_not_keep_the_name() -> None:
    docker = client()
    docker.refuses = {"start": APIError("no such device")}
    with pytest.raises(APIError, match="no such device"):
        create(docker, "sparks", "head", "run-1", RAY)
    assert docker.did[-2:] == ["start", "remove {'force': True}"]


@pytest.fixture
def cancelled() -> Iterator[None]:
    remote.cancel()
    yield
    remote.STOP.clear()


@pytest.mark.usefixtures("cancelled")
@pytest.mark.parametrize(
    ("step", "said"),
    [
        pytest.param(
            Remove(container(RAY), "destroy"),
            "head: cancelled before: remove sparkrail-sparks-ray (destroy)",
            id="remove",
        ),
        pytest.param(
            Create(RAY), "head: cancelled before: start sparkrail-sparks-ray", id="create"
        ),
    ],
)
def test_a_cancelled_run_touches_nothing_more(step: Remove | Create, said: str) -> None:
    docker = client()
    with pytest.raises(Cancelled) as caught:
        act(docker, "sparks", "head", "run-1", step)
    assert (str(caught.value), docker.did) == (said, [])


# --- options ------------------------------------------------------------------------------------


def body(want: ContainerSpec, shared: Any = None) -> dict[str, Any]:
    """What docker-py sends to create it."""
    chosen = {"version": "1.41", "image": want.image, "command": list(want.command[1:])}
    # types-docker leaves it out.
    arguments = models._create_container_args(chosen | options(want, shared))  # type: ignore[attr-defined]
    found: dict[str, Any] = {key: arguments[key] for key in ("name", "entrypoint", "host_config")}
    return found


def test_options_of_ray() -> None:
    sent = body(RAY)
    assert (sent["name"], sent["entrypoint"]) == ("sparkrail-sparks-ray", ["/bin/sh"])
    assert dict(sent["host_config"]) == {
        "NetworkMode": "host",
        "IpcMode": "shareable",
        "ShmSize": 10240 * 1024 * 1024,
        "Init": True,
        "Binds": [
            "/root/.sparkrail/sparks/run:/sparkrail:ro",
            "/models/tiny:/models/tiny:ro",
        ],
        "Mounts": [docker.types.Mount("/tmp", None, type="volume")],
        "DeviceRequests": [
            {
                "Driver": "",
                "Count": -1,
                "DeviceIDs": [],
                "Capabilities": [["gpu"]],
                "Options": {},
            }
        ],
        "Ulimits": [],
        "LogConfig": {"Type": "json-file", "Config": {"max-size": "50m", "max-file": "3"}},
    }


def test_options_of_the_server_share_everything_with_ray() -> None:
    config = dict(body(SERVE, client())["host_config"])
    shared = {name: config[name] for name in ("IpcMode", "PidMode", "VolumesFrom", "Init")}
    assert shared == {
        "IpcMode": "container:ray-id",
        "PidMode": "container:ray-id",
        "VolumesFrom": ["ray-id"],
        "Init": False,
    }
    assert not {"ShmSize", "Mounts"} & set(config)


def test_options_where_no_gpu_runtime_is_wanted() -> None:
    config = body(RAY.model_copy(update={"gpu_access": "none"}))["host_config"]
    assert config.get("DeviceRequests", []) == []


def test_options_with_rdma() -> None:
    config = body(RAY.model_copy(update={"rdma": True}))["host_config"]
    assert config["Devices"] == [
        {
            "PathOnHost": "/dev/infiniband",
            "PathInContainer": "/dev/infiniband",
            "CgroupPermissions": "rwm",
        }
    ]
    assert config["Ulimits"] == [{"Name": "memlock", "Soft": -1, "Hard": -1}]
