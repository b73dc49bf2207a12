"""Going back to a release on record: that it can be done, and the steps that do it."""

from collections.abc import Mapping, Sequence
from functools import partial

import docker

from blocks import Cluster, Node
from tasks import containers, held_images, scripts
from tasks.containers import CLUSTER_LABEL, DIGEST_LABEL, Container, Remove, parse_container
from tasks.converge import Outcome, Run, converge, step
from tasks.engines import await_engine, engine
from tasks.errors import CommandFailed, NotReady
from tasks.records import Release, read_releases
from tasks.remote import connect
from tasks.residue import remember
from tasks.scripts import File
from tasks.secret_values import use_key
from tasks.topology import ContainerSpec, ray_container, serve_container

LOG_LINES = 5000
FOLDER = '"$HOME/.sparkrail/$1"'
# Each file beside its place first, then renamed over it; what the release had not is taken away.
RESTORE = f"""\
cd -- {FOLDER}
mkdir -p run
for name in launch node.env serve.args; do
    if [ -f "releases/$2/$name" ]; then
        cp -p "releases/$2/$name" "run/$name.tmp"
        mv "run/$name.tmp" "run/$name"
    else
        rm -f "run/$name"
    fi
done"""
KEY = '. "$1"; printf %s "${VLLM_API_KEY:-}"'
# Of a release that is kept; nothing where its variables are not.
KEY_OF = """\
cd -- "$HOME/.sparkrail/$1/releases/$2" 2>/dev/null && [ -f node.env ] || exit 0
. ./node.env
printf key=%s "${VLLM_API_KEY:-}\""""
HOME = 'printf %s "$HOME"'
BOOT = "cat /proc/sys/kernel/random/boot_id"
LOG_FOLDER = f"umask 077; mkdir -p {FOLDER}/failed && cd -- {FOLDER}/failed && pwd"
REMOVE_FILES = f"rm -rf -- {FOLDER}/run"


@step("releases")
def recorded(cluster: Cluster, node: Node, run: Run) -> Outcome:  # noqa: ARG001 - as every step
    """The releases on record, newest first."""
    rows = read_releases(cluster)
    told = f"the last good one is {rows[0].title}" if rows else "none is on record"
    return Outcome(step="releases", node=node.name, status="unchanged", detail=told, data=rows)


def problem_with(release: Release, node: str, have: Mapping[str, File]) -> str:
    """Why the files that a node keeps are not those of the release, or nothing."""
    names = ("launch", "node.env", "serve.args")
    for spec in release.containers[node]:
        for name, sha in zip(names, spec.files, strict=False):
            if name not in have:
                return f"its {name} is not kept"
            if have[name].sha256[: len(sha)] != sha:
                return f"its {name} was changed"
    return ""


@step("hold")
def hold_release(cluster: Cluster, node: Node, run: Run, release: Release) -> Outcome:
    """The node has the files and the image of a release; no pull and no transfer takes it away."""
    folder = f"{_home(cluster, node)}/.sparkrail/{cluster.name}/releases/{release.digest}"
    why = problem_with(release, node.name, scripts.observe(connect(cluster, node), folder))
    found = release.image
    if not run.dry_run and not why:
        with engine(cluster, node) as client:
            found = held_images.hold(client, cluster, release.image, release.image_content)
        why = "" if found else f"its image ({release.image}) is gone"
    told = (
        f"{release.digest} cannot be started again: {why}" if why else f"{release.digest} is here"
    )
    boot = connect(cluster, node).run(("sh", "-c", BOOT)).stdout.strip()
    data = {"found_as": found, "boot": boot, "why": why}
    return Outcome(step="hold", node=node.name, status="unchanged", detail=told, data=data)


def cannot_hold(release: Release, node: str, why: str) -> Outcome:
    """For a node of the release that is no node of the cluster any more and tells nothing."""
    data = {"found_as": "", "boot": "", "why": why}
    told = f"{release.digest} cannot be started again: {node}: {why}"
    return Outcome(step="hold", node=node, status="unchanged", detail=told, data=data)


def refuse_gone(release: Release, held: Sequence[Outcome]) -> None:
    """An error that names the nodes where the release is not whole any more."""
    lost = [f"{each.node}: {each.data['why']}" for each in held if each.data["why"]]
    if lost:
        raise NotReady(
            f"release {release.title} cannot be started again",
            details="\n".join(lost),
            remedy="Nothing was stopped. `sparkrail releases` lists the others.",
        )


@step("clear")
def clear(cluster: Cluster, node: Node, run: Run, files: bool = False, keep: str = "") -> Outcome:
    """No container of this cluster runs on the node but `keep`; what they said last is kept."""
    await_engine(cluster, node)  # Its restart may be why we are here.
    with engine(cluster, node) as client:

        def observe() -> dict[str, Container]:
            found = _all_ours(client, cluster)
            containers.refuse_foreign(cluster.name, node.name, found)
            return found

        have = observe()
        if have and not run.dry_run:
            keep_logs(cluster, node, client, have)
            remember(cluster, node, [each.id for each in have.values()])
        outcome = converge(
            "clear",
            node.name,
            observe,
            partial(plan_clear, cluster, keep=keep),
            partial(containers.act, client, cluster.name, node.name, run.id),
            dry_run=run.dry_run,
        )
    if files and not run.dry_run:
        connect(cluster, node).run(("sh", "-c", REMOVE_FILES, "sh", cluster.name))
    return outcome


