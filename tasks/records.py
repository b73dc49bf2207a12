"""The record of releases: what was deployed, kept on the head, newest first, and on every node the
files that its containers read."""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from blocks import Cluster, Node
from tasks import held_images, hidden
from tasks.converge import Outcome, Run, converge, step
from tasks.engines import engine
from tasks.remote import connect
from tasks.topology import ContainerSpec

KEPT = 5
IMAGES_KEPT = 2  # The images of so many releases stay on the nodes.
READ = 'cd -- "$HOME/.sparkrail/$1" 2>/dev/null && [ -e "$2" ] && cat -- "$2" || true'
# Prints whether the files of a release are kept, and what is kept that is not wanted any more.
LOOK = """\
cd -- "$HOME/.sparkrail/$1" 2>/dev/null || exit 0
shift
for kept in releases/*; do
    [ -d "$kept" ] || continue
    if [ "$kept" != "releases/$1" ]; then echo "$kept"
    elif diff -rq run "$kept" >/dev/null; then echo same
    fi
done"""
# Copied aside first: what stands under a release's name is whole.
KEEP = """\
umask 077
cd -- "$HOME/.sparkrail/$1"
mkdir -p releases
rm -rf releases/new.tmp "releases/$2"
cp -a run releases/new.tmp
mv releases/new.tmp "releases/$2\""""
DROP = 'cd -- "$HOME/.sparkrail/$1" && rm -rf -- "$2"'


class Figures(BaseModel, frozen=True):
    """What the canary measured of a release."""

    seconds: float  # Of a short completion.
    tokens_per_second: float


class OnNode(BaseModel, frozen=True):
    """What a release ran on, on one node; the variables are those that are no secrets."""

    interface: str = ""
    rdma: tuple[str, ...] = ()
    driver: str = ""
    boot_id: str = ""
    environment: Mapping[str, str] = {}


class Release(BaseModel, frozen=True):
    """What was deployed, when and by which run; no value in it is a secret."""

    digest: str
    at: str
    run: str
    image: str
    image_content: str
    weights: str
    script: str = ""
    arguments: tuple[str, ...] = ()
    versions: Mapping[str, str] = {}
    canary: Figures | None = None
    started: str = ""  # When its containers were last started, and what they found then:
    nodes: Mapping[str, OnNode] = {}
    spec_digest: str = ""
    spec: Mapping[str, Any] = {}
    containers: Mapping[str, tuple[ContainerSpec, ...]] = {}

    @property
    def title(self) -> str:
        return f"{self.digest} of {self.at}"

    @property
    def restorable(self) -> bool:
        """Whether it says enough to be started again; an older sparkrail's does not."""
        return bool(self.containers and self.spec)

    def cluster(self, now: Cluster) -> Cluster:
        """Its spec, with the nodes reached as they are reached now."""
        then = Cluster.model_validate(self.spec)
        known = {node.name: node for node in now.nodes}
        return then.model_copy(
            update={
                "ssh": now.ssh,
                "residue": now.residue,
                "canary": now.canary,
                "head": _reached(then.head, known),
                "workers": tuple(_reached(worker, known) for worker in then.workers),
            }
        )


def _reached(then: Any, known: Mapping[str, Node]) -> Any:
    now = known.get(then.name)
    names = ("address", "user", "port", "proxy_command", "transport")
    same = {name: getattr(now, name) for name in names if hasattr(now, name)} if now else {}
    return then.model_copy(update={name: same[name] for name in same if hasattr(then, name)})


def spec_digest(cluster: Cluster) -> str:
    """Of everything that the user wrote."""
    return hashlib.sha256(cluster.model_dump_json().encode()).hexdigest()[:16]


def parse_releases(text: str) -> list[Release]:
    """The record as it stands on the head, newest first; what cannot be read is left out."""
    try:
        found = json.loads(text) if text.strip() else []
    except ValueError:
        return []
    return list(_releases(found)) if isinstance(found, list) else []


def _releases(rows: Sequence[Any]) -> Iterator[Release]:
    for row in rows:
        try:
            yield Release.model_validate(row)
        except ValidationError:
            continue


def read_releases(cluster: Cluster) -> list[Release]:
    """The releases that the head has on record, newest first."""
    return parse_releases(read_state(cluster, "releases.json"))


def read_state(cluster: Cluster, name: str) -> str:
    """A file of the cluster's folder on the head; nothing where there is none."""
    argv = ("sh", "-c", READ, "sh", cluster.name, name)
    return connect(cluster, cluster.head).run(argv).stdout


