"""GPU residue on a node: found by owner, stopped by policy, and the memory proven back."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from blocks import Cluster, Node
from tasks import artifacts
from tasks.converge import Outcome, Ready, Run, Waiting, converge, step, wait_until
from tasks.errors import NotReady
from tasks.gpu_holders import Holders, observe_holders
from tasks.gpu_looks import Process
from tasks.owners import container_of, is_ours
from tasks.page_caches import release_page_cache
from tasks.programs import run_program
from tasks.remote import Remote, connect
from tasks.residue_policy import room
from tasks.residue_proof import (
    Done,
    back,
    commands_of,
    evidence,
    left_alone,
    proof,
    still_short,
    waits_for,
)
from tasks.residue_steps import Actor, DropCaches, Have, Step, Stop, plan, restartable

NAME = "GPU residue cleanup"
RELEASE_SECONDS = 30.0
PROOF_SECONDS = 60.0
EVERY = 0.5
STOPPED = "stopped.json"
# Prints what an earlier cleanup stopped, and forgets it.
TAKE = 'cd -- "$HOME/.sparkrail/$1" 2>/dev/null && [ -e "$2" ] && cat -- "$2" && rm -- "$2" || true'


def record_of(cluster: Cluster) -> str:
    return f"~/.sparkrail/{cluster.name}/holders.json"


def remember(cluster: Cluster, node: Node, ids: Sequence[str]) -> None:
    """Before containers of ours are stopped: write down on the node what is in them."""
    remote = connect(cluster, node)
    run_program(remote, "outliving", "keep", record_of(cluster), *ids, timeout=60)


@step(NAME)
def clean_residue(cluster: Cluster, node: Node, run: Run) -> Outcome:
    """What outlived our release is gone; others are stopped or left, as the policy says."""
    cached = str(release_page_cache(cluster, node, dry_run=run.dry_run))
    cleanup = Cleanup(cluster, node, run, connect(cluster, node))
    try:
        outcome = converge(
            NAME,
            node.name,
            cleanup.observe,
            cleanup.plan,
            cleanup.act,
            dry_run=run.dry_run,
        )
    finally:
        if cleanup.done:
            artifacts.show_residue(cluster, node, cleanup.evidence())
    said = cleanup.told()
    if outcome.status == "planned":
        said = [outcome.detail, *left_alone(cluster, cleanup.before)]
    detail = "; ".join([*said, *([cached] if cached and not run.dry_run else [])])
    return outcome.model_copy(update={"detail": detail})


@dataclass
class Cleanup:
    """One node's cleanup: what was there before, what was done, and what there is now."""

    cluster: Cluster
    node: Node
    run: Run
    remote: Remote
    done: list[Done] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.actor = Actor(self.cluster, self.node, self.remote, record_of(self.cluster))
        self._before: Have | None = None
        self._after: Have | None = None
        self._acted = 0.0

    @property
    def before(self) -> Have:
        assert self._before is not None, "observed first"
        return self._before

    def observe(self) -> Have:
        """At first what there is; after acting, what there is once all is proven."""
        if self._before is None:
            self._before = self._at_rest()
            self.actor.uid = self._before.holders.look.uid
            self.actor.user = self._before.holders.look.user
            return self._before
        self._after = wait_until(
            NAME, self.node.name, self._probe, timeout=PROOF_SECONDS, every=EVERY
        )
        assert self._after is not None
        return self._after

    def plan(self, have: Have) -> list[Step]:
        steps = plan(self.cluster, have)
        # What cannot be dropped the first time cannot be dropped at all.
        return [each for each in steps if not (self._after and isinstance(each, DropCaches))]

    def act(self, what: Step) -> None:
        kept = restartable(what) if isinstance(what, Stop) else None
        if kept and self.cluster.residue.restore:
            self._write_down(kept)
        said = self.actor.do(what)
        self._acted = time.monotonic()
        if isinstance(what, Stop):
            self.done.append(Done(what, said))
        else:
            self.others.append(f"{what}: {said}")

    def _write_down(self, stopped: dict[str, Any]) -> None:
        """Before it is stopped, so that a run that dies leaves word of it on the node."""
        known = _take(self.cluster, self.remote)
        mine = known.get("stopped", []) if known.get("run") == self.run.id else []
        document = {"run": self.run.id, "stopped": [*mine, stopped]}
        path = f"{self.before.holders.look.home}/.sparkrail/{self.cluster.name}/{STOPPED}"
        self.remote.put(path, json.dumps(document).encode())

    def evidence(self) -> list[dict[str, str]]:
        return evidence(self.cluster, self.before, self._after, self.done, self.seconds)

    def told(self) -> list[str]:
        """What was done and left, for the report."""
        now = self._after or self.before
        said = [f"{each.stop}: {each.said}" for each in self.done]
        if self.done:
            said.append(f"{back(self.before, now, self.done)} after {self.seconds:.1f} s")
        return [*self.others, *said, *left_alone(self.cluster, now), *still_short(now.room)]

    def _at_rest(self) -> Have:
        """Once our own processes have let go; in a dry run they still run."""
        if self.run.dry_run:
            return self._look()
        last: list[Have] = []

        def probe() -> Ready | Waiting:
            last[:] = [self._look()]
            holders = last[0].holders
            ours = [held for held in holders.held if is_ours(self.cluster, held.owner)]
            return waits_for(self.cluster, holders, ours) or Ready()

        try:
            wait_until(NAME, self.node.name, probe, timeout=RELEASE_SECONDS, every=EVERY)
        except NotReady:
            # A row without a process that we can see may be one of another PID namespace.
            if any(is_ours(self.cluster, held.owner) for held in last[0].holders.held):
                raise
        return last[0]

    def _probe(self) -> Any:
        have = self._look(commands_of([each.stop for each in self.done]))
        seconds = time.monotonic() - self._acted
        answer = proof(self.before, have, self.done, seconds)
        gone = isinstance(answer, Ready) or answer.why == "it may be started again"
        if gone and not self.seconds:
            self.seconds = seconds
        return answer

    def _look(self, commands: Sequence[str] = ()) -> Have:
        record = record_of(self.cluster)
        left = run_program(self.remote, "outliving", "look", record, timeout=60)
        pids = [pid for pid, _ in left["processes"]]
        holders = observe_holders(self.cluster, self.node, self.remote, pids, commands)
        return Have(
            holders=holders,
            room=room(self.cluster, self.node, holders),
            outlived=outlived(holders, dict(left["processes"]), self.run.dry_run),
            shm=() if self.run.dry_run else tuple(left["shm"]),
        )


