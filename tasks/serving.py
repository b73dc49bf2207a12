"""The vLLM server on the head: stopped, started, and waited for until it answers."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import docker

from blocks import Cluster, Node
from tasks import containers, endpoint
from tasks.containers import Container, Remove, log_tail
from tasks.converge import (
    Gone,
    Outcome,
    Ready,
    Run,
    Waiting,
    converge,
    ended_at_once,
    step,
    wait_until,
)
from tasks.endpoint import Answer, Ask, Silent
from tasks.engines import engine
from tasks.failures import ANSI, find_failure, shorten
from tasks.listeners import Listener, listeners_of, strangers
from tasks.rank_logs import Ranks, culprit
from tasks.residue import remember
from tasks.secret_values import api_key
from tasks.topology import ContainerSpec, kept_log, serve_container

LOG_LINES = 400
# How long a healthy server may leave our completions without an answer, if nobody else gets one.
ENGINE_SECONDS = 180.0
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

        if not run.dry_run:
            remember(cluster, node, [container.id for container in observe().values()])
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

        start = Start(
            client,
            cluster,
            endpoint.asker(cluster, api_key(cluster)),
            partial(listeners_of, cluster, node, want.name, cluster.serve.port),
            Ranks(cluster),
        )
        with ended_at_once(name, node.name, start.probe):
            outcome = converge(
                name,
                node.name,
                observe,
                lambda have: containers.plan(want, have, run.id, run.restart),
                partial(containers.act, client, cluster.name, node.name, run.id),
                dry_run=run.dry_run,
            )
        if run.dry_run:  # What runs yet would have been stopped before.
            detail = outcome.detail or f"start {want.name}"
            return outcome.model_copy(update={"status": "planned", "detail": detail})
        answer = wait_until(
            name,
            node.name,
            start.probe,
            timeout=cluster.serve.ready_minutes * 60,
            stall=cluster.serve.stall_minutes * 60,
            details=start.last_words,
        )
    return outcome.model_copy(update={"detail": answer.told, "data": answer.model_dump()})


@dataclass
class Start:
    """A server that starts, looked at again and again."""

    client: docker.DockerClient
    cluster: Cluster
    ask: Ask
    listening: Callable[[], Sequence[Listener]]
    ranks: Ranks
    clock: Callable[[], float] = time.monotonic
    completions: int = 0
    unanswered_since: float | None = None

    @property
    def name(self) -> str:
        return serve_container(self.cluster)

    def probe(self) -> Ready | Waiting | Gone:
        """One look; a dead process or a known failure line ends the wait."""
        container = containers.observe(self.client, (self.name,)).get(self.name)
        if container is None or not container.running:
            return self._ended(container.state if container else "gone")
        # Before the log: a line there that looks like a failure may be part of somebody's prompt.
        try:
            patience = min(60.0, 10.0 * 2**self.completions)
            return self._ours(endpoint.check_answers(self.ask, self._model, timeout=patience))
        except Silent as error:
            silent = error
        log = log_tail(self.client, self.name, LOG_LINES)
        return (
            self._failed(log) or self._hopeless(silent) or Waiting(silent.brief, progress_of(log))
        )

    @property
    def _model(self) -> str:
        return self.cluster.model.name

    def _ours(self, answer: Answer) -> Ready | Waiting | Gone:
        """Whether it was our server that answered, and not an older one on its port."""
        seen = self.listening()
        if not seen:
            return Waiting(f"nobody listens on port {self.cluster.serve.port} any more")
        return _stranger(self.cluster, seen) or Ready(answer)

    def _ended(self, state: str) -> Gone:
        log = log_tail(self.client, self.name, LOG_LINES)
        found = self._failed(log)
        if found:
            return found
        node = self.ranks.lost() or culprit(self.cluster, log, None)
        why = f"its container is {state}"
        if node != self.cluster.head:
            why += f"; the cause seems to be on {node.name}"
        return Gone(
            why,
            details=self._told(log, node),
            remedy=f"Its log, on the head: {kept_log(self.cluster, self.name)}",
            node=node.name,
        )

    def _failed(self, log: str) -> Gone | None:
        hit = find_failure(log)
        if hit is None:
            return None
        node = culprit(self.cluster, log, hit)
        return Gone(
            f"{hit.failure.cause}: {hit.line}",
            details=self._told(log, node),
            remedy=hit.failure.remedy,
            node=node.name,
            retryable=hit.failure.retryable,
        )

    def _hopeless(self, silent: Silent) -> Gone | None:
        """What no waiting mends: another served name, or an engine that never completes."""
        if silent.stage == "names":
            remedy = "See --served-model-name in serve.args, and who else listens on the port."
            return _stranger(self.cluster, self.listening()) or Gone(silent.brief, remedy=remedy)
        if silent.stage != "completion":
            self.completions, self.unanswered_since = 0, None
            return None
        self.completions += 1
        if self.unanswered_since is None:
            self.unanswered_since = self.clock()
        if self.clock() - self.unanswered_since < ENGINE_SECONDS:
            return None
        return Gone(
            f"/health is 200, but the engine completes nothing: {silent.brief}",
            details=f"{silent.details}\n{self.last_words()}".strip(),
            remedy=f"Its log, on the head: {kept_log(self.cluster, self.name)}",
        )

    def last_words(self) -> str:
        """For a wait that is given up: the server's log, and what the workers' ranks said."""
        log = _last(log_tail(self.client, self.name))
        return f"{log}\n{self.ranks.last_words(self.cluster.workers, 5)}".strip()

    def _told(self, log: str, node: Node) -> str:
        if node == self.cluster.head:
            return _last(log)
        return f"{_last(log, 8)}\n{self.ranks.last_words([node])}".strip()


def _stranger(cluster: Cluster, seen: Sequence[Listener]) -> Gone | None:
    port = cluster.serve.port
    if not strangers(seen, endpoint.asked_host(cluster)):
        return None
    return Gone(
        f"another process than our server answers on port {port}",
        remedy=f"End it, or set another serve.port (ss -ltnp 'sport = :{port}' on the head).",
    )


def progress_of(log: str) -> tuple[str, ...]:
    """The lines that show that a start gets on."""
    return tuple(line for line in ANSI.sub("", log).splitlines() if not NO_PROGRESS.search(line))


def _last(log: str, lines: int = 15) -> str:
    return "\n".join(map(shorten, log.strip().splitlines()[-lines:]))
