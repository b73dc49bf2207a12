"""Images of releases on a node: found by their content, and held by a name of ours if need be."""

from collections.abc import Sequence

import docker
from docker.errors import APIError, ImageNotFound

from blocks import Cluster
from tasks.converge import log
from tasks.images import image_content, tagged
from tasks.replaced_images import failed, remove_unused, replaced


def repository(cluster: Cluster) -> str:
    return f"sparkrail/{cluster.name}-release"


def held_as(cluster: Cluster, content: str) -> str:
    """The name of ours for an image of that content."""
    return f"{repository(cluster)}:{content[:12]}"


def hold(client: docker.DockerClient, cluster: Cluster, image: str, content: str) -> str:
    """By which name docker has the image of that content; one of ours where it lost its own.

    Nothing where the content is gone.
    """
    if content_of(client, tagged(image)) == content:
        return image
    ours = held_as(cluster, content)
    if content_of(client, ours) == content:
        return ours
    for found in client.images.list():
        if image_content(found.attrs).digest == content:
            name, _, tag = ours.rpartition(":")
            found.tag(name, tag=tag)
            return ours
    return ""


def content_of(client: docker.DockerClient, name: str) -> str:
    """The content under a name; nothing where there is no such image."""
    try:
        return image_content(client.images.get(name).attrs).digest
    except ImageNotFound:
        return ""


def prune(client: docker.DockerClient, cluster: Cluster, contents: Sequence[str]) -> None:
    """Take our names from images that none of these releases needs; unused ones are gone then."""
    needed = {held_as(cluster, content) for content in contents}
    for name in _of(client, repository(cluster)):
        if name not in needed:
            remove_name(client, name)
    remove_unused(client, replaced(cluster))


def remove_name(client: docker.DockerClient, name: str) -> None:
    try:
        client.images.remove(name)
    except APIError as error:
        # A container of somebody else uses it. The next release will try again.
        log.info("image %s stays: %s", name, error.explanation)


def names(client: docker.DockerClient, cluster: Cluster) -> list[str]:
    """All names of ours for images of this cluster; for what was replaced or failed, too."""
    repositories = (repository(cluster), replaced(cluster), failed(cluster))
    return [name for each in repositories for name in _of(client, each)]


def _of(client: docker.DockerClient, mine: str) -> list[str]:
    images = client.images.list(filters={"reference": mine})
    return [tag for image in images for tag in image.tags if tag.startswith(f"{mine}:")]
