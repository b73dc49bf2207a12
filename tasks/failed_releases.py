"""The circuit breaker: a release that failed is not tried again by itself."""

from typing import Literal

from pydantic import BaseModel, ValidationError

from blocks import Cluster, Node
from tasks import hidden
from tasks.converge import Outcome, Run, step
from tasks.errors import FailedBefore
from tasks.records import now, read_state
from tasks.remote import connect

Ending = Literal["rolled-back", "broken", "by-hand"]
NAME = "failed.json"
ENDINGS = {
    "rolled-back": "it was rolled back",
    "broken": "its rollback failed too, and everything was stopped",
    "by-hand": "it was rolled back by hand",
}
WRITE = 'umask 077; mkdir -p -- "$HOME/.sparkrail/$1" && cd -- "$HOME/.sparkrail/$1" && pwd'
REMOVE = 'rm -f -- "$HOME/.sparkrail/$1/$2"'


class FailedRelease(BaseModel, frozen=True):
    """A release that was started and did not work, and what became of it."""

    digest: str
    ending: Ending
    run: str
    at: str
    cause: str = ""
    second: str = ""  # Why the rollback failed.

    @property
    def told(self) -> str:
        return f"{ENDINGS[self.ending]} at {self.at} by run {self.run}"


def parse_failed(text: str) -> FailedRelease | None:
    """What the head has on record; a file that cannot be read keeps nobody from trying."""
    try:
        return FailedRelease.model_validate_json(text) if text.strip() else None
    except ValidationError:
        return None


def refusal(failed: FailedRelease | None, digest: str, run: Run) -> FailedBefore | None:
    """The error for a release that failed before, unless somebody wants it tried again."""
    if failed is None or failed.digest != digest or run.force:
        return None
    said = [f"It failed by: {failed.cause}"] if failed.cause else []
    said += [f"The rollback failed by: {failed.second}"] if failed.second else []
    error = FailedBefore(
        f"release {digest} is not tried again: {failed.told}",
        details="\n".join(said),
        remedy="Nothing was touched. Change the spec, the image or the model; or, when the cause "
        "is mended, deploy with --force.",
    )
    error.heals = failed.ending != "broken"
    return error


@step("breaker")
def refuse_failed(cluster: Cluster, node: Node, run: Run, digest: str) -> Outcome:
    """The wanted release has not failed before, or a person wants it tried again."""
    failed = parse_failed(read_state(cluster, NAME))
    error = refusal(failed, digest, run)
    if error is not None:
        error.node = node.name
        raise error
    forced = failed is not None and failed.digest == digest
    detail = f"tried again, although {failed.told}" if failed and forced else ""
    return Outcome(step="breaker", node=node.name, status="unchanged", detail=detail, data=failed)


@step("breaker")
def note_failure(cluster: Cluster, node: Node, run: Run, failed: FailedRelease) -> Outcome:
    """The head remembers a release that failed, until another one is fine."""
    if run.dry_run:
        return Outcome(step="breaker", node=node.name, status="planned")
    remote = connect(cluster, node)
    folder = remote.run(("sh", "-c", WRITE, "sh", cluster.name)).stdout.strip()
    text = hidden.shown(failed.model_dump_json(indent=2)) + "\n"
    remote.put(f"{folder}/{NAME}", text.encode(), 0o600)
    detail = f"release {failed.digest} is not tried again until it changes, or by --force"
    return Outcome(step="breaker", node=node.name, status="changed", detail=detail)


@step("breaker")
def close_breaker(cluster: Cluster, node: Node, run: Run) -> Outcome:  # noqa: ARG001 - as every step
    """After a deploy that is fine, no release counts as failed."""
    connect(cluster, node).run(("sh", "-c", REMOVE, "sh", cluster.name, NAME))
    return Outcome(step="breaker", node=node.name, status="changed", detail="closed")


def not_tried(cluster: Cluster) -> dict[str, list[dict[str, str]]]:
    """The release that the breaker keeps from being tried, as a table of a report."""
    failed = parse_failed(read_state(cluster, NAME))
    return {"not tried again": [{"release": failed.digest, "why": failed.told}]} if failed else {}


def failure(digest: str, run: Run, ending: Ending, *causes: str) -> FailedRelease:
    cause, second, *_ = (*causes, "", "")
    return FailedRelease(
        digest=digest, ending=ending, run=run.id, at=now(), cause=cause, second=second
    )