def outlived(
    holders: Holders, recorded: dict[int, int], still_running: bool = False
) -> tuple[Process, ...]:
    """What was in a container of ours that docker does not know any more."""
    if still_running or holders.docker_error:
        return ()
    look = holders.look
    found = []
    for process in look.processes:
        same = recorded.get(process.pid) == process.started and not process.ended
        if same and container_of(process, look.own_cgroup) not in holders.running:
            found.append(process)
    return tuple(found)


@step("restore")
def start_again(cluster: Cluster, node: Node, run: Run) -> Outcome:
    """What the cleanup stopped runs again, because the deploy that needed its memory failed."""
    remote = connect(cluster, node)
    actor = Actor(cluster, node, remote, record_of(cluster))
    actor.uid, actor.user = _who(remote)
    known = _take(cluster, remote)
    stopped = known.get("stopped", []) if known.get("run") == run.id else []
    for each in stopped:
        actor.restart(each)
    return Outcome(
        step="restore",
        node=node.name,
        status="changed" if stopped else "unchanged",
        detail="; ".join(f"started {each['kind']} {each['name']} again" for each in stopped),
    )


def _take(cluster: Cluster, remote: Remote) -> dict[str, Any]:
    text = remote.run(("sh", "-c", TAKE, "sh", cluster.name, STOPPED)).stdout
    return dict(json.loads(text)) if text.strip() else {}


def _who(remote: Remote) -> tuple[int, str]:
    uid, user = remote.run(("sh", "-c", "id -u; id -un")).stdout.split()
    return int(uid), user
