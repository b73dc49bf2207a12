"""Ray's containers: the head's started, the workers' joined to it."""

from functools import partial
from typing import Any

from blocks import Cluster, Node
from tasks import containers
from tasks.containers import Create, log_tail
from tasks.converge import (
    Gone,
    Outcome,
    Ready,
    Run,
    Waiting,
    converge,
    ended_at_once,
    log,
    step,
    wait_until,
)
from tasks.engines import engine
from tasks.errors import NotReady
from tasks.failures import ANSI, find_failure
from tasks.listeners import listeners
from tasks.remote import connect
from tasks.topology import ContainerSpec

STARTED = "Ray runtime started."
HEAD_SECONDS = 120.0
# How long what we just stopped may hold the port.
PORT_SECONDS = 5.0
REACH_SECONDS = 5
REFUSED = "Connection refused"
REFUSED_SECONDS = 60.0
REACH = """\
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[3])).close()
except OSError as error:
    print(error)"""


@step("Ray head start")
def start_head(cluster: Cluster, node: Node, run: Run, want: ContainerSpec) -> Outcome:
    """The Ray head runs on the head node."""
    return ensure_ray(cluster, node, run, want, "Ray head start")


@step("worker join")
def join_worker(cluster: Cluster, node: Node, run: Run, want: ContainerSpec) -> Outcome:
    """A Ray worker runs on the node and was pointed at the head."""
    return ensure_ray(cluster, node, run, want, "worker join")


def ensure_ray(cluster: Cluster, node: Node, run: Run, want: ContainerSpec, name: str) -> Outcome:
    """The node's Ray container runs as wanted, and its raylet has started; tried twice."""
    check = check_port if want.role == "head" else check_way
    with engine(cluster, node) as client:

        def observe() -> dict[str, containers.Container]:
            found = containers.observe(client, (want.name,))
            containers.refuse_foreign(cluster.name, node.name, found)
            return found

        def act(do: containers.Step) -> None:
            if isinstance(do, Create):
                check(cluster, node, name)
            containers.act(client, cluster.name, node.name, run.id, do)

        def start() -> Outcome:
            look = partial(judge_start, client, want.name)
            with ended_at_once(name, node.name, look):
                outcome = converge(
                    name,
                    node.name,
                    observe,
                    lambda have: containers.plan(want, have, run.id, run.restart),
                    act,
                    dry_run=run.dry_run,
                )
            if outcome.status == "changed":
                wait_until(
                    name,
                    node.name,
                    look,
                    timeout=HEAD_SECONDS if want.role == "head" else cluster.ray.join_seconds,
                    details=lambda: log_tail(client, want.name),
                )
            return outcome

        try:
            return start()
        except NotReady as error:
            if not error.retryable:
                raise
            log.warning("%s on %s: once more, since %s", name, node.name, error.brief)
        for failed in observe().values():
            containers.remove(client, failed)
        return start()


def check_port(cluster: Cluster, node: Node, name: str) -> None:
    """Nobody holds the head's port; Ray itself would tell only after 41 s."""
    port = cluster.ray.port

    def probe() -> Ready | Waiting:
        held = listeners(cluster, node, port)
        return Waiting(f"port {port} is held by {held[0]}") if held else Ready()

    try:
        wait_until(name, node.name, probe, timeout=PORT_SECONDS)
    except NotReady as error:
        error.remedy = f"End it, or set another ray.port (ss -ltnp 'sport = :{port}' on the head)."
        raise


def check_way(cluster: Cluster, node: Node, name: str) -> None:
    """The worker reaches the head's port; a Ray that does not would try for long."""
    head = f"{cluster.head.fabric_address}:{cluster.ray.port}"
    argv = ("python3", "-IS", "-c", REACH, *head.split(":"), str(REACH_SECONDS))

    def probe() -> Ready | Waiting | Gone:
        said = connect(cluster, node).run(argv).stdout.strip()
        if not said:
            return Ready()
        why = f"cannot reach the Ray head at {head}: {said}"
        if REFUSED in said:  # Somebody has restarted its container, say: Ray is not up yet.
            return Waiting(why)
        return Gone(why)

    try:
        wait_until(name, node.name, probe, timeout=REFUSED_SECONDS)
    except NotReady as error:
        place = cluster.head.name
        error.remedy = f"Is the fabric's link up, and does no firewall on {place} stop it?"
        raise


def judge_start(client: Any, name: str) -> Ready | Waiting | Gone:
    """One look at a Ray container that starts."""
    container = containers.observe(client, (name,)).get(name)
    said = ANSI.sub("", log_tail(client, name, 200))
    running = container is not None and container.running
    if running and STARTED in said:
        return Ready()
    hit = find_failure(said)
    if running and not hit:
        return Waiting("ray start has not come to its end")
    state = "" if running else f"its container is {container.state if container else 'gone'}"
    cause = f"{hit.failure.cause}: {hit.line}" if hit else ""
    return Gone(
        ": ".join(part for part in (state, cause) if part),
        details="\n".join(said.strip().splitlines()[-15:]),
        remedy=hit.failure.remedy if hit else "",
        retryable=bool(hit and hit.failure.retryable),
    )
