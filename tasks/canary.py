"""The canary: whether a server that was just started is as fast as the last good release's, and
still answers a while later with every rank alive."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from blocks import Canary, Cluster, Node
from tasks import endpoint, remote
from tasks.converge import Outcome, Run, log, step
from tasks.endpoint import Ask
from tasks.errors import Cancelled, NotReady
from tasks.preflight import Problem
from tasks.ray_nodes import membership_problems, observe_ray
from tasks.records import Figures
from tasks.releases import Wanted, compare, observe_containers
from tasks.secret_values import api_key
from tasks.topology import ContainerSpec

NAME = "canary"
BUSY = "works for others, and is too busy to be measured"
LOOKS_MORE = 2  # A machine that did something else at the time gets another chance.
SLOWEST = 1.0  # Seconds for each token of the longer completion; a slower server hangs.
NOTICED = 0.2  # Seconds: what is slower by less than this is noise, whatever its percentage.


def measure(ask: Ask, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> Figures:
    """A short completion and a longer one."""
    short = endpoint.complete(ask, cluster.model.name, clock=clock)
    tokens = cluster.canary.tokens
    patience = max(60.0, SLOWEST * tokens)
    long = endpoint.complete(ask, cluster.model.name, tokens=tokens, timeout=patience, clock=clock)
    for answer in (short, long):
        if not answer.tokens:
            raise NotReady(f"{NAME}: a completion came back without tokens")
    return Figures(seconds=short.seconds, tokens_per_second=long.tokens / max(long.seconds, 1e-6))


def best(figures: Sequence[Figures]) -> Figures:
    return Figures(
        seconds=min(each.seconds for each in figures),
        tokens_per_second=max(each.tokens_per_second for each in figures),
    )


def regressions(canary: Canary, now: Figures, last: Figures | None) -> list[str]:
    """By what the server is slower than it may be; nothing where there is no release before it."""
    if last is None:
        return []
    share = canary.slower_percent / 100
    before, after = (canary.tokens / each.tokens_per_second for each in (last, now))
    found = []
    if now.seconds - last.seconds > max(NOTICED, share * last.seconds):
        found.append(
            f"a short completion takes {now.seconds:.2f} s, with the last good release "
            f"{last.seconds:.2f} s"
        )
    slow = now.tokens_per_second * (1 + share) < last.tokens_per_second
    if slow and after - before > NOTICED:
        found.append(
            f"{now.tokens_per_second:.1f} tokens/s, with the last good release "
            f"{last.tokens_per_second:.1f}"
        )
    return found


@step(NAME)
def watch_canary(
    cluster: Cluster,
    node: Node,
    run: Run,
    wanted: Mapping[str, tuple[ContainerSpec, ...]],
    last: Figures | None,
) -> Outcome:
    """Two completions some time apart, every rank alive, and nothing much slower than before."""
    if run.dry_run:
        return Outcome(step=NAME, node=node.name, status="planned")
    ask = endpoint.asker(cluster, api_key(cluster))
    look = partial(measure, ask, cluster)
    looks = [answered(look, ask, node, "the first completions")]
    if remote.STOP.wait(cluster.canary.again_seconds):
        raise Cancelled(f"cancelled while waiting for {NAME}", node=node.name)
    looks.append(answered(look, ask, node, "a while later"))
    refuse_lost(cluster, node, run, Wanted(nodes=wanted))
    while (slow := slower(cluster.canary, looks, last)) and len(looks) < 2 + LOOKS_MORE:
        looks.append(answered(look, ask, node, "measured again"))
    problems = [_slower(cluster, node, why) for why in slow]
    now = best([each for each in looks if each]) if any(looks) else None
    told = f"{now.seconds:.2f} s, {now.tokens_per_second:.1f} tokens/s" if now else BUSY
    data = {"figures": now, "problems": problems}
    detail = f"{told}, every rank alive"
    return Outcome(step=NAME, node=node.name, status="unchanged", detail=detail, data=data)


def slower(canary: Canary, looks: Sequence[Figures | None], last: Figures | None) -> list[str]:
    """By what all looks are slower than it may be; one at a busy server tells nothing of that."""
    measured = [each for each in looks if each]
    return regressions(canary, best(measured), last) if measured else []


def answered(look: Callable[[], Figures], ask: Ask, node: Node, when: str) -> Figures | None:
    """What was measured, or nothing where it works for others so much that we were not served.

    A server that stopped answering is an error that says when.
    """
    before = endpoint.completed_tokens(ask)
    try:
        return look()
    except endpoint.Silent as error:
        # As in `check_answers`: clients that come back at once are no failure of a release.
        if endpoint.running_requests(ask) and endpoint.completed_tokens(ask) > before:
            log.info("%s on %s: %s (%s)", NAME, node.name, BUSY, when)
            return None
        raise NotReady(
            f"{NAME}: the server does not answer ({when}): {error.brief}",
            node=node.name,
            details=error.details,
        ) from error


def refuse_lost(cluster: Cluster, node: Node, run: Run, wanted: Wanted) -> None:
    """Every container is the one that was started, and every node is in Ray."""
    reasons = compare(cluster, wanted, observe_containers(cluster), run).reasons
    problems = membership_problems(cluster, observe_ray(cluster, node, timeout=20))
    lost = [*reasons, *(f"{where}: {why}" for where, why in problems)]
    if lost:
        raise NotReady(f"{NAME}: {'; '.join(lost)}", node=node.name)


def _slower(cluster: Cluster, node: Node, why: str) -> Problem:
    limit = f"more than {cluster.canary.slower_percent} % (canary.slower_percent)"
    if cluster.canary.on_slower == "fail":
        raise NotReady(f"{NAME}: slower by {limit}: {why}", node=node.name)
    return Problem(
        node=node.name,
        check=NAME,
        verdict="slow",
        detail=f"slower by {limit}: {why}",
        remedy="See what else runs on the nodes; `sparkrail bench` measures again.",
    )
