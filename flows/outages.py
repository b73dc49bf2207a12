"""A Prefect API that is away may neither end a run nor lose how it ended."""

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from tasks import remote
from tasks.converge import log
from tasks.errors import Cancelled

GRACE = 5.0  # For steps that were cancelled to end what they run.
PATIENCE = 600.0
EVERY = 2.0


class CancelledByUser(Cancelled):
    """Somebody cancelled the run in the Prefect UI, or by its API."""


def to_its_end(body: Callable[[], None], cancelled: threading.Event) -> None:
    """Run a flow's body; only an error of its own, a person or a signal can end it.

    In a thread of its own: at the flow's thread, Prefect throws a CancelledError when a deployment
    has a concurrency limit and its lease could not be renewed, as after a restart of the server.
    """
    future: Future[None] = Future()
    begun = threading.Event()
    context = contextvars.copy_context()

    def work() -> None:
        begun.wait()
        try:
            future.set_result(context.run(body))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="flow body", daemon=True).start()
    try:
        while True:
            try:
                # Only here: what interrupts us before finds nothing begun.
                begun.set()
                if wait([future], timeout=0.5).done:
                    break
                if cancelled.is_set():
                    raise CancelledByUser("cancelled through the Prefect API")
            except asyncio.CancelledError:
                log.warning(
                    "Prefect has lost this run's place in its concurrency limit; going on, since "
                    "the lock on the head keeps other runs out"
                )
    except BaseException:
        # Ctrl-C, or a cancel from the Prefect UI: no step may go on once the lock is free.
        remote.cancel()
        wait([future], GRACE)
        raise
    future.result()


def wait_for_api(patience: float = PATIENCE, every: float = EVERY) -> None:
    """At the end of a flow run, until the Prefect API can be told how it ended."""
    if FlowRunContext.get() is None:
        return
    deadline = time.monotonic() + patience
    told = False
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
        while error := get_client(sync_client=True).api_healthcheck():
            if time.monotonic() > deadline:
                log.error("the Prefect API is still away: it will not learn how this run ended")
                return
            if not told:
                log.warning(
                    "all is done on the nodes, but the Prefect API does not answer (%s): waiting "
                    "for it, up to %.0f minutes",
                    error,
                    patience / 60,
                )
                told = True
            time.sleep(every)
