"""When a new release fails after the old one was stopped: back to the last good one, once."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from blocks import Cluster
from flows.failed_runs import Ending, Recovered, StepsFailed
from flows.steps import Steps, call, outcomes
from tasks import remote
from tasks.canary import watch_canary
from tasks.converge import Outcome, log
from tasks.errors import FailedBefore, NotReady, SparkrailError
from tasks.failed_releases import failure, note_failure
from tasks.ray_proof import verify_cluster
from tasks.ray_start import join_worker, start_head
from tasks.records import Release
from tasks.releases import Decision, Wanted, decide, observe_containers
from tasks.residue import clean_residue, start_again
from tasks.rollbacks import (
    ask_as,
    cannot_hold,
    clear,
    found,
    has_ray_of,
    hold_release,
    recorded,
    restore_files,
)
from tasks.serving import serve, stop_old
from tasks.topology import ContainerSpec, endpoint_of, ray_container

LOGS = "What the containers said last is in ~/.sparkrail/NAME/failed on each node."
# Whatever fails in one of these, Ray was proven by then.
ON_RAY = (serve.name, watch_canary.name)


@dataclass(frozen=True)
class Good:
    """A release that can be started again: its spec, and its containers by node."""

    release: Release
    cluster: Cluster
    containers: dict[str, tuple[ContainerSpec, ...]]


def last_good(steps: Steps) -> Good | None:
    """The newest release on record, held on its nodes; None where there is none to go back to."""
    rows: list[Release] = steps.one(recorded).data
    return whole(steps, rows[0]) if rows else None


def whole(steps: Steps, release: Release) -> Good | None:
    """A release, if all of its nodes have what it takes to start it again."""
    good, held = hold(steps, release)
    for why in [each.detail for each in held if each.data["why"]]:
        log.warning("there is no release to go back to: %s", why)
        return None
    return good


def hold(steps: Steps, release: Release) -> tuple[Good | None, list[Outcome]]:
    """A release with what its nodes say of it; it is good if none of them lacks anything."""
    if not release.restorable:
        return None, []
    cluster = release.cluster(steps.cluster)
    calls = [call(hold_release, node=node, release=release) for node in cluster.nodes]
    here = {node.name for node in steps.cluster.nodes}
    # A node that has left the spec, maybe because it is dead, must not stop a new release.
    told = [
        cannot_hold(release, each.node, result.brief)
        if isinstance(result, SparkrailError) and each.node not in here
        else result
        for each, result in zip(calls, steps.on(cluster).attempt(calls), strict=True)
    ]
    held = outcomes(calls, told)
    return Good(release, cluster, found(release, held)), held


@contextlib.contextmanager
def restored_on_failure(steps: Steps) -> Iterator[None]:
    """What was stopped for its memory runs again when that was in vain, if the spec says so."""
    try:
        yield
    except SparkrailError as error:
        rolled_back = isinstance(error, Recovered) and error.ending == "rolled-back"
        # A release of ours needs the memory; and a run that is cancelled, or has lost its lock, may
        # touch nothing any more.
        if steps.cluster.residue.restore and not rolled_back and may_act(steps):
            steps.attempt([call(start_again, node=node) for node in steps.cluster.nodes])
        raise


@contextlib.contextmanager
def rolled_back_on_failure(steps: Steps, good: Good | None, digest: str) -> Iterator[None]:
    """From the first stop on: whatever fails, the last good release answers in the end, or nothing
    of ours runs."""
    try:
        yield
    except Exception as error:  # A mistake of ours, too: the old release is down by now.
        if not may_act(steps):
            raise
        cause = as_steps_failed(steps, error)
        log.warning("%s: going back, since %s", steps.cluster.name, cause.brief.splitlines()[0])
        raise recover(steps, good, digest, cause) from error


@contextlib.contextmanager
def kept_alive_when_refused(steps: Steps) -> Iterator[None]:
    """A release that is not tried again does not keep the last good one from being healed."""
    try:
        yield
    except StepsFailed as refused:
        if isinstance(refused.first, FailedBefore) and refused.first.heals and may_act(steps):
            heal(steps, refused)
        raise


def heal(steps: Steps, refused: StepsFailed) -> None:
    """Start the last good release again where it has stopped; the run fails all the same."""
    # A restart that was asked for is one of the release that is refused.
    steps.run = steps.run.model_copy(update={"restart": "if-changed"})
    good = last_good(steps)
    if good is None:
        return
    ask_as(good.cluster, good.release)
    wanted = Wanted(nodes=good.containers)
    decision: Decision = steps.on(good.cluster).one(decide, wanted=wanted).data
    if decision.nothing_to_do:
        return
    log.warning("%s: %s", steps.cluster.name, "; ".join(decision.reasons))
    ray_stays = all(ray_container(steps.cluster) not in each for each in decision.start.values())
    with restored_on_failure(steps):
        try:
            clear_all(steps, good, ray_stays=ray_stays)
            bring_back(steps, good)
        except Exception as error:  # As in `rolled_back_on_failure`.
            told = f"Release {good.release.title} had stopped, and could not be started again."
            second = as_steps_failed(steps, error)
            if not may_act(steps):
                raise Recovered(refused, told, None, second) from error
            clear_all(steps, good)
            note(steps, good, good.release.digest, "broken", second)
            raise Recovered(refused, told, "broken", second) from error
        told = f"Release {good.release.title} had stopped, and was started again."
        raise Recovered(refused, told, "rolled-back", None)


def may_act(steps: Steps) -> bool:
    return not steps.run.dry_run and not remote.STOP.is_set()


def as_steps_failed(steps: Steps, error: Exception) -> StepsFailed:
    """Also for a mistake of ours between two steps: the old release is down all the same."""
    if isinstance(error, StepsFailed):
        return error
    return StepsFailed([("deploy", steps.cluster.head.name, error)])


def recover(steps: Steps, good: Good | None, digest: str, cause: StepsFailed) -> Recovered:
    """Bring the last good release back, once; what came of it is told with the cause."""
    ray_stays = good is not None and is_beyond_ray(cause) and keeps_ray(good)
    clear_all(steps, good, files=good is None, ray_stays=ray_stays)
    logs = LOGS.replace("NAME", steps.cluster.name)
    if good is None:
        told = f"There is no release to go back to: everything of this deploy was stopped. {logs}"
        if not has_record(steps):
            return Recovered(cause, told, None, None)
        # What answered before cannot be started again: no night may try this one over and over.
        note(steps, None, digest, "broken", cause)
        return Recovered(cause, told, "broken", None)
    try:
        bring_back(steps, good)
    except Exception as error:  # As in `rolled_back_on_failure`.
        second = as_steps_failed(steps, error)
        if not may_act(steps):
            return Recovered(cause, "The rollback was cut short.", None, second)
        clear_all(steps, good)
        told = (
            f"The rollback to release {good.release.title} failed, too: everything of ours is "
            f"stopped. {logs}"
        )
        note(steps, good, digest, "broken", cause, second)
        return Recovered(cause, told, "broken", second)
    if digest != good.release.digest:
        note(steps, good, digest, "rolled-back", cause)
    told = f"Rolled back: release {good.release.title} answers again. {logs}"
    return Recovered(cause, told, "rolled-back", None)


def has_record(steps: Steps) -> bool:
    """Whether a release of this cluster has answered before."""
    [told] = steps.attempt([call(recorded, node=steps.cluster.head)])
    return isinstance(told, Outcome) and bool(told.data)


def note(
    steps: Steps, good: Good | None, digest: str, ending: Ending, *causes: StepsFailed
) -> None:
    """For the runs to come; that it cannot be noted does not hide what happened."""
    failed = failure(digest, steps.run, ending, *(str(each)[:2000] for each in causes))
    told = call(
        note_failure,
        node=steps.cluster.head,
        failed=failed,
        good_image=good.release.image_content if good else "",
    )
    steps.attempt([told])


def is_beyond_ray(cause: StepsFailed) -> bool:
    """Whether Ray is not what failed."""
    return all(name in ON_RAY for name, _, _ in cause.failures)


def keeps_ray(good: Good) -> bool:
    """Whether the Ray that runs now on all of its nodes is just what a release had."""
    try:
        return has_ray_of(good.release, observe_containers(good.cluster))
    except SparkrailError as error:
        log.warning("%s: Ray is started anew, too, since %s", good.cluster.name, error.brief)
        return False


def clear_all(
    steps: Steps, good: Good | None, *, files: bool = False, ray_stays: bool = False
) -> None:
    """Stop what we can; a node that cannot be reached is a row in the report."""
    here = {node.name for node in steps.cluster.nodes}
    of_good = {node.name for node in good.cluster.nodes} if good and ray_stays else set[str]()
    ray = ray_container(steps.cluster)
    steps.attempt(
        [
            call(clear, node=node, files=files, keep=ray if node.name in of_good else "")
            for node in steps.cluster.nodes
        ]
    )
    others = [node for node in good.cluster.nodes if node.name not in here] if good else []
    if good and others:
        steps.on(good.cluster).attempt([call(clear, node=node) for node in others])


def bring_back(steps: Steps, good: Good) -> dict[str, str]:
    """Start a release on record, after what it does not need was cleared away; its versions."""
    old = steps.on(good.cluster)
    cluster = good.cluster
    old.all([call(restore_files, node=node, release=good.release) for node in cluster.nodes])
    versions = start_all(old, good.containers)
    steps.endpoint = endpoint_of(cluster)
    steps.answers()
    return versions


def start_all(steps: Steps, wanted: Mapping[str, tuple[ContainerSpec, ...]]) -> dict[str, str]:
    """Clean up, start Ray and the server; the versions that verification saw."""
    steps.all([call(clean_residue, node=node) for node in steps.cluster.nodes])
    versions = start_ray(steps, wanted)
    steps.one(serve, want=wanted[steps.cluster.head.name][1])
    return versions


def start_ray(
    steps: Steps, wanted: Mapping[str, tuple[ContainerSpec, ...]], *, again: bool = False
) -> dict[str, str]:
    """Start what is missing of Ray, and prove it; the versions that were seen.

    A raylet may run and belong to a head that is gone, or die any moment because of that: a Ray
    that ran before and does not stand the proof is started anew, once.
    """
    cluster, head = steps.cluster, steps.cluster.head
    started = [steps.one(start_head, want=wanted[head.name][0])]
    started += steps.all(
        [call(join_worker, node=each, want=wanted[each.name][0]) for each in cluster.workers]
    )
    try:
        return steps.one(verify_cluster).data or {}  # A dry run verifies nothing.
    except StepsFailed as error:
        ran_before = any(each.status == "unchanged" for each in started)
        may_help = isinstance(error.first, NotReady) and error.first.retryable
        if again or not ran_before or not may_help or not may_act(steps):
            raise
        log.warning("%s: all of Ray is started anew, since %s", cluster.name, error.brief)
    ray = ray_container(cluster)
    steps.all([call(stop_old, node=node, names=(ray,)) for node in cluster.nodes])
    return start_ray(steps, wanted, again=True)
