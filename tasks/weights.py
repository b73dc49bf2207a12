"""The model's files: whole on the head, and the same on every worker, sent over the fabric."""

import re
import time
from functools import partial

from blocks import Cluster, Node
from tasks.converge import Outcome, Run, converge, step
from tasks.errors import CommandFailed, SparkrailError
from tasks.manifests import SHOWN, Manifest, Send, extra_weights, listed, plan, problems
from tasks.page_caches import release_page_cache
from tasks.programs import run_program
from tasks.remote import connect
from tasks.transfers import Progress, log_progress, rate
from tasks.weight_streams import disk_full, ownership, rsync_command, rsync_failed

STEP = "weights sync"
READ_TIMEOUT = 4 * 3600.0
GLANCE_TIMEOUT = 30.0
SLOWEST = 5_000_000  # Bytes a second; a link that is slower than this is broken.
PROGRESS = re.compile(r"([\d,]+) +\d+% ")
ANY_EXIT = range(256)


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
    return cluster.model.path, f"~/.sparkrail/{cluster.name}/weights.json"


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
    sender = _Sender(cluster, node, run, want)
    outcome = converge(
        STEP,
        node.name,
        sender.observe,
        partial(plan, want),
        sender.send,
        dry_run=run.dry_run,
        data=lambda have: extra_weights(want, have),
    )
    extra = [f"only here: {listed(outcome.data)}"] if outcome.data else []
    detail = "; ".join([sender.sent or outcome.detail, *extra]).removeprefix("; ")
    return outcome.model_copy(update={"detail": detail, "data": facts})


class _Sender:
    """Brings one worker what it lacks."""

    def __init__(self, cluster: Cluster, worker: Node, run: Run, want: Manifest) -> None:
        self.cluster = cluster
        self.worker = worker
        self.run = run
        self.want = want
        self.sent = ""

    def observe(self) -> Manifest:
        have = observe(self.cluster, self.worker, self.run)
        if have.folder not in ("", "does not exist"):
            raise CommandFailed(
                f"{self.cluster.model.path} {have.folder}",
                node=self.worker.name,
                remedy=ownership(self.worker, self.cluster.model.path),
            )
        return have

    def send(self, what: Send) -> None:
        began = time.monotonic()
        self._make_folder()
        with Progress(STEP, self.cluster, self.worker, what.size) as progress:
            result = connect(self.cluster, self.cluster.head).run(
                rsync_command(self.cluster, self.worker),
                stdin="".join(f"{path}\0" for path in what.paths).encode(),
                timeout=900 + what.size / SLOWEST,
                ok=ANY_EXIT,
                on_output=partial(_tell, progress),
            )
            if result.code != 0:
                raise rsync_failed(self.cluster, self.worker, result)
            progress.finished(what.size)
        self._refuse_changed_source()
        for node in (self.cluster.head, self.worker):
            release_page_cache(self.cluster, node)
        self.sent = (
            f"sent {len(what.paths)} of {what.of} files, "
            f"{rate(what.size, time.monotonic() - began)}: {listed(what.paths, 3)}"
        )

    def _make_folder(self) -> None:
        path = self.cluster.model.path
        made = connect(self.cluster, self.worker).run(("mkdir", "-p", "--", path), ok=(0, 1))
        if made.code != 0:
            full = disk_full(made.stderr, self.worker, path)
            why, remedy = full or ("not allowed", ownership(self.worker, path))
            raise CommandFailed(
                f"cannot make {path}: {why}",
                node=self.worker.name,
                details=made.stderr.strip(),
                remedy=remedy,
            )

    def _refuse_changed_source(self) -> None:
        now = observe(self.cluster, self.cluster.head, self.run)
        changed = sorted({path for step in plan(self.want, now) for path in step.paths})
        if changed:
            raise SparkrailError(
                f"the model changed while it was sent to {self.worker.name}: {listed(changed)}",
                node=self.cluster.head.name,
                remedy="Wait until nothing writes there any more, then run again.",
            )


def _tell(progress: Progress, said: str) -> None:
    """What rsync says of its progress."""
    found = PROGRESS.findall(said)
    if found:
        progress.told(int(found[-1].replace(",", "")))
