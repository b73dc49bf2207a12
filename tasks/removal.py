"""Taking everything of ours off a node: containers first, then the files they read."""

from dataclasses import dataclass
from functools import partial

from pydantic import BaseModel

from blocks import Cluster, Node
from tasks import containers, held_images
from tasks.containers import CLUSTER_LABEL, Container, Remove, parse_container
from tasks.converge import Outcome, Run, converge, step
from tasks.engines import engine
from tasks.remote import Remote, connect
from tasks.topology import serve_container

# The lock's own folder is not counted: its holder takes that away when this run ends.
LOOK = """\
folder=$HOME/.sparkrail/$1
[ ! -d "$folder" ] || [ "$(ls -A -- "$folder")" = lock ] || echo "$folder\""""
REMOVE = """\
find "$1" -mindepth 1 -maxdepth 1 ! -name lock -exec rm -rf -- {} +
rmdir --ignore-fail-on-non-empty -- "$1" && [ -e "$1" ] ||
    rmdir --ignore-fail-on-non-empty -- "$(dirname -- "$1")\""""


class Left(BaseModel, frozen=True):
    """What there still is of a cluster on a node."""

    containers: tuple[Container, ...] = ()
    images: tuple[str, ...] = ()  # Our names for images of releases.
    folder: str = ""


@dataclass(frozen=True)
class RemoveFolder:
    """Take away what is in the cluster's folder: launch script, variables, record."""

    path: str

    def __str__(self) -> str:
        return f"remove {self.path}"


@dataclass(frozen=True)
class RemoveName:
    """Take our name from an image that was held for a rollback."""

    name: str

    def __str__(self) -> str:
        return f"remove {self.name}"


Step = Remove | RemoveName | RemoveFolder


def plan(cluster: Cluster, have: Left) -> list[Step]:
    """The server before Ray, files last."""
    first = serve_container(cluster)
    order = sorted(have.containers, key=lambda container: container.name != first)
    steps: list[Step] = [Remove(each, "destroy") for each in order]
    steps += [RemoveName(name) for name in have.images]
    return [*steps, RemoveFolder(have.folder)] if have.folder else steps


@step("remove")
def remove_all(cluster: Cluster, node: Node, run: Run) -> Outcome:
    """No container and no file of this cluster is left on the node, but weights and image."""
    remote = connect(cluster, node)
    with engine(cluster, node) as client:

        def observe() -> Left:
            rows = client.api.containers(
                all=True, filters={"label": f"{CLUSTER_LABEL}={cluster.name}"}
            )
            return Left(
                containers=tuple(parse_container(row) for row in rows if row.get("Names")),
                images=tuple(held_images.names(client, cluster)),
                folder=_folder(remote, cluster),
            )

        def act(step: Step) -> None:
            if isinstance(step, RemoveFolder):
                remote.run(("sh", "-ec", REMOVE, "sh", step.path))
            elif isinstance(step, RemoveName):
                held_images.remove_name(client, step.name)
            else:
                containers.remove(client, step.container)

        return converge(
            "remove", node.name, observe, partial(plan, cluster), act, dry_run=run.dry_run
        )


def _folder(remote: Remote, cluster: Cluster) -> str:
    return remote.run(("sh", "-c", LOOK, "sh", cluster.name)).stdout.strip()