def renewed(rows: Sequence[Release], release: Release) -> list[Release]:
    """The record with a release on top; one that is there already keeps when it was deployed."""
    if rows and rows[0].digest == release.digest:
        first = release.model_copy(update={"at": rows[0].at, "run": rows[0].run})
        if not release.started:  # It ran already, as it was recorded.
            first = rows[0]
        return [first, *rows[1:]]
    return [release, *(each for each in rows if each.digest != release.digest)][:KEPT]


@dataclass(frozen=True)
class Keep:
    """Copy what the containers of a node read, so that the release can be started again."""

    node: Node
    digest: str

    def __str__(self) -> str:
        return f"keep the files of {self.digest} on {self.node.name}"


@dataclass(frozen=True)
class Drop:
    """Take away the files of a release that is not on record any more."""

    node: Node
    folder: str

    def __str__(self) -> str:
        return f"drop {self.folder} on {self.node.name}"


@dataclass(frozen=True)
class Write:
    """Write the record."""

    rows: tuple[Release, ...]

    def __str__(self) -> str:
        return f"record {self.rows[0].digest}"


Step = Keep | Drop | Write


@dataclass(frozen=True)
class Have:
    """The record, and for each node whether it keeps the release, and which others."""

    rows: tuple[Release, ...]
    kept: Mapping[str, bool]
    others: Mapping[str, tuple[str, ...]]


def plan(cluster: Cluster, release: Release, have: Have) -> list[Step]:
    """The files first: what is on record can be restored."""
    rows = tuple(renewed(have.rows, release))
    wanted = {f"releases/{each.digest}" for each in rows}
    steps: list[Step] = [
        Keep(node, release.digest) for node in cluster.nodes if not have.kept[node.name]
    ]
    if rows != have.rows:
        steps.append(Write(rows))
    for node in cluster.nodes:
        steps += [Drop(node, each) for each in have.others[node.name] if each not in wanted]
    return steps


def observe(cluster: Cluster, digest: str) -> Have:
    def look(node: Node) -> list[str]:
        argv = ("sh", "-c", LOOK, "sh", cluster.name, digest)
        return connect(cluster, node).run(argv).stdout.splitlines()

    with ThreadPoolExecutor(max_workers=8) as pool:
        said = dict(
            zip((n.name for n in cluster.nodes), pool.map(look, cluster.nodes), strict=True)
        )
    return Have(
        rows=tuple(read_releases(cluster)),
        kept={name: "same" in lines for name, lines in said.items()},
        others={name: tuple(x for x in lines if x != "same") for name, lines in said.items()},
    )


@step("record")
def record_release(cluster: Cluster, node: Node, run: Run, home: str, release: Release) -> Outcome:
    """The head keeps what was deployed, the last five; the same release is recorded once."""
    folder = f"{home}/.sparkrail/{cluster.name}"

    def act(do: Step) -> None:
        if isinstance(do, Keep):
            argv = ("sh", "-ec", KEEP, "sh", cluster.name, do.digest)
            connect(cluster, do.node).run(argv)
        elif isinstance(do, Drop):
            connect(cluster, do.node).run(("sh", "-c", DROP, "sh", cluster.name, do.folder))
        else:
            connect(cluster, node).put(f"{folder}/releases.json", as_text(do.rows))

    before = observe(cluster, release.digest)
    known = before.rows[0].digest if before.rows and all(before.kept.values()) else ""
    looks = iter([before])
    outcome = converge(
        "record",
        node.name,
        lambda: next(looks, None) or observe(cluster, release.digest),
        lambda have: plan(cluster, release, have),
        act,
        dry_run=run.dry_run,
        data=lambda have: [each.image_content for each in have.rows],
    )
    if outcome.status == "changed":
        release_images(cluster, outcome.data[:IMAGES_KEPT])
    if outcome.status == "changed" and known == release.digest:
        # What was deployed is what was deployed before; only when it was started is new.
        return outcome.model_copy(update={"status": "unchanged", "detail": "started anew"})
    return outcome


def as_text(rows: Sequence[Release]) -> bytes:
    """For people and for `parse_releases`."""
    text = json.dumps([row.model_dump(mode="json") for row in rows], indent=2)
    return (hidden.shown(text) + "\n").encode()


def release_images(cluster: Cluster, contents: Sequence[str]) -> None:
    """On every node the images of these releases stay, and no others that only we hold."""

    def prune(node: Node) -> None:
        with engine(cluster, node) as client:
            held_images.prune(client, cluster, contents)

    with ThreadPoolExecutor(max_workers=8) as pool:
        list(pool.map(prune, cluster.nodes))


def now() -> str:
    """For the record: local time with its offset, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
