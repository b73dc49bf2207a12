"""The vLLM server on the head: stopped, started, and waited for until it answers."""

import re
from functools import partial

import docker

from blocks import Cluster, Node
from tasks import containers, endpoint
from tasks.containers import Container, Remove, log_tail
from tasks.converge import Gone, Outcome, Ready, Run, Waiting, converge, step, wait_until
from tasks.endpoint import Ask, Silent
from tasks.engines import engine
from tasks.failures import ANSI, find_failure
from tasks.secret_values import load_secrets
from tasks.topology import ContainerSpec

LOG_LINES = 400
# What comes whether or not a start gets on: our own questions, and reports made every so often.
NO_PROGRESS = re.compile(
    r'"(GET|POST) /\S* HTTP/1\.[01]" \d|throughput: |Waiting for creating a placement group'
    r"|No available shared memory broadcast block|still waiting|autoscaler \+"
)


def plan_stop(names: tuple[str, ...], have: dict[str, Container]) -> list[Remove]:
    """The containers that must go, in the order given: the server before Ray."""
    return [Remove(have[name], "it is replaced") for name in names if name in have]


@step("stop")
def stop_old(cluster: Cluster, node: Node, run: Run, names: tuple[str, ...]) -> Outcome:
    """What must go on this node is gone; containers that are not ours are never touched."""
    with engine(cluster, node) as client:

        def observe() -> dict[str, Container]:
            found = containers.observe(client, names)
            containers.refuse_foreign(cluster.name, node.name, found)
            return found

        return converge(
            "stop",
            node.name,
            observe,
            partial(plan_stop, names),
            partial(containers.act, client, cluster.name, node.name, run.id),
            dry_run=run.dry_run,
        )


@step("vLLM serve")
def serve(cluster: Cluster, node: Node, run: Run, want: ContainerSpec) -> Outcome:
    """The server runs as wanted, serves the wanted name, and has given one real answer."""
    name = "vLLM serve"
    with engine(cluster, node) as client:

        def observe() -> dict[str, Container]:
            found = containers.observe(client, (want.name, want.shares))
            containers.refuse_foreign(cluster.name, node.name, found)
            return found

        outcome = converge(
            name,
            node.name,
            observe,
            lambda have: containers.plan(want, have, run.id, run.restart),
            partial(containers.act, client, cluster.name, node.name, run.id),
            dry_run=run.dry_run,
        )
        if outcome.status == "planned":
            return outcome
        ask = endpoint.asker(cluster, load_secrets(cluster).api_key)
        answer = wait_until(
            name,
            node.name,
            lambda: probe(client, cluster, ask, want.name),
            timeout=cluster.serve.ready_minutes * 60,
            stall=cluster.serve.stall_minutes * 60,
            details=lambda: log_tail(client, want.name),
        )
    detail = f"answers {answer.text!r} in {answer.seconds:.2f} s"
    return outcome.model_copy(update={"detail": detail, "data": answer.model_dump()})


def probe(
    client: docker.DockerClient, cluster: Cluster, ask: Ask, name: str
) -> Ready | Waiting | Gone:
    """One look at a starting server; a dead process or a known failure line ends the wait."""
    container = containers.observe(client, (name,)).get(name)
    running = container is not None and container.running
    why = f"its container is {container.state if container else 'gone'}"
    if running:
        # Before the log: a line there that looks like a failure may be part of somebody's prompt.
        try:
            return Ready(endpoint.check_answers(ask, cluster.model.name))
        except Silent as error:
            why = error.brief
    log = log_tail(client, name, LOG_LINES)
    hit = find_failure(log)
    if hit:
        return Gone(
            f"{hit.failure.cause}: {hit.line}", details=_last(log), remedy=hit.failure.remedy
        )
    if running:
        return Waiting(why, progress=progress_of(log))
    remedy = f"Its whole log: docker logs {name} on the head."
    return Gone(why, details=_last(log), remedy=remedy)


def progress_of(log: str) -> tuple[str, ...]:
    """The lines that show that a start gets on."""
    return tuple(line for line in ANSI.sub("", log).splitlines() if not NO_PROGRESS.search(line))


def _last(log: str, lines: int = 15) -> str:
    return "\n".join(log.strip().splitlines()[-lines:])
