"""Steps and their outcomes: observe, plan, act, observe again; and waiting with a deadline."""

import contextlib
import functools
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeVar

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.context import TaskRunContext
from prefect.states import Completed
from pydantic import BaseModel

from tasks import hidden, remote
from tasks.errors import MAY_PASS, Cancelled, NotConverged, NotReady

P = ParamSpec("P")
Have = TypeVar("Have")
Do = TypeVar("Do")
Status = Literal["unchanged", "changed", "planned"]
STATE_NAMES: dict[Status, str] = {
    "unchanged": "Unchanged",
    "changed": "Changed",
    "planned": "Planned",
}
RETRY_DELAYS = (2, 5)  # Seconds before a step is tried again.
log = logging.getLogger("sparkrail")
log.addFilter(hidden.Filter())


class Run(BaseModel, frozen=True):
    """One deploy, whatever started it; a retry from the Prefect UI is the same run."""

    id: str
    who: str
    dry_run: bool = False
    restart: Literal["if-changed", "always"] = "if-changed"
    force: bool = False  # Also a release that failed before.
    attended: bool = True  # A person started it, not a schedule or the watch.


class Outcome(BaseModel, frozen=True):
    """What a step did on a node. That it failed is an exception, never an outcome."""

    step: str
    node: str
    status: Status
    detail: str = ""
    seconds: float = 0.0
    # What later steps need of this one, as plain JSON values.
    data: Any = None


def step(name: str) -> Callable[[Callable[P, Outcome]], Task[P, Outcome]]:
    """Make a function that ensures something on `node` into a Prefect task.

    Never cached: a node's state is no function of the inputs. Tried again only when the connection
    failed, or docker's engine was away: a command that failed will fail again, slower.
    """

    def decorate(function: Callable[P, Outcome]) -> Task[P, Outcome]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            node = arguments["node"].name
            _tag(arguments.get("cluster"))
            started = time.monotonic()
            log.info("%s on %s ...", name, node)
            try:
                outcome = function(*args, **kwargs)
            except Exception as error:  # A mistake of ours, too: Prefect logs all that it says.
                hidden.clean(error)
                raise
            taken = time.monotonic() - started
            detail = hidden.shown(outcome.detail)
            outcome = outcome.model_copy(update={"seconds": taken, "detail": detail})
            log.info("%s on %s: %s %s", name, node, outcome.status, outcome.detail)
            # Called as a plain function, as tests and the command line do, it is one.
            return as_state(outcome) if TaskRunContext.get() else outcome

        made: Any = task(
            name=name,
            task_run_name=f"{name} on {{node.name}}",
            cache_policy=NO_CACHE,
            persist_result=False,
            retries=len(RETRY_DELAYS),
            retry_delay_seconds=list(RETRY_DELAYS),
            retry_condition_fn=_may_pass,
        )(timed)
        return made  # type: ignore[no-any-return]

    return decorate


def _tag(cluster: Any) -> None:
    """Tag the task run that we are in with its cluster; no earlier than now.

    For one that has tags when it begins, Prefect asks its API about limits, and waits for that.
    """
    context = TaskRunContext.get()
    if context and cluster is not None:
        context.task_run.tags = sorted({*context.task_run.tags, f"cluster:{cluster.name}"})


def as_state(outcome: Outcome) -> State[Outcome]:
    """A completed state that the Prefect UI shows as Unchanged, Changed or Planned."""
    return Completed(name=STATE_NAMES[outcome.status], message=outcome.detail, data=outcome)


def _may_pass(_task: Any, _run: Any, state: State[Any]) -> bool:
    error = state.result(raise_on_failure=False)
    return isinstance(error, MAY_PASS) and not remote.STOP.is_set()


def converge(
    name: str,
    node: str,
    observe: Callable[[], Have],
    plan: Callable[[Have], Sequence[Do]],
    act: Callable[[Do], object],
    *,
    dry_run: bool = False,
    data: Callable[[Have], Any] = lambda _have: None,
) -> Outcome:
    """The only place that acts: observe, plan, act, observe again, and nothing may be left to do.

    `str()` of what `plan` returns is what logs, dry runs and errors show.
    """
    have = observe()
    steps = plan(have)
    if not steps:
        return Outcome(step=name, node=node, status="unchanged", data=data(have))
    detail = "; ".join(map(str, steps))
    if dry_run:
        return Outcome(step=name, node=node, status="planned", detail=detail, data=data(have))
    for do in steps:
        log.info("%s on %s: %s", name, node, do)
        act(do)
    have = observe()
    left = plan(have)
    if left:
        raise NotConverged(
            f"{name}: done, but still to do: {'; '.join(map(str, left))}",
            node=node,
            details=f"done: {detail}",
            remedy="Something on the node undoes it, or it did not take effect; see its logs.",
        )
    return Outcome(step=name, node=node, status="changed", detail=detail, data=data(have))


@dataclass(frozen=True)
class Ready:
    """What we waited for is there."""

    value: Any = None


@dataclass(frozen=True)
class Waiting:
    """Not yet; `progress` changes whenever there was some."""

    why: str
    progress: object = None


@dataclass(frozen=True)
class Gone:
    """It can never come: the wait ends at once; another node than the one we asked may be why."""

    why: str
    details: str = ""
    remedy: str = ""
    node: str = ""
    retryable: bool = False


def gone(what: str, node: str, answer: Gone) -> NotReady:
    """The error for what can never come."""
    error = NotReady(
        f"{what}: {answer.why}",
        node=answer.node or node,
        details=answer.details,
        remedy=answer.remedy,
    )
    error.retryable = answer.retryable
    return error


@contextlib.contextmanager
def ended_at_once(
    what: str, node: str, probe: Callable[[], Ready | Waiting | Gone]
) -> Iterator[None]:
    """Around a converge that starts something: when it has ended already, the probe tells why."""
    try:
        yield
    except NotConverged:
        answer = probe()
        if isinstance(answer, Gone):
            raise gone(what, node, answer) from None
        raise


def wait_until(
    what: str,
    node: str,
    probe: Callable[[], Ready | Waiting | Gone],
    *,
    timeout: float,
    stall: float | None = None,
    every: float = 0.5,
    details: Callable[[], str] = lambda: "",
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] = remote.STOP.wait,
) -> Any:
    """Ask until ready; ends at once when gone, after `timeout`, or `stall` s without progress."""
    started = moved = reported = clock()
    progress: object = None
    while True:
        answer = probe()
        now = clock()
        if isinstance(answer, Ready):
            return answer.value
        if isinstance(answer, Gone):
            raise gone(what, node, answer)
        if answer.progress != progress:
            progress, moved = answer.progress, now
        late = now - started > timeout
        if late or (stall is not None and now - moved > stall):
            limit = f"{timeout:.0f} s" if late else f"{stall:.0f} s without progress"
            raise NotReady(
                f"{what}: not ready after {limit}: {answer.why}", node=node, details=details()
            )
        if now - reported > 30:
            reported = now
            log.info("%s on %s: %s (%.0f s)", what, node, answer.why, now - started)
        pause(every)
        if remote.STOP.is_set():
            raise Cancelled(f"cancelled while waiting for {what}", node=node)
