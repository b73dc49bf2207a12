"""The facts of a node's docker engine and of the engine image there, and their parsers."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel

from tasks.containers import Container, parse_container
from tasks.images import image_content

DOCKER_ROOT = "/var/lib/docker"
CONTAINERD_ROOT = "/var/lib/containerd"


class ImageFacts(BaseModel, frozen=True):
    """The engine image on a node; its id depends on the docker store, its content does not."""

    id: str
    content: str = ""
    layers: tuple[str, ...]
    entrypoint: tuple[str, ...]
    architecture: str
    size: int
    cuda: str = ""


class DockerFacts(BaseModel, frozen=True):
    """The docker engine of a node."""

    version: str
    api_version: str
    root: str
    store: Literal["classic", "containerd"]
    storage_driver: str
    runtimes: tuple[str, ...]
    architecture: str
    image: ImageFacts | None
    containers: tuple[Container, ...]

    def container(self, id: str) -> Container | None:
        return next((found for found in self.containers if id and found.id == id), None)


def parse_docker(
    api_version: str,
    info: Mapping[str, Any],
    image: Mapping[str, Any] | None,
    containers: Sequence[Mapping[str, Any]],
) -> DockerFacts:
    """What the docker API answered."""
    snapshotter = ["driver-type", "io.containerd.snapshotter.v1"] in (info["DriverStatus"] or [])
    return DockerFacts(
        version=info["ServerVersion"],
        api_version=api_version,
        root=info["DockerRootDir"],
        store="containerd" if snapshotter else "classic",
        storage_driver=info["Driver"],
        runtimes=tuple(sorted(info.get("Runtimes") or ())),
        architecture=info["Architecture"],
        image=parse_image(image) if image else None,
        # One that is being removed has no names any more.
        containers=tuple(parse_container(row) for row in containers if row.get("Names")),
    )


def parse_image(image: Mapping[str, Any]) -> ImageFacts:
    variables = dict(text.partition("=")[::2] for text in image["Config"].get("Env") or ())
    return ImageFacts(
        id=image["Id"],
        content=image_content(image).digest,
        layers=tuple(image["RootFS"].get("Layers") or ()),
        entrypoint=tuple(image["Config"].get("Entrypoint") or ()),
        architecture=image["Architecture"],
        size=image["Size"],
        cuda=variables.get("CUDA_VERSION", ""),
    )
