"""The model's files: whole on the head, and the same on every worker, sent over the fabric."""

import json
import time
from functools import partial

from blocks import Cluster, Node
from tasks.converge import Outcome, Run, converge, step
from tasks.errors import CommandFailed, SparkrailError
from tasks.manifests import SHOWN, Manifest, Remove, Send, extra_weights, listed, plan, problems
from tasks.programs import run_program
from tasks.remote import connect
from tasks.transfers import Progress, amount, log_progress, rate
from tasks.weight_faults import ownership, source_changed
from tasks.weight_rsync import send_by_rsync
from tasks.weight_streams import Arrived, state_file, transfer

STEP = "weights sync"
READ_TIMEOUT = 4 * 3600.0
GLANCE_TIMEOUT = 30.0
REMOVE_TIMEOUT = 120.0
AT_ONCE = 500  # Paths of files that are removed by one command.


def observe(cluster: Cluster, node: Node, run: Run) -> Manifest:
    """A node's model folder as it is; only files that changed since the last time are read."""
    said = run_program(
        connect(cluster, node),
        "manifest",
        *_folder_and_state(cluster),
        "look" if run.dry_run else "keep",
        timeout=READ_TIMEOUT,
        on_progress=lambda now: log_progress("reading weights", node, now["bytes"], now["of"]),
    )
    return Manifest.model_validate(said)


def glance(cluster: Cluster, node: Node) -> Manifest:
    """The same in a moment: sizes and faults of all files, sha256 only of those known already."""
    remote = connect(cluster, node)
    said = run_program(
        remote, "manifest", *_folder_and_state(cluster), "glance", timeout=GLANCE_TIMEOUT
    )
    return Manifest.model_validate(said)


def _folder_and_state(cluster: Cluster) -> tuple[str, str]:
    return cluster.model.path, state_file(cluster)


def complete(cluster: Cluster, manifest: Manifest) -> Manifest:
    """The head's manifest, or an error that names what is missing or damaged."""
    found = problems(manifest, own_tokenizer=brings_tokenizer(cluster))
    if found:
        more = f"\nand {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise SparkrailError(
            f"the model in {cluster.model.path} is not complete",
            node=cluster.head.name,
            details="\n".join(found[:SHOWN]) + more,
            remedy="Finish or repeat the download there, then run again. Nothing was sent.",
        )
    return manifest


def brings_tokenizer(cluster: Cluster) -> bool:
    """Whether the model's folder is where the tokenizer must be."""
    elsewhere = ("--tokenizer", "--skip-tokenizer-init")
    return not any(argument.split("=")[0] in elsewhere for argument in cluster.serve.arguments)


@step(STEP)
def ensure_weights(cluster: Cluster, node: Node, run: Run) -> Outcome:
    """The model is whole on the head; a worker has the same files, compared by their content."""
    want = complete(cluster, observe(cluster, cluster.head, run))
    facts = {"digest": want.digest, "bytes": want.size, "files": len(want.files)}
    if node.name == cluster.head.name:
        return Outcome(step=STEP, node=node.name, status="unchanged", data=facts)
    worker = _Worker(cluster, node, run, want)
    outcome = converge(
        STEP,
        node.name,
        worker.observe,
        partial(plan, want, removing=cluster.weights.remove_extra),
        worker.bring,
        dry_run=run.dry_run,
        data=lambda have: extra_weights(want, have),
    )
    extra = [f"only here: {listed(outcome.data)}"] if outcome.data else []
    done = worker.done or ([outcome.detail] if outcome.detail else [])
    return outcome.model_copy(update={"detail": "; ".join([*done, *extra]), "data": facts})


class _Worker:
    """Brings one worker what it lacks, and takes what it should not have."""

    def __init__(self, cluster: Cluster, worker: Node, run: Run, want: Manifest) -> None:
        self.cluster = cluster
        self.worker = worker
        self.run = run
        self.want = want
        self.done: list[str] = []

    def observe(self) -> Manifest:
        have = observe(self.cluster, self.worker, self.run)
        if have.folder not in ("", "does not exist"):
            raise CommandFailed(
                f"{self.cluster.model.path} {have.folder}",
                node=self.worker.name,
                remedy=ownership(self.worker, self.cluster.model.path),
            )
        return have

    def bring(self, what: Send | Remove) -> None:
        if isinstance(what, Remove):
            self._remove(what)
        else:
            self._send(what)

    def _send(self, what: Send) -> None:
        began = time.monotonic()
        with Progress(STEP, self.cluster, self.worker, what.size) as progress:
            if self.cluster.weights.transport == "rsync":
                send_by_rsync(self.cluster, self.worker, self.want, what, progress)
                arrived = Arrived(bytes=what.size, fetched=what.size)
            else:
                with transfer(self.cluster, self.want) as moving:
                    arrived = moving.fetch(self.worker, what, progress)
            progress.finished(what.size)
        self._refuse_changed_source()
        speed = rate(arrived.fetched, time.monotonic() - began)
        names = listed(what.paths, 3)
        self.done.append(f"sent {len(what.paths)} of {what.of} files, {speed}: {names}")
        self.done += remarks(arrived)

    def _refuse_changed_source(self) -> None:
        now = observe(self.cluster, self.cluster.head, self.run)
        steps = plan(self.want, now)
        if steps:
            raise source_changed(self.cluster, self.worker, listed(steps[0].paths))

    def _remove(self, what: Remove) -> None:
        remote = connect(self.cluster, self.worker)
        stay: dict[str, str] = {}
        for at in range(0, len(what.paths), AT_ONCE):
            paths = json.dumps(what.paths[at : at + AT_ONCE])
            said = run_program(
                remote, "remove_files", self.cluster.model.path, paths, timeout=REMOVE_TIMEOUT
            )
            stay |= said["stay"]
        if stay:
            raise CommandFailed(
                "files that the head does not have cannot be removed",
                node=self.worker.name,
                details="\n".join(f"{path}: {why}" for path, why in list(stay.items())[:SHOWN]),
                remedy="Remove them yourself, or set weights.remove_extra: false",
            )
        self.done.append(f"removed {len(what.paths)}: {listed(what.paths, 3)}")


def remarks(arrived: Arrived) -> list[str]:
    """What was not as it should be on the way."""
    earlier = arrived.bytes - arrived.fetched
    return [
        *([f"{amount(earlier)} were there from an interrupted transfer"] if earlier else []),
        *([f"{arrived.damaged} pieces arrived damaged, fetched again"] if arrived.damaged else []),
        *(f"went on without {why}" for why in arrived.without),
    ]
