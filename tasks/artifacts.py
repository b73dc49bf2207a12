"""What the Prefect UI shows of a run beside its steps: transfers, nodes, endpoint, report, lines.

One thread publishes all of it in the background: a Prefect server that is slow or away may neither
end nor delay a run. Outside Prefect nothing happens at all.
"""

import contextlib
import contextvars
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from uuid import UUID

from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger

from blocks import Cluster, Node
from tasks.converge import log

PATIENCE = 1.5  # At the end of a run, all in all; a healthy server takes some hundredths of it.


class Publisher:
    """Works off what is to be published, one after the other; of one subject only the latest."""

    def __init__(self) -> None:
        self._state = threading.Condition()
        self._waiting: dict[str, Callable[[], object]] = {}
        self._busy = False
        self._away = False
        self._thread: threading.Thread | None = None

    def put(self, subject: str, publish: Callable[[], object]) -> None:
        """Publish soon, on behalf of the flow run or task run that we are in."""
        job = partial(contextvars.copy_context().run, publish)
        with self._state:
            self._waiting[subject] = job
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="publisher", daemon=True)
                self._thread.start()
            self._state.notify_all()

    def drain(self, timeout: float) -> bool:
        """Wait until all is published, but never for long."""
        with self._state:
            return self._state.wait_for(lambda: not self._waiting and not self._busy, timeout)

    def _work(self) -> None:
        while True:
            with self._state:
                self._busy = False
                self._state.notify_all()
                self._state.wait_for(lambda: self._waiting)
                subject = next(iter(self._waiting))
                job = self._waiting.pop(subject)
                self._busy = True
            self._publish(subject, job)

    def _publish(self, subject: str, job: Callable[[], object]) -> None:
        try:
            job()
        except Exception as error:  # Whatever the API client raises.
            if not self._away:
                log.warning("%s could not be published: %s", subject, error)
            self._away = True
        else:
            self._away = False


_publisher = Publisher()


def publish(subject: str, what: Callable[[], object]) -> None:
    """Have it published, if we are in a flow run."""
    if TaskRunContext.get() or FlowRunContext.get():
        _publisher.put(subject, what)


def drain() -> None:
    """At the end of a run: give what is not yet published a moment."""
    _publisher.drain(PATIENCE)


def show_nodes(cluster: Cluster, rows: Sequence[dict[str, Any]]) -> None:
    """The table of the nodes as they were verified."""
    key = f"nodes-{cluster.name}"
    description = f"{len(rows)} nodes with {cluster.gpus} GPUs, verified"
    publish(key, lambda: create_table_artifact(table=list(rows), key=key, description=description))


def show_residue(cluster: Cluster, node: Node, rows: Sequence[dict[str, str]]) -> None:
    """The evidence of a cleanup: who held GPU memory, what was done, what came of it."""
    key = f"residue-{cluster.name}-{node.name}"
    description = f"Who held GPU memory on {node.name}, and what was done about it"
    publish(
        key,
        lambda: create_table_artifact(table=list(rows), key=key, description=description),
    )


def show_endpoint(cluster: Cluster, url: str) -> None:
    """A link to what the endpoint serves."""
    key = f"endpoint-{cluster.name}"
    description = f"{cluster.model.name} answers here"
    publish(
        key,
        lambda: create_link_artifact(
            link=f"{url}/models", link_text=url, key=key, description=description
        ),
    )


def show_report(cluster: str, markdown: str, description: str) -> None:
    """The report at the end, of a run that failed too."""
    key = f"report-{cluster}"
    publish(
        key, lambda: create_markdown_artifact(markdown=markdown, key=key, description=description)
    )


def tag_run(tag: str) -> None:
    """Tag the flow run that we are in, which may have been started under any name."""
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    if run is None or tag in run.tags:
        return
    tags = sorted({*run.tags, tag})
    publish("the tag", lambda: get_client(sync_client=True).update_flow_run(run.id, tags=tags))


class _ToRun(logging.Handler):
    """Hands our lines to the logger of the flow run or task run that says them."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            mine: Any = get_run_logger()
        except MissingContextError:  # A thread of its own, such as the lock's.
            mine = logging.getLogger()
        mine.log(record.levelno, record.getMessage(), exc_info=record.exc_info)


@contextlib.contextmanager
def lines_in_run() -> Iterator[None]:
    """Around a flow's body: what we log stands on the page of its run, as Prefect's own does."""
    if FlowRunContext.get() is None:
        yield
        return
    handler, level, propagate = _ToRun(), log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate


class Bar:
    """A progress bar: made at its first update, and changed by the further ones."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._id: UUID | None = None

    def show(self, percent: float, description: str) -> None:
        publish(self._key, partial(self._show, percent, description))

    def _show(self, percent: float, description: str) -> None:
        # Only the publisher's one thread comes here.
        if self._id is None:
            made: Any = create_progress_artifact(percent, self._key, description)
            self._id = made
        else:
            update_progress_artifact(self._id, percent, description)
