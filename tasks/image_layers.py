"""Which layers of an image a node has already, whatever other image it has them from."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from docker.errors import NotFound
from pydantic import BaseModel

from blocks import Cluster, Node
from tasks.engines import engine

SNAPSHOTTER = ["driver-type", "io.containerd.snapshotter.v1"]


class Target(BaseModel, frozen=True):
    """A node that is about to get an image, and how many of its layers are there, from below."""

    node: str
    has: int = 0
    # Such a store takes an archive without layers only in the newer layout.
    containerd: bool = False


class Source(BaseModel, frozen=True):
    """How the head keeps its images."""

    containerd: bool
    driver: str
    root: str
    # Where it says that the files of each layer of the image lie, from below.
    folders: tuple[str, ...] = ()


def leading(layers: Sequence[str], other: Sequence[str]) -> int:
    """How many layers two images share, from below: an engine knows a layer by all below it."""
    count = 0
    for mine, theirs in zip(layers, other, strict=False):
        if mine != theirs:
            break
        count += 1
    return count


def spare(layers: Sequence[str], targets: Iterable[Target]) -> frozenset[str]:
    """The layers that none of them lacks; one that is there twice may be lacking further up."""
    common = min((target.has for target in targets), default=0)
    return frozenset(layers[:common]) - frozenset(layers[common:])


def look(cluster: Cluster, node: Node, layers: Sequence[str]) -> Target:
    """What the node's images have in common with this one."""
    has = 0
    with engine(cluster, node) as client:
        containerd = keeps_by_containerd(client.info())
        for image in client.api.images(quiet=True):
            try:
                found = client.api.inspect_image(image)  # type: ignore[no-untyped-call]
            except NotFound:  # Removed since.
                continue
            has = max(has, leading(layers, (found.get("RootFS") or {}).get("Layers") or ()))
    return Target(node=node.name, has=has, containerd=containerd)


def look_at_source(cluster: Cluster, image_id: str) -> Source:
    with engine(cluster, cluster.head) as client:
        info = client.info()
        try:
            image = client.api.inspect_image(image_id)  # type: ignore[no-untyped-call]
        except NotFound:  # Removed since: whoever saves it will tell.
            image = {}
    return Source(
        containerd=keeps_by_containerd(info),
        driver=info["Driver"],
        root=info["DockerRootDir"],
        folders=layer_folders(image),
    )


def layer_folders(image: Mapping[str, Any]) -> tuple[str, ...]:
    """As overlay2 tells them: the top one, and those below it from above."""
    told = (image.get("GraphDriver") or {}).get("Data") or {}
    below = [folder for folder in (told.get("LowerDir") or "").split(":") if folder]
    return (*below[::-1], told["UpperDir"]) if told.get("UpperDir") else ()


def keeps_by_containerd(info: Mapping[str, Any]) -> bool:
    return SNAPSHOTTER in (info["DriverStatus"] or [])
