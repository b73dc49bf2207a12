"""What has lost its name to another image, or will: kept while it is in use, then removed.

Never by a prune.
"""

import docker
from docker.errors import APIError, ImageNotFound

from blocks import Cluster
from tasks.converge import log


def replaced(cluster: Cluster) -> str:
    """The name of ours that images bear which the transfer replaced."""
    return f"sparkrail/{cluster.name}-replaced"


def failed(cluster: Cluster) -> str:
    """The name of ours that images bear which did not work."""
    return f"sparkrail/{cluster.name}-failed"


def keep(client: docker.DockerClient, name: str, ours: str) -> None:
    """Give the image that will lose its name one of ours, too: it may still be in use, and only
    what bears our name will be removed later."""
    try:
        image = client.images.get(name)
    except ImageNotFound:
        return
    image.tag(ours, tag=str(image.id).removeprefix("sha256:")[:12])


def remove_unused(client: docker.DockerClient, mine: str) -> list[str]:
    """Take that name of ours from the images that no container uses; those without another name
    are gone then."""
    used = {row.get("ImageID") for row in client.api.containers(all=True)}
    gone = []
    for image in client.images.list(filters={"reference": mine}):
        if image.id in used:
            continue
        ours = [tag for tag in image.tags if tag.startswith(f"{mine}:")]
        try:
            for tag in ours:
                client.images.remove(tag)
        except APIError as error:
            # Something began to use it. The next transfer will try again.
            log.info("image %s stays: %s", image.short_id, error.explanation)
            continue
        if ours == image.tags:
            gone.append(image.short_id.removeprefix("sha256:"))
    return gone
