"""Ray's containers are started, and once more where that may go better."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tasks import ray_start
from tasks.errors import NotReady
from tasks.ray_start import ensure_ray
from tasks.topology import ContainerSpec, Fabric, containers, files
from tests.unit.specs import RUN, spec

CLUSTER = spec()
TIMED_OUT = "Exception: The current node timed out during startup."
MISMATCH = "RuntimeError: Version mismatch: The cluster was started with:"
STARTED = "Ray runtime started."


class Docker:
    """A docker engine on which each container that is started says the next log, and may end."""

    def __init__(self, *logs: str) -> None:
        self.api = self.containers_ = self
        self._logs = list(logs)
        self._rows: list[dict[str, Any]] = []
        self.made = 0

    def logs(self, _name: str, *, tail: int) -> bytes:
        return self._logs[self.made - 1].encode()[: tail * 1000]

    @property
    def containers(self) -> Any:
        return self._Containers(self)

    class _Containers:
        status = "exited"

        def __init__(self, docker: "Docker") -> None:
            self._docker = docker

        def __call__(self, *, all: bool) -> list[dict[str, Any]]:
            assert all
            return self._docker._rows

        def create(
            self, _image: str, _command: list[str], *, labels: dict[str, str], **options: Any
        ) -> "Docker._Containers":
            self._docker.made += 1
            log = self._docker._logs[self._docker.made - 1]
            row = {"Id": "1", "Names": [f"/{options['name']}"], "Labels": labels}
            state = "running" if log == STARTED else "exited"
            self._docker._rows[:] = [{**row, "State": state}]
            return self

        def get(self, _id: str) -> "Docker._Containers":
            return self

        def start(self) -> None:
            """It runs, or has already ended."""

        def update(self, **_changes: Any) -> None:
            """It will not come back."""

        def stop(self, **_grace: int) -> None:
            """It has ended."""

        def remove(self, **_force: bool) -> None:
            self._docker._rows.clear()


@pytest.fixture
def want() -> ContainerSpec:
    fabric = Fabric(interface="eth1")
    read = files(CLUSTER, CLUSTER.head, fabric)
    return containers(CLUSTER, CLUSTER.head, "/root", fabric, read, "sha256:1")[0]


def engine_of(docker: Docker, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def engine(_cluster: Any, _node: Any) -> Iterator[Docker]:
        yield docker

    monkeypatch.setattr(ray_start, "engine", engine)
    monkeypatch.setattr(ray_start, "listeners", lambda *_: [])


def test_a_start_that_may_go_better_is_tried_again(
    want: ContainerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker = Docker(TIMED_OUT, STARTED)
    engine_of(docker, monkeypatch)
    outcome = ensure_ray(CLUSTER, CLUSTER.head, RUN, want, "Ray head start")
    assert (outcome.status, docker.made) == ("changed", 2)


@pytest.mark.parametrize(
    ("logs", "made"),
    [
        pytest.param((TIMED_OUT, TIMED_OUT), 2, id="twice, not for ever"),
        pytest.param((MISMATCH, STARTED), 1, id="not what comes back"),
        pytest.param(("KeyError: 'x'", STARTED), 1, id="not what nobody knows"),
    ],
)
def test_a_start_that_fails(
    want: ContainerSpec, monkeypatch: pytest.MonkeyPatch, logs: tuple[str, ...], made: int
) -> None:
    docker = Docker(*logs)
    engine_of(docker, monkeypatch)
    with pytest.raises(NotReady) as caught:
        ensure_ray(CLUSTER, CLUSTER.head, RUN, want, "Ray head start")
    assert docker.made == made
    assert caught.value.details == logs[made - 1]


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        pytest.param(["[Errno 111] Connection refused", ""], "", id="the head comes up"),
        pytest.param(["timed out"], "cannot reach the Ray head at .*: timed out", id="firewall"),
    ],
)
def test_the_way_to_a_head(monkeypatch: pytest.MonkeyPatch, answers: list[str], why: str) -> None:
    """Whoever refuses may listen in a moment; a way that is blocked stays so."""
    left = iter(answers)

    class Told:
        def run(self, _argv: tuple[str, ...]) -> SimpleNamespace:
            return SimpleNamespace(stdout=f"{next(left)}\n")

    monkeypatch.setattr(ray_start, "connect", lambda *_: Told())
    worker = CLUSTER.workers[0]
    if not why:
        ray_start.check_way(CLUSTER, worker, "worker join")
    else:
        with pytest.raises(NotReady, match=why) as caught:
            ray_start.check_way(CLUSTER, worker, "worker join")
        assert "firewall" in caught.value.remedy
    assert list(left) == []
