"""The server's start: when it is ready, when to wait, and when waiting is over."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from blocks import Node
from tasks.containers import Container
from tasks.converge import Gone, Ready, Waiting, wait_until
from tasks.endpoint import Ask, Silent
from tasks.errors import LoginRefused, NodeUnreachable, NotReady
from tasks.listeners import Listener
from tasks.serving import Start, plan_stop, progress_of
from tests.unit.http_server import COMPLETION, MODELS
from tests.unit.specs import spec

HEALTHY = (Path(__file__).parent / "data" / "vllm" / "healthy-start-0.32.0.txt").read_text()
RAY, SERVE = "sparkrail-sparks-ray", "sparkrail-sparks-serve"
HINT = f"Its log, on the head: ~/.sparkrail/sparks/failed/{SERVE}.log"


class Docker:
    """A docker client that knows one container and its log."""

    def __init__(self, state: str | None, log: str = "") -> None:
        self.api, self._state, self.log = self, state, log

    def containers(self, *, all: bool) -> list[dict[str, Any]]:
        assert all
        row = {"Id": "1", "Names": [f"/{SERVE}"], "State": self._state}
        return [row] if self._state else []

    def logs(self, name: str, *, tail: int) -> bytes:
        assert name == SERVE
        assert tail in (30, 400)
        return self.log.encode()


def docker(state: str | None, log: str = "") -> Any:
    return Docker(state, log)


def answering(replies: dict[str, tuple[int, Any]]) -> Ask:
    def ask(_method: str, path: str, _body: Any, _timeout: float) -> tuple[int, bytes]:
        status, content = replies[path]
        return status, json.dumps(content).encode()

    return ask


def raising(error: Exception) -> Ask:
    def ask(_method: str, _path: str, _body: Any, _timeout: float) -> tuple[int, bytes]:
        raise error

    return ask


OURS = Listener(address="0.0.0.0", pid=7, command="vllm serve")
OLD = Listener(address="127.0.0.1")


class Workers:
    """Ranks on workers that say something, one of which may be lost."""

    def __init__(self, lost: Node | None = None) -> None:
        self._lost = lost

    def lost(self) -> Node | None:
        return self._lost

    def last_words(self, nodes: Sequence[Node], lines: int = 15) -> str:
        return "\n".join(f"last on {node.name}: {lines} lines" for node in nodes)


def start(
    client: Any,
    ask: Ask,
    listening: Sequence[Listener] = (OURS,),
    lost: Node | None = None,
    clock: Callable[[], float] = lambda: 0.0,
) -> Start:
    ranks: Any = Workers(lost)
    return Start(client, spec(), ask, lambda: listening, ranks, clock)


METRICS = 'vllm:generation_tokens_total{engine="0",model_name="tiny"} %s\n'
UP = {
    "/health": (200, None),
    "/v1/models": (200, MODELS),
    "/v1/completions": (200, COMPLETION),
    "/metrics": (404, None),
}
BROKEN = UP | {"/v1/completions": (500, {"error": "EngineDeadError"})}
STARTING = raising(Silent("/health: nothing listens on 127.0.0.1:8000", node="head"))
MEMORY = (
    "ValueError: Free memory on device (11.2/121.63 GiB) on startup is less than desired GPU "
    "memory utilization (0.9, 109.47 GiB)."
)


def test_it_is_ready_when_it_gave_one_real_answer() -> None:
    found = start(docker("running", "INFO Application startup complete."), answering(UP)).probe()
    assert isinstance(found, Ready)
    assert (found.value.text, found.value.tokens) == (" jumps over", 4)


@pytest.mark.parametrize(
    ("client", "ask", "found"),
    [
        pytest.param(
            docker("running", "INFO loading\n"),
            STARTING,
            Waiting("/health: nothing listens on 127.0.0.1:8000", progress=("INFO loading",)),
            id="loading",
        ),
        pytest.param(
            docker("running", "INFO up\n"),
            answering(BROKEN),
            Waiting("a completion: HTTP 500", progress=("INFO up",)),
            id="healthy, but no completion",
        ),
        pytest.param(
            docker("exited", "one\ntwo\n"),
            STARTING,
            Gone("its container is exited", details="one\ntwo", remedy=HINT, node="head"),
            id="ended",
        ),
        pytest.param(
            docker("restarting"),
            answering(UP),
            Gone("its container is restarting", details="", remedy=HINT, node="head"),
            id="in a crash loop, whoever answers on the port",
        ),
        pytest.param(
            docker(None),
            STARTING,
            Gone("its container is gone", remedy=HINT, node="head"),
            id="removed",
        ),
        pytest.param(
            docker("running", f"INFO starting\n{MEMORY}\n"),
            STARTING,
            Gone(
                f"other processes or the page cache hold the GPU's memory: {MEMORY}",
                details=f"INFO starting\n{MEMORY}",
                remedy="See who holds it (sparkrail check), or lower --gpu-memory-utilization.",
                node="head",
            ),
            id="a known failure, before the process has ended",
        ),
        pytest.param(
            docker("exited", f"INFO starting\n{MEMORY}\n"),
            STARTING,
            Gone(
                f"other processes or the page cache hold the GPU's memory: {MEMORY}",
                details=f"INFO starting\n{MEMORY}",
                remedy="See who holds it (sparkrail check), or lower --gpu-memory-utilization.",
                node="head",
            ),
            id="a known failure, and it has ended",
        ),
    ],
)
def test_probe(client: Any, ask: Ask, found: Waiting | Gone) -> None:
    assert start(client, ask).probe() == found


def test_a_known_failure_of_a_worker_s_rank_is_that_node_s() -> None:
    said = "RuntimeError: ... ifa != nullptr. Unable to find address for: ib0"
    log = f"INFO up\n(RayWorkerProc pid=9, ip=10.77.0.2) {said}\n"
    found = start(docker("running", log), STARTING).probe()
    assert isinstance(found, Gone)
    assert found.node == "worker1"
    assert found.details == f"{log}last on worker1: 15 lines"
    assert not found.retryable


def test_a_lost_rank_may_go_better_the_next_time() -> None:
    log = "(EngineCore pid=2) ERROR RayWorkerProc rank=[1] died unexpectedly, shutting down"
    found = start(docker("running", log), STARTING).probe()
    assert isinstance(found, Gone)
    assert found.retryable


@pytest.mark.parametrize(
    ("log", "lost"),
    [
        pytest.param("one\n", spec().workers[0], id="its Ray has ended"),
        pytest.param(
            "INFO x\n(RayWorkerProc pid=9, ip=10.77.0.2) KeyError: 'layers.1'\n",
            None,
            id="its rank said the first error",
        ),
    ],
)
def test_a_server_that_ended_because_of_a_worker(log: str, lost: Node | None) -> None:
    found = start(docker("exited", log), STARTING, lost=lost).probe()
    assert found == Gone(
        "its container is exited; the cause seems to be on worker1",
        details=f"{log}last on worker1: 15 lines",
        remedy=HINT,
        node="worker1",
    )


# --- readiness that cannot be fooled --------------------------------------------------------------


@pytest.mark.parametrize(
    "replies",
    [
        pytest.param(UP, id="the right name"),
        pytest.param(UP | {"/v1/models": (200, {"data": [{"id": "old"}]})}, id="another name"),
    ],
)
def test_an_old_listener_on_the_port_is_not_our_server(replies: dict[str, Any]) -> None:
    found = start(docker("running", "INFO loading"), answering(replies), (OLD,)).probe()
    assert found == Gone(
        "another process than our server answers on port 8000",
        remedy="End it, or set another serve.port (ss -ltnp 'sport = :8000' on the head).",
    )


def test_a_listener_at_another_address_is_nobody_that_we_asked() -> None:
    other = Listener(address="10.88.0.1")
    found = start(docker("running"), answering(UP), (OURS, other)).probe()
    assert isinstance(found, Ready)


def test_a_listener_that_has_just_ended_is_waited_for() -> None:
    found = start(docker("running"), answering(UP), ()).probe()
    assert found == Waiting("nobody listens on port 8000 any more")


def test_a_server_of_ours_with_another_name_will_never_have_the_right_one() -> None:
    replies = UP | {"/v1/models": (200, {"data": [{"id": "/models/tiny"}]})}
    found = start(docker("running"), answering(replies)).probe()
    assert isinstance(found, Gone)
    assert found.why == "wanted tiny, serving /models/tiny"


def test_a_dead_engine_behind_a_healthy_server_is_given_up() -> None:
    now = [0.0]
    looked = start(docker("running", "INFO up\n"), answering(BROKEN), clock=lambda: now[0])
    for now[0] in (0.0, 100.0, 179.0):
        assert isinstance(looked.probe(), Waiting)
    now[0] = 180.0
    found = looked.probe()
    assert isinstance(found, Gone)
    assert found.why == "/health is 200, but the engine completes nothing: a completion: HTTP 500"
    assert found.details == ('{"error": "EngineDeadError"}\nINFO up\nlast on worker1: 5 lines')


def test_completions_get_more_time_each_time() -> None:
    given: list[float] = []

    def ask(method: str, path: str, body: Any, timeout: float) -> tuple[int, bytes]:
        if path == "/v1/completions":
            given.append(timeout)
        return answering(BROKEN)(method, path, body, timeout)

    looked = start(docker("running"), ask)
    for _ in range(5):
        looked.probe()
    assert given == [10.0, 20.0, 40.0, 60.0, 60.0]


def test_a_line_in_somebody_s_prompt_is_no_failure() -> None:
    log = "INFO Received request cmpl-1: prompt: 'why CUDA out of memory'"
    assert isinstance(start(docker("running", log), answering(UP)).probe(), Ready)


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(NodeUnreachable("connection lost", node="head"), id="the link is down"),
        pytest.param(LoginRefused("sshd forbids the tunnel", node="head"), id="no tunnels"),
    ],
)
def test_what_is_no_answer_of_the_server_ends_the_wait(error: Exception) -> None:
    with pytest.raises(type(error)):
        start(docker("running"), raising(error)).probe()


ASKED = 'INFO:     127.0.0.1:53144 - "GET /health HTTP/1.1" 503 Service Unavailable\n'


@pytest.mark.parametrize(
    ("more", "moved"),
    [
        pytest.param("INFO Loading safetensors shards: 50%\n", True, id="a new line"),
        pytest.param(ASKED, False, id="our own question"),
        pytest.param(
            'INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error\n',
            False,
            id="our own completion",
        ),
        pytest.param(
            "INFO Engine 000: Avg prompt throughput: 0.0 tokens/s, Running: 0 reqs\n",
            False,
            id="vLLM's own statistics",
        ),
        pytest.param(
            "INFO Waiting for creating a placement group of specs for 160 seconds. specs=[...]\n",
            False,
            id="waiting for Ray",
        ),
        pytest.param(
            "INFO No available shared memory broadcast block found in 60 seconds.\n",
            False,
            id="ranks that hang",
        ),
    ],
)
def test_what_counts_as_progress(more: str, moved: bool) -> None:
    before = f"\x1b[32mINFO\x1b[0m Loading\n{ASKED}"
    assert (progress_of(before) != progress_of(before + more)) is moved


def test_a_start_without_progress_is_given_up_although_we_keep_asking() -> None:
    client, now = docker("running", "INFO Loading\n"), [0.0]

    def pause(seconds: float) -> None:
        now[0] += seconds
        client.log += ASKED

    with pytest.raises(NotReady) as caught:
        wait_until(
            "vLLM serve",
            "head",
            start(client, STARTING).probe,
            timeout=3600,
            stall=1200,
            every=10,
            clock=lambda: now[0],
            pause=pause,
        )
    assert str(caught.value) == (
        "head: vLLM serve: not ready after 1200 s without progress: /health: nothing listens on "
        "127.0.0.1:8000"
    )


def test_a_real_server_that_only_answers_makes_no_progress() -> None:
    lines = HEALTHY.splitlines()
    up = next(at for at, line in enumerate(lines) if "Application startup complete." in line)
    started = "\n".join(lines[: up + 1])
    # Ray passes on once more what its ranks said; that comes late, and ends.
    afterwards = "\n".join(line for line in lines[up + 1 :] if "RayWorkerProc" not in line)
    assert len(progress_of(started)) > 50
    assert progress_of(afterwards) == ()


def container(name: str) -> Container:
    return Container(id=f"id of {name}", name=name, state="running")


@pytest.mark.parametrize(
    ("names", "have", "steps"),
    [
        pytest.param((SERVE, RAY), (), [], id="nothing is there"),
        pytest.param(
            (SERVE, RAY),
            (RAY, SERVE),
            [f"remove {SERVE} (it is replaced)", f"remove {RAY} (it is replaced)"],
            id="the server before Ray",
        ),
        pytest.param((SERVE,), (RAY, SERVE), [f"remove {SERVE} (it is replaced)"], id="one of two"),
    ],
)
def test_plan_stop(names: tuple[str, ...], have: tuple[str, ...], steps: list[str]) -> None:
    found = {name: container(name) for name in have}
    assert [str(step) for step in plan_stop(names, found)] == steps
