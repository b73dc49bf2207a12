"""Keeping the record: the rows on the head, and on every node what a release's containers read."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from blocks import Cluster, Node
from tasks import held_images
from tasks.converge import Outcome, Run, converge, step
from tasks.engines import engine
from tasks.records import Release, as_text, parse_releases, read_releases, renewed
from tasks.remote import connect

IMAGES_KEPT = 2  # The images of so many releases stay on the nodes.
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
    # As it will be read again: a text that holds a secret is written without it.
    rows = tuple(parse_releases(as_text(renewed(have.rows, release)).decode()))
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


def release_images(cluster: Cluster, contents: Sequence[str]) -> None:
    """On every node the images of these releases stay, and no others that only we hold."""

    def prune(node: Node) -> None:
        with engine(cluster, node) as client:
            held_images.prune(client, cluster, contents)

    with ThreadPoolExecutor(max_workers=8) as pool:
        list(pool.map(prune, cluster.nodes))
