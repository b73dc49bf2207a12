"""The engine image: the same content on every node, whatever tags and ids say."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from docker.errors import ImageNotFound
from pydantic import BaseModel

from blocks import Cluster, Node
from tasks.control_images import control_image, send_from_control
from tasks.converge import Outcome, Run, converge, step
from tasks.engines import engine
from tasks.errors import CommandFailed, SparkrailError
from tasks.image_deliveries import Delivered, Parcel, Turns, deliver, side_by_side
from tasks.image_streams import STEP, Moved
from tasks.replaced_images import keep, remove_unused, replaced
from tasks.transfers import amount, rate

# What makes containers of an image behave as they do. Other fields of the config differ between
# engines: 20.10 adds the fields of containers, 29 leaves out empty ones.
CONFIG = (
    "Cmd",
    "Entrypoint",
    "Env",
    "ExposedPorts",
    "Healthcheck",
    "Labels",
    "OnBuild",
    "Shell",
    "StopSignal",
    "User",
    "Volumes",
    "WorkingDir",
)
_turns = Turns()


class ImageContent(BaseModel, frozen=True):
    """An image that docker reports. Equal digests mean equal content, on any image store."""

    digest: str
    # The id of the same image is another one on the other image store: never compare it.
    id: str
    architecture: str
    os: str
    entrypoint: tuple[str, ...]
    size: int
    layers: tuple[str, ...] = ()

    def facts(self) -> dict[str, Any]:
        return {
            "content": self.digest,
            "id": self.id,
            "architecture": self.architecture,
            "entrypoint": list(self.entrypoint),
        }


@dataclass(frozen=True)
class Send:
    """The image is streamed from one machine to another."""

    name: str
    source: str
    size: int

    def __str__(self) -> str:
        return f"send {self.name} from {self.source}, about {amount(self.size)}"


def tagged(name: str) -> str:
    """The name with its tag: `docker save` takes a name without one for all tags of it."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def image_content(attrs: Mapping[str, Any]) -> ImageContent:
    """The content behind what docker's image inspect says."""
    config = attrs.get("Config") or {}
    content = {
        "layers": (attrs.get("RootFS") or {}).get("Layers") or [],
        "config": {name: config[name] for name in CONFIG if config.get(name)},
        "architecture": attrs["Architecture"],
        "os": attrs["Os"],
    }
    text = json.dumps(content, sort_keys=True)
    return ImageContent(
        digest=hashlib.sha256(text.encode()).hexdigest(),
        id=attrs["Id"],
        architecture=attrs["Architecture"],
        os=attrs["Os"],
        entrypoint=tuple(config.get("Entrypoint") or ()),
        size=attrs.get("Size") or 0,
        layers=tuple(content["layers"]),
    )


def plan(name: str, source: str, want: ImageContent, have: ImageContent | None) -> list[Send]:
    if have is not None and have.digest == want.digest:
        return []
    return [Send(name, source, want.size)]


def observe(cluster: Cluster, node: Node) -> ImageContent | None:
    """The image under the wanted name on a node."""
    with engine(cluster, node) as client:
        try:
            return image_content(client.images.get(tagged(cluster.image.name)).attrs)
        except ImageNotFound:
            return None


def wanted(cluster: Cluster, node: Node, run: Run) -> ImageContent:
    """The content that a node must have: what stands under the name where it comes from."""
    name = tagged(cluster.image.name)
    # A dry run has not brought it to the head.
    if cluster.image.source == "control" and (node.name == cluster.head.name or run.dry_run):
        return image_content(control_image(cluster.image, name))
    found = observe(cluster, cluster.head)
    if found is None:
        raise SparkrailError(
            f"there is no image {name}",
            node=cluster.head.name,
            remedy=f"Get it there (docker pull {name}, or docker load), or let it be sent from "
            "the control machine: image.source: control.",
        )
    return found


@step(STEP)
def ensure_image(cluster: Cluster, node: Node, run: Run) -> Outcome:
    """The node has the image of its source under the wanted name: control -> head -> workers."""
    want = wanted(cluster, node, run)
    is_head = node.name == cluster.head.name
    sender = _Sender(cluster, node, run, want)
    outcome = converge(
        STEP,
        node.name,
        partial(observe, cluster, node),
        partial(
            plan, tagged(cluster.image.name), "control" if is_head else cluster.head.name, want
        ),
        sender.send,
        dry_run=run.dry_run,
        data=lambda have: have if have and have.digest == want.digest else want,
    )
    # The step of another worker may have brought it before this one looked.
    moved = sender.moved or _turns.take(cluster, run.id, node)
    if isinstance(moved, Moved):
        with engine(cluster, node) as client:
            removed = remove_unused(client, replaced(cluster))
        detail = told(tagged(cluster.image.name), want, moved, removed)
        outcome = outcome.model_copy(update={"status": "changed", "detail": detail})
    return outcome.model_copy(update={"data": outcome.data.facts()})


def told(name: str, want: ImageContent, moved: Moved, removed: Sequence[str]) -> str:
    """What was sent, in the words of an outcome."""
    count = len(want.layers)
    parts = f", {count - moved.left_out} of {count} layers" if moved.left_out else ""
    return "; ".join(
        (
            f"sent {name}, {rate(moved.bytes, moved.seconds)}{parts}",
            *filter(None, [moved.note]),
            *(f"removed {image}" for image in removed),
        )
    )


class _Sender:
    """Brings one node the image; what stood under its name keeps a name of ours."""

    def __init__(self, cluster: Cluster, node: Node, run: Run, want: ImageContent) -> None:
        self.cluster = cluster
        self.node = node
        self.run = run
        self.want = want
        self.moved: Moved | None = None

    def send(self, what: Send) -> None:
        want = self.want
        parcel = Parcel(
            name=what.name,
            id=want.id,
            layers=want.layers,
            platform=f"{want.os}/{want.architecture}",
            size=want.size,
        )
        if self.node.name == self.cluster.head.name:
            self._keep(self.node)
            moved = send_from_control(self.cluster, parcel)
        else:
            moved = _turns.get(
                self.cluster, self.run.id, self.node, lambda: self._send_to_all(parcel)
            )
        have = observe(self.cluster, self.node)
        if have is None or have.digest != want.digest:
            raise CommandFailed(
                f"docker load ended well, but {what.name} is not the image that was sent",
                node=self.node.name,
                details=moved.load_said,
                remedy=f"See the log of docker on {self.node.name}, and whether somebody else "
                "gives that name to images; then run again.",
            )
        self.moved = moved

    def _send_to_all(self, parcel: Parcel) -> dict[str, Delivered]:
        """To this worker, and to all others that lack it: the head sends every byte once."""
        others = [node for node in self.cluster.workers if node.name != self.node.name]
        lacking = {
            name
            for name, have in side_by_side(partial(observe, self.cluster), others).items()
            # One that cannot be asked: its own step will tell.
            if not isinstance(have, SparkrailError)
            and (have is None or have.digest != self.want.digest)
        }
        nodes = [
            node
            for node in self.cluster.workers
            if node.name == self.node.name or node.name in lacking
        ]
        kept = side_by_side(self._keep, nodes)
        failed = {name: error for name, error in kept.items() if isinstance(error, SparkrailError)}
        return {
            **failed,
            **deliver(self.cluster, [node for node in nodes if node.name not in failed], parcel),
        }

    def _keep(self, node: Node) -> None:
        with engine(self.cluster, node) as client:
            keep(client, tagged(self.cluster.image.name), replaced(self.cluster))
