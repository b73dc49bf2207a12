"""Steps run side by side: as task runs in Prefect, or as plain calls in threads."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass
from typing import Any, Protocol

from prefect import Task
from prefect.futures import PrefectFuture
from prefect.futures import as_completed as prefect_as_completed
from prefect.futures import wait as prefect_wait
from tenacity import (
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    stop_after_attempt,
    stop_when_event_set,
    wait_chain,
    wait_fixed,
)

from tasks import remote
from tasks.converge import RETRY_DELAYS, Outcome
from tasks.errors import MAY_PASS, SparkrailError

THREADS = 16
Result = Outcome | BaseException


@dataclass(frozen=True)
class Call:
    """A step with its arguments, to be run beside others."""

    task: Task[..., Outcome]
    arguments: dict[str, Any]

    @property
    def node(self) -> str:
        return str(self.arguments["node"].name)


def call(task: Task[..., Outcome], **arguments: Any) -> Call:
    return Call(task, arguments)


class Runner(Protocol):
    """Runs steps side by side."""

    def submit(self, each: Call, common: dict[str, Any]) -> Any: ...

    def ended(self, futures: Sequence[Any]) -> Iterator[tuple[Any, Result]]:
        """Each future with what came of it, as they end."""

    def wait(self, futures: Sequence[Any], timeout: float) -> None: ...


class Threads:
    """Steps as plain calls."""

    def __init__(self, pace: float) -> None:
        self._pace = pace
        self._pool = ThreadPoolExecutor(max_workers=THREADS)

    def submit(self, each: Call, common: dict[str, Any]) -> Future[Outcome]:
        # As Prefect does it for a step: what may pass, and as often as the step says.
        attempts = Retrying(
            retry=retry_if_exception_type(MAY_PASS),
            stop=stop_after_attempt(1 + (each.task.retries or 0))
            | stop_when_event_set(remote.STOP),
            wait=wait_chain(*(wait_fixed(self._pace * delay) for delay in RETRY_DELAYS)),
            sleep=sleep_using_event(remote.STOP),
            reraise=True,
        )
        return self._pool.submit(lambda: attempts(each.task.fn, **common, **each.arguments))

    def ended(self, futures: Sequence[Future[Outcome]]) -> Iterator[tuple[Any, Result]]:
        for future in as_completed(futures):
            yield future, future.exception() or future.result()
        self._pool.shutdown()

    def wait(self, futures: Sequence[Future[Outcome]], timeout: float) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        # One that never began counts as unfinished there, for ever.
        wait([future for future in futures if not future.cancelled()], timeout)


class TaskRuns:
    """Steps as task runs of the flow run that we are in."""

    def submit(self, each: Call, common: dict[str, Any]) -> PrefectFuture[Outcome]:
        future: PrefectFuture[Outcome] = each.task.submit(**common, **each.arguments)
        return future

    def ended(self, futures: Sequence[PrefectFuture[Outcome]]) -> Iterator[tuple[Any, Result]]:
        for future in prefect_as_completed(list(futures)):
            future.wait()  # Without it, its state would be read from the API, without our data.
            state = future.state
            result = state.result(raise_on_failure=False)
            if not isinstance(result, Outcome | BaseException):
                result = SparkrailError(f"ended as {state.name}: {state.message}")
            yield future, result

    def wait(self, futures: Sequence[PrefectFuture[Outcome]], timeout: float) -> None:
        prefect_wait(list(futures), timeout)
