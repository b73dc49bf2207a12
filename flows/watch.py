"""What the Prefect API says of the run that we are, while it runs."""

import contextvars
import threading
from types import TracebackType

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Running

from tasks.converge import log

EVERY = 2.0
ALIVE = "This run is alive: only the Prefect API was away."


class Watch:
    """Around a run: sees that a person cancels it, and takes back that it were dead.

    The Prefect worker that started a run ends it when it is cancelled; but a run from the command
    line has none, and a worker may die before its runs. And after an outage the API knows no
    heartbeat of any run, so that the automation for dead ones takes them all for dead.
    """

    def __init__(self, every: float = EVERY) -> None:
        self.cancelled = threading.Event()
        self._every = every
        self._over = threading.Event()

    def __enter__(self) -> "Watch":
        context = FlowRunContext.get()
        if context is not None and context.flow_run is not None:
            run = contextvars.copy_context().run
            threading.Thread(
                target=run, args=(self._look, context.flow_run), name="run watch", daemon=True
            ).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()

    def _look(self, ours: FlowRun) -> None:
        with (
            temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
            get_client(sync_client=True) as client,
        ):
            while not self._over.wait(self._every):
                try:
                    self._react(client, ours)
                except Exception as error:  # Whatever the API client raises while it is away.
                    log.debug("the state of this run could not be read: %s", error)

    def _react(self, client: SyncPrefectClient, ours: FlowRun) -> None:
        state = client.read_flow_run(ours.id).state
        if state is None or self._over.is_set():
            return
        if state.is_cancelling():
            self.cancelled.set()
        elif state.is_crashed():
            client.set_flow_run_state(ours.id, Running(message=ALIVE), force=True)