def plan_clear(cluster: Cluster, have: Mapping[str, Container], keep: str = "") -> list[Remove]:
    """The server before Ray, which may stay."""
    serve = serve_container(cluster)
    going = [each for each in have.values() if each.name != keep]
    order = sorted(going, key=lambda each: (each.name != serve, each.name))
    return [Remove(each, "it is cleared away") for each in order]


def _all_ours(client: docker.DockerClient, cluster: Cluster) -> dict[str, Container]:
    names = (ray_container(cluster), serve_container(cluster))
    mine = client.api.containers(all=True, filters={"label": f"{CLUSTER_LABEL}={cluster.name}"})
    labelled = (parse_container(row) for row in mine if row.get("Names"))
    found = containers.observe(client, names)
    return found | {each.name: each for each in labelled if each.name in names}


def keep_logs(
    cluster: Cluster, node: Node, client: docker.DockerClient, have: Mapping[str, Container]
) -> None:
    """With mode 0600, since an engine may print what it was given."""
    remote = connect(cluster, node)
    folder = remote.run(("sh", "-c", LOG_FOLDER, "sh", cluster.name)).stdout.strip()
    for name in have:
        said = containers.log_tail(client, name, LOG_LINES)
        remote.put(f"{folder}/{name}.log", said.encode(), 0o600)


@step("rollback")
def restore_files(cluster: Cluster, node: Node, run: Run, release: Release) -> Outcome:
    """What the containers of a release read stands where they read it."""
    remote = connect(cluster, node)
    folder = f"{_home(cluster, node)}/.sparkrail/{cluster.name}/run"
    if run.dry_run:
        return Outcome(step="rollback", node=node.name, status="planned", detail=release.title)
    remote.run(("sh", "-ec", RESTORE, "sh", cluster.name, release.digest))
    why = problem_with(release, node.name, scripts.observe(remote, folder))
    if node.name == cluster.head.name:
        # It never shows: what a command prints is in no log.
        use_key(cluster, remote.run(("sh", "-ec", KEY, "sh", f"{folder}/node.env")).stdout)
    if why:
        raise CommandFailed(f"release {release.title} cannot be restored: {why}", node=node.name)
    detail = f"to release {release.title}"
    return Outcome(step="rollback", node=node.name, status="changed", detail=detail)


def ask_as(cluster: Cluster, release: Release) -> None:
    """From now on the server is asked with the key that this release was started with.

    The secrets block may hold another one since: refused by it, a server that is well looks dead.
    """
    argv = ("sh", "-c", KEY_OF, "sh", cluster.name, release.digest)
    said = connect(cluster, cluster.head).run(argv).stdout
    if said.startswith("key="):
        use_key(cluster, said.removeprefix("key="))


def found(release: Release, held: Sequence[Outcome]) -> dict[str, tuple[ContainerSpec, ...]]:
    """The containers of a release as its nodes would make them today.

    Each has the name by which its node has the image, and the node's present boot.
    """
    now = {each.node: {name: each.data[name] for name in ("found_as", "boot")} for each in held}
    return {
        node: tuple(spec.model_copy(update=now[node]) for spec in specs)
        for node, specs in release.containers.items()
    }


def _home(cluster: Cluster, node: Node) -> str:
    return connect(cluster, node).run(("sh", "-c", HOME)).stdout


def has_ray_of(release: Release, have: Mapping[str, Mapping[str, Container]]) -> bool:
    """Whether the Ray containers that run are those of a release, on every node of it."""
    rays = {node: specs[0] for node, specs in release.containers.items()}
    return bool(rays) and all(
        _is(spec, have.get(node, {}).get(spec.name)) for node, spec in rays.items()
    )


def runs(release: Release, have: Mapping[str, Mapping[str, Container]]) -> bool:
    """Whether the containers of a release are those that run."""
    return release.restorable and all(
        _is(spec, have.get(node, {}).get(spec.name))
        for node, specs in release.containers.items()
        for spec in specs
    )


def _is(spec: ContainerSpec, container: Container | None) -> bool:
    if container is None or not container.running:
        return False
    return container.label(DIGEST_LABEL) == spec.digest


def choose(
    cluster: str, rows: Sequence[Release], wanted: str, running: Sequence[Release]
) -> Release:
    """The release that a person means: by the beginning of its name, or the newest not running."""
    if wanted:
        found = [each for each in rows if each.digest.startswith(wanted)]
    else:
        found = [each for each in rows if each not in running][:1]
    if len(found) == 1:
        return found[0]
    known = ", ".join(each.title for each in rows) or "none"
    asked = f"release {wanted}" if wanted else "release to go back to"
    raise NotReady(
        f"there is no {asked}" if not found else f"{wanted} may be any of {len(found)} releases",
        details=f"on record: {known}",
        remedy=f"`sparkrail releases {cluster}` lists them.",
    )
