"""One look at the running model, and what a row of looks that failed leads to."""

import time
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ValidationError

from blocks import Cluster, Node
from tasks import containers, endpoint
from tasks.containers import BOOT_LABEL, DIGEST_LABEL, Container
from tasks.converge import Outcome, Run, step
from tasks.endpoint import Ask
from tasks.engines import engine
from tasks.errors import CommandFailed, CommandTimedOut, NotReady
from tasks.ray_nodes import membership_problems, observe_ray
from tasks.records import Release, read_state, write_state
from tasks.remote import connect
from tasks.secret_values import api_key

STATE = "watch.json"
NODE = """\
cat /proc/sys/kernel/random/boot_id
sed -n 's/^MemAvailable: *\\([0-9]*\\) kB$/\\1/p' /proc/meminfo"""
# A run beats its lock every few seconds; an owner that has not for so long is left over.
LOCKED = 'find "$HOME/.sparkrail/$1/lock/owner.json" -newermt "-60 seconds" 2>/dev/null || true'
Action = Literal["none", "wait", "restart", "give up"]


class Watched(BaseModel, frozen=True):
    """What the looks so far have seen, kept on the head."""

    failures: int = 0  # In a row.
    restarted: bool = False  # Since it was last well.
    gave_up: bool = False
    tokens: int | None = None  # Made so far, when requests were last seen to run.


class Look(BaseModel, frozen=True):
    """What one look saw."""

    problems: tuple[str, ...] = ()
    busy: bool = False  # Requests run, and tokens come out.
    tokens: int | None = None


def judge(before: Watched, look: Look, failures: int) -> tuple[Watched, Action]:
    """What follows from a look: a server that works for somebody is never restarted."""
    seen = before.model_copy(update={"tokens": look.tokens})
    if not look.problems:
        return Watched(tokens=look.tokens), "none"
    if look.busy:
        return seen, "none"
    seen = seen.model_copy(update={"failures": before.failures + 1})
    if seen.failures < failures or before.gave_up:
        return seen, "wait"
    if before.restarted:
        return seen.model_copy(update={"gave_up": True}), "give up"
    return seen.model_copy(update={"restarted": True, "failures": 0}), "restart"


def parse_watched(text: str) -> Watched:
    """The state as it stands on the head; one that cannot be read begins anew."""
    try:
        return Watched.model_validate_json(text) if text.strip() else Watched()
    except ValidationError:
        return Watched()


def container_problems(
    release: Release, node: str, have: Mapping[str, Container], boot: str
) -> tuple[str, ...]:
    """Containers of the release that do not run on a node, or not since this boot.

    The record may tell an older boot: a release that was brought back was started since.
    """
    found = []
    for spec in release.containers.get(node, ()):
        container = have.get(spec.name)
        if container is None:
            found.append(f"{spec.name} on {node} is gone")
        elif not container.running:
            found.append(f"{spec.name} on {node} is {container.state}")
        elif container.label(DIGEST_LABEL) != spec.digest:
            found.append(f"{spec.name} on {node} is another than the recorded one")
    boots = {each.label(BOOT_LABEL) for each in have.values()} - {""}
    if boots - {boot}:
        found.append(f"{node} was rebooted")
    return tuple(found)


@step("look")
def look_at_node(cluster: Cluster, node: Node, run: Run, release: Release) -> Outcome:  # noqa: ARG001 - as every step
    """Fresh evidence from one node: its containers, and that it is the one that was started on."""
    names = tuple(spec.name for spec in release.containers.get(node.name, ()))
    with engine(cluster, node) as client:
        have = containers.observe(client, names)
    said = connect(cluster, node).run(("sh", "-c", NODE), timeout=20).stdout.split()
    problems = list(container_problems(release, node.name, have, said[0]))
    since = [f"{each.name} since {_local(each.created)}" for each in have.values()]
    told = [*(problems or since), f"{int(said[1]) // 1024} MiB available"]
    return Outcome(
        step="look", node=node.name, status="unchanged", detail="; ".join(told), data=problems
    )


@step("watch")
def look_at_server(cluster: Cluster, node: Node, run: Run) -> Outcome:  # noqa: ARG001 - as every step
    """Ray's nodes, the server's counters and, when it is idle, a tiny completion."""
    before = parse_watched(read_state(cluster, STATE))
    problems = list(_ray_problems(cluster, node))
    look = ask_server(
        endpoint.asker(cluster, api_key(cluster)), cluster.model.name, before.tokens, problems
    )
    told = "; ".join(look.problems) or ("it is busy" if look.busy else "it answers")
    return Outcome(
        step="watch", node=node.name, status="unchanged", detail=told, data=(before, look)
    )


def ask_server(ask: Ask, model: str, tokens: int | None, problems: Sequence[str]) -> Look:
    """Counters first: a busy server is asked for nothing."""
    found = list(problems)
    if endpoint.running_requests(ask):
        now = endpoint.completed_tokens(ask)
        if now == tokens:
            found.append("requests run, but no token has come out since the last look")
        return Look(problems=tuple(found), busy=now != tokens, tokens=now)
    try:
        endpoint.check_answers(ask, model, timeout=30)
    except endpoint.Silent as error:
        found.append(f"the server does not answer: {error.brief}")
    return Look(problems=tuple(found))


def _ray_problems(cluster: Cluster, node: Node) -> list[str]:
    try:
        members = observe_ray(cluster, node, timeout=10)
    except (NotReady, CommandFailed, CommandTimedOut) as error:
        return [f"Ray does not answer: {error.brief}"]
    return [why for _, why in membership_problems(cluster, members)]


def keep(cluster: Cluster, watched: Watched) -> None:
    """Write the state down before anything is done about it."""
    write_state(cluster, STATE, watched.model_dump_json(indent=2) + "\n")


def is_worked_on(cluster: Cluster) -> bool:
    """Whether another run holds the lock; we take none, since a deploy must not wait for us."""
    argv = ("sh", "-c", LOCKED, "sh", cluster.name)
    return bool(connect(cluster, cluster.head).run(argv).stdout.strip())


def _local(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
