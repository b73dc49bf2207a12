"""The container that reads an image from docker's folder where the node's user may only use docker.

Made from the image itself, which is there and has python3. It has no network, and of the node it
sees, read-only, the files of those layers that it is to read. Not docker's whole folder: with that,
it would hold the mounts of all other containers (moby #6745), and see what is none of its business.
"""

import secrets
from collections.abc import Collection, Mapping
from pathlib import PurePosixPath
from typing import Any

from blocks import Cluster
from tasks.containers import CLUSTER_LABEL
from tasks.engine_verdicts import ROLE_LABEL
from tasks.engines import engine
from tasks.image_layers import Source
from tasks.programs import program
from tasks.relayed.image_archive import chain_ids

PROGRAM = "image_reader"
ROLE = "image"
# In the container; the engine's own folder may lie behind a link.
ROOT = "/sparkrail"
# Its input goes on behind the program: the end of that is how it learns to end.
START = "import sys; exec(sys.stdin.buffer.read(int(sys.argv[1])))"


def mounts(
    source: Source, image_id: str, layers: tuple[str, ...], wanted: Collection[str]
) -> dict[str, str]:
    """What of docker's folder it takes to read these layers, and where that is in the container."""
    store = "image/overlay2"
    config = f"{store}/imagedb/content/{image_id.replace(':', '/')}"
    found = {f"{source.root}/{config}": f"{ROOT}/{config}"}
    for layer, chain_id, folder in zip(layers, chain_ids(layers), source.folders, strict=True):
        if layer in wanted:
            place = f"{store}/layerdb/{chain_id.replace(':', '/')}"
            found[f"{source.root}/{place}"] = f"{ROOT}/{place}"
            found[folder] = f"{ROOT}/overlay2/{PurePosixPath(folder).parent.name}/diff"
    return found


def command(cluster: Cluster, image_id: str, seen: Mapping[str, str], length: int) -> list[str]:
    """A throwaway container; root in it, since the files of a layer are anybody's."""
    return [
        *("docker", "run", "--rm", "--interactive", "--pull=never"),
        *("--network=none", "--log-driver=none", "--read-only", "--no-healthcheck"),
        *("--cap-drop=ALL", "--cap-add=DAC_OVERRIDE", "--user=0", "--workdir=/"),
        # Where containers have GPUs unless told otherwise.
        "--env=NVIDIA_VISIBLE_DEVICES=void",
        f"--name=sparkrail-{cluster.name}-image-{secrets.token_hex(3)}",
        f"--label={CLUSTER_LABEL}={cluster.name}",
        f"--label={ROLE_LABEL}={ROLE}",
        # --volume would make what is not there.
        *(
            f"--mount=type=bind,source={here},target={there},readonly"
            for here, there in seen.items()
        ),
        "--entrypoint=python3",
        *(image_id, "-I", "-S", "-c", START, str(length)),
    ]


def reader(
    cluster: Cluster,
    source: Source,
    store: Mapping[str, str],
    layers: tuple[str, ...],
    spare: Collection[str],
) -> dict[str, Any] | None:
    """Its command and its program; none where the engine does not tell where the layers lie."""
    if len(source.folders) != len(layers):
        return None
    wanted = sorted(set(layers) - set(spare))
    text = program(PROGRAM, {**store, "root": ROOT, "layers": layers, "wanted": wanted})
    seen = mounts(source, store["id"], layers, wanted)
    return {
        "command": command(cluster, store["id"], seen, len(text)),
        "program": text.decode(),
    }


def remove_forgotten(cluster: Cluster) -> None:
    """What was never started, since its docker client was killed at that moment.

    No other run has one: it would hold the lock of the cluster.
    """
    labels = [f"{CLUSTER_LABEL}={cluster.name}", f"{ROLE_LABEL}={ROLE}"]
    with engine(cluster, cluster.head) as client:
        for row in client.api.containers(all=True, filters={"label": labels}):
            client.api.remove_container(row["Id"], force=True, v=True)
