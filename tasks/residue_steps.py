"""What is done about residue on a node: the steps, which ones are due, and how each is done."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import docker
from docker.errors import NotFound

from blocks import Cluster, Node
from tasks.containers import NEVER
from tasks.engines import engine
from tasks.errors import CommandFailed
from tasks.gpu_holders import Holders
from tasks.gpu_looks import Process
from tasks.owners import Held, is_ours
from tasks.programs import run_program
from tasks.remote import Remote
from tasks.residue_policy import Room, Verdict, family, verdict

UNIT_SECONDS = 120
SUDO = ("sudo", "-n", "--")
DROP = "sync; echo 1 >/proc/sys/vm/drop_caches"


@dataclass(frozen=True)
class Stop:
    """Stop an owner, not only the process that holds the memory."""

    held: Held
    processes: tuple[Process, ...] = ()

    def __str__(self) -> str:
        verb = "end" if self.held.owner.kind in ("process", "session") else "stop"
        return f"{verb} {self.held}"


@dataclass(frozen=True)
class Reap:
    """End what outlived a container of ours."""

    processes: tuple[Process, ...]

    def __str__(self) -> str:
        return f"end what outlived our container: {', '.join(map(str, self.processes))}"


@dataclass(frozen=True)
class RemoveShm:
    """Take away shared memory that a container of ours left on the node."""

    paths: tuple[str, ...]

    def __str__(self) -> str:
        return f"remove orphaned shared memory of ours: {', '.join(self.paths)}"


@dataclass(frozen=True)
class DropCaches:
    """Drop all of the node's page cache."""

    mib: int

    def __str__(self) -> str:
        return f"drop the page cache, of which {self.mib} MiB stand in the way"


Step = Stop | Reap | RemoveShm | DropCaches


@dataclass(frozen=True)
class Have:
    """A node as it is, before and after."""

    holders: Holders
    room: Room | None
    outlived: tuple[Process, ...] = ()
    shm: tuple[str, ...] = ()


def judge(cluster: Cluster, have: Have) -> list[tuple[Held, Verdict]]:
    """Every owner that is none of ours, and what becomes of it."""
    enough = have.room is not None and have.room.enough
    outlived = {process.pid for process in have.outlived}
    judged = []
    for held in have.holders.held:
        if is_ours(cluster, held.owner) or outlived >= {row.pid for row in held.rows}:
            continue
        found = verdict(cluster, have.holders.look, held)
        if found.stop and enough:
            found = Verdict(False, f"there is memory enough: {have.room}")
        judged.append((held, found))
    return judged


def plan(cluster: Cluster, have: Have) -> list[Step]:
    """What outlived us goes in any case; others by policy, where there is too little memory."""
    look = have.holders.look
    steps: list[Step] = [Reap(have.outlived)] if have.outlived else []
    for held, found in judge(cluster, have):
        if found.stop:
            bare = held.owner.kind in ("process", "session")
            steps.append(Stop(held, family(cluster, look, held) if bare else ()))
    if have.shm:
        steps.append(RemoveShm(have.shm))
    if cluster.residue.drop_caches and have.room and have.room.cached:
        steps.append(DropCaches(have.room.cached))
    return steps


