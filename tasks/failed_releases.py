"""The circuit breaker: a release that failed is not tried again by itself."""

from typing import Literal

from pydantic import BaseModel, ValidationError

from blocks import Cluster, Node
from tasks import hidden
from tasks.converge import Outcome, Run, step
from tasks.engines import engine
from tasks.errors import FailedBefore
from tasks.held_images import content_of
from tasks.images import tagged
from tasks.records import now, read_state, write_state
from tasks.remote import connect
from tasks.replaced_images import failed as failed_images
from tasks.replaced_images import keep, remove_unused

Ending = Literal["rolled-back", "broken", "by-hand"]
NAME = "failed.json"
KEPT = 10
# How often a release may fail before a person, too, must say so to have it tried again: what made
# it fail may have been mended since, but two failures are no accident.
TRIES = 2
ENDINGS = {
    "rolled-back": "it was rolled back",
    "broken": "its rollback failed too, and everything was stopped",
    "by-hand": "it was rolled back by hand",
}
REMOVE = 'rm -f -- "$HOME/.sparkrail/$1/$2"'


class FailedRelease(BaseModel, frozen=True):
    """A release that was started and did not work, and what became of it."""

    digest: str
    ending: Ending
    run: str
    at: str
    cause: str = ""
    second: str = ""  # Why the rollback failed.
    times: int = 1

    @property
    def told(self) -> str:
        often = f"it failed {self.times} times; " if self.times > 1 else ""
        return f"{often}{ENDINGS[self.ending]} at {self.at} by run {self.run}"

    @property
    def is_tried_once_more(self) -> bool:
        """Whether a person need not insist to have it tried again."""
        return self.ending != "by-hand" and self.times < TRIES


class Failed(BaseModel, frozen=True):
    """Those that failed since the last deploy that was fine, newest first."""

    releases: tuple[FailedRelease, ...] = ()

    def of(self, digest: str) -> FailedRelease | None:
        return next((each for each in self.releases if each.digest == digest), None)

    @property
    def is_broken(self) -> bool:
        """Whether nothing of ours runs, because the last rollback failed."""
        return bool(self.releases) and self.releases[0].ending == "broken"

    def noted(self, failed: FailedRelease) -> "Failed":
        """With one more; what was stopped before is either in it, or was started since."""
        before = self.of(failed.digest)
        if before:
            failed = failed.model_copy(update={"times": before.times + 1})
        others = [each for each in self.releases if each.digest != failed.digest]
        return Failed(releases=(failed, *others)[:KEPT])

    def rolled_back_to(self, digest: str) -> "Failed":
        """Something runs again, so that nothing is broken; and what runs counts as failed no more,
        though the others stay untried."""
        left = [each for each in self.releases if each.digest != digest]
        if left and left[0].ending == "broken":
            left[0] = left[0].model_copy(update={"ending": "by-hand"})
        return Failed(releases=tuple(left))


def parse_failed(text: str) -> Failed:
    """What the head has on record; a file that cannot be read keeps nobody from trying."""
    try:
        return Failed.model_validate_json(text) if text.strip() else Failed()
    except ValidationError:
        return Failed()


def read_failed(cluster: Cluster) -> Failed:
    """The releases that failed, as the head remembers them."""
    return parse_failed(read_state(cluster, NAME))


def refusal(before: Failed, digest: str, run: Run) -> FailedBefore | None:
    """The error for a release that failed before, unless somebody wants it tried again.

    A schedule or the watch never tries it again; a person's deploy does, once. Neither undoes
    what was rolled back by hand.
    """
    failed = before.of(digest)
    if failed is None or run.force:
        return None
    if run.attended and failed.is_tried_once_more:
        return None
    said = [f"It failed by: {failed.cause}"] if failed.cause else []
    said += [f"The rollback failed by: {failed.second}"] if failed.second else []
    error = FailedBefore(
        f"release {digest} is not tried again: {failed.told}",
        details="\n".join(said),
        remedy="Nothing was touched. Change the spec, the image or the model; or, when the cause "
        f"is mended, deploy {'yourself' if failed.is_tried_once_more else 'with --force'}.",
    )
    error.heals = not before.is_broken
    return error


@step("breaker")
def refuse_failed(cluster: Cluster, node: Node, run: Run, digest: str) -> Outcome:
    """The wanted release has not failed before, or a person has it tried again."""
    before = read_failed(cluster)
    error = refusal(before, digest, run)
    if error is not None:
        error.node = node.name
        raise error
    failed = before.of(digest)
    detail = f"tried again, although {failed.told}" if failed else ""
    open = bool(before.releases)
    return Outcome(step="breaker", node=node.name, status="unchanged", detail=detail, data=open)


@step("breaker")
def note_failure(
    cluster: Cluster, node: Node, run: Run, failed: FailedRelease, good_image: str = ""
) -> Outcome:
    """The head remembers a release that failed, until another one is fine.

    Its image, if it is not the good one (by content), gets a name of ours, too: the head's images
    are its owner's, and once they give the name to another nobody would remove it.
    """
    if run.dry_run:
        return Outcome(step="breaker", node=node.name, status="planned")
    detail = f"no night tries release {failed.digest} again until it changes, or by --force"
    write_failed(cluster, read_failed(cluster).noted(failed))
    if good_image:
        name = tagged(cluster.image.name)
        with engine(cluster, node) as client:
            if content_of(client, name) != good_image:
                # Of those that failed before it nobody needs any: they are not tried again.
                remove_unused(client, failed_images(cluster))
                keep(client, name, failed_images(cluster))
    return Outcome(step="breaker", node=node.name, status="changed", detail=detail)


def write_failed(cluster: Cluster, failed: Failed) -> None:
    text = hidden.shown(failed.model_dump_json(indent=2)) + "\n"
    write_state(cluster, NAME, text, 0o600)


@step("breaker")
def note_rolled_back(cluster: Cluster, node: Node, run: Run, digest: str) -> Outcome:
    """After a rollback by hand to a release: what failed stays untried, but that one."""
    before = read_failed(cluster)
    after = before.rolled_back_to(digest)
    if run.dry_run or after == before:
        return Outcome(step="breaker", node=node.name, status="unchanged")
    write_failed(cluster, after)
    told = "no longer broken" if before.is_broken else f"release {digest} counts no more as failed"
    return Outcome(step="breaker", node=node.name, status="changed", detail=told)


@step("breaker")
def close_breaker(cluster: Cluster, node: Node, run: Run) -> Outcome:  # noqa: ARG001 - as every step
    """After a deploy that is fine, no release counts as failed, and what it left is removed."""
    connect(cluster, node).run(("sh", "-c", REMOVE, "sh", cluster.name, NAME))
    with engine(cluster, node) as client:
        remove_unused(client, failed_images(cluster))
    return Outcome(step="breaker", node=node.name, status="changed", detail="closed")


def not_tried(cluster: Cluster) -> dict[str, list[dict[str, str]]]:
    """The releases that the breaker keeps from being tried, as a table of a report."""
    rows = [{"release": each.digest, "why": each.told} for each in read_failed(cluster).releases]
    return {"not tried again": rows} if rows else {}


def failure(digest: str, run: Run, ending: Ending, *causes: str) -> FailedRelease:
    cause, second, *_ = (*causes, "", "")
    return FailedRelease(
        digest=digest, ending=ending, run=run.id, at=now(), cause=cause, second=second
    )