class Actor:
    """Does the steps on one node; what each one said stays for the evidence."""

    def __init__(self, cluster: Cluster, node: Node, remote: Remote, record: str) -> None:
        self.cluster = cluster
        self.node = node
        self.remote = remote
        self.record = record
        self.uid = 0
        self.user = ""

    def do(self, step: Step) -> str:
        """What it said."""
        if isinstance(step, Reap):
            return self._end(step.processes)
        if isinstance(step, RemoveShm):
            run_program(self.remote, "outliving", "remove", self.record, timeout=60)
            return "removed"
        if isinstance(step, DropCaches):
            return self._drop()
        kind = step.held.owner.kind
        if kind == "container":
            return self._stop_container(step.held)
        if kind == "unit":
            return self._systemctl("stop", step.held.owner.name)
        return self._end(step.processes)

    def restart(self, stopped: Mapping[str, Any]) -> None:
        """Start again what `do` stopped."""
        if stopped["kind"] == "unit":
            self._systemctl("start", stopped["name"])
            return
        with engine(self.cluster, self.node) as client:
            try:
                found = client.containers.get(stopped["id"])
            except NotFound:
                raise CommandFailed(
                    f"container {stopped['name']} is gone, and cannot be started again",
                    node=self.node.name,
                ) from None
            found.start()
            policy: Any = dict(stopped["restart"]) or NEVER
            found.update(restart_policy=policy)

    def _stop_container(self, held: Held) -> str:
        docked = held.owner.docked
        assert docked is not None, "only what docker knows is stopped"
        grace = self.cluster.residue.grace_seconds
        with engine(self.cluster, self.node) as client:
            try:
                found = client.containers.get(docked.container.id)
                if not docked.removed_at_end:
                    # Else it comes back: docker counts a stop from outside as no crash, but a
                    # restart of its engine starts it anew.
                    found.update(restart_policy=NEVER)
                found.stop(timeout=grace)
                if docked.removed_at_end:
                    return "stopped, and removed, as it was made with --rm"
                return _ending(client, docked.container.id)
            except NotFound:
                return "gone already"

    def _systemctl(self, verb: str, unit: str) -> str:
        argv = (*self._sudo(), "systemctl", "--no-ask-password", verb, "--", unit)
        try:
            self.remote.run(argv, timeout=UNIT_SECONDS)
        except CommandFailed as error:
            raise self._refused(f"cannot {verb} unit {unit}", error) from error
        return "stopped" if verb == "stop" else "started"

    def _end(self, processes: Sequence[Process]) -> str:
        grace = self.cluster.residue.grace_seconds
        chosen = [
            {"pid": each.pid, "started": each.started, "command": each.command}
            for each in processes
        ]
        foreign = any(each.user != self.user for each in processes)
        try:
            said = run_program(
                self.remote,
                "end_processes",
                json.dumps({"processes": chosen, "grace": grace}),
                timeout=grace + 30,
                prefix=self._sudo() if foreign else (),
            )
        except CommandFailed as error:
            raise self._refused("cannot end processes", error) from error
        if any(each["said"] == "not allowed" for each in said):
            pids = ", ".join(str(each["pid"]) for each in said if each["said"] == "not allowed")
            raise self._refused(f"not allowed to end pid {pids}", None)
        told = dict.fromkeys(str(each["said"]) for each in said)
        return "; ".join(told)

    def _drop(self) -> str:
        try:
            self.remote.run((*self._sudo(), "sh", "-c", DROP), timeout=UNIT_SECONDS)
        except CommandFailed as error:
            raise self._refused("cannot drop the page cache", error) from error
        return "dropped"

    def _sudo(self) -> tuple[str, ...]:
        return SUDO if self.cluster.residue.sudo and self.uid != 0 else ()

    def _refused(self, what: str, error: CommandFailed | None) -> CommandFailed:
        if self.uid == 0:
            remedy = ""
        elif self.cluster.residue.sudo:
            remedy = f"Let {self.user} use sudo without a password there: `sudo -n true` must work."
        else:
            remedy = f"{self.user} is not root there: set residue.sudo, or end it yourself."
        details = error.details or error.brief if error else ""
        return CommandFailed(what, node=self.node.name, details=details, remedy=remedy)


def _ending(client: docker.DockerClient, id: str) -> str:
    state = client.containers.get(id).attrs["State"]
    if state["Running"]:
        client.api.kill(id)
        return "killed"
    # What `docker stop` does when its grace is over.
    return "killed when its grace was over" if state["ExitCode"] == 137 else "stopped"


def restartable(step: Stop) -> dict[str, Any] | None:
    """What must be known to start it again; a bare process cannot be."""
    owner = step.held.owner
    if owner.kind == "unit":
        return {"kind": "unit", "name": owner.name}
    if owner.docked is None or owner.docked.removed_at_end:
        return None
    return {
        "kind": "container",
        "name": owner.name,
        "id": owner.docked.container.id,
        "restart": dict(owner.docked.restart),
    }
