"""What workers lack of an image, sent to all of them at once, in as few rounds as it takes.

The steps of the workers run side by side. The first of them that finds its image missing sends it
to all that lack it, and the others find here what came of that.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import BaseModel

from blocks import Cluster, Node
from tasks import remote
from tasks.converge import log
from tasks.errors import Cancelled, NodeUnreachable, SparkrailError
from tasks.image_chains import Round, stream
from tasks.image_layers import Source, Target, look, look_at_source, spare
from tasks.image_readers import reader, remove_forgotten
from tasks.image_streams import (
    LACKS_PLATFORM,
    STEP,
    FolderUnreadable,
    Moved,
    deadline,
    save_command,
)
from tasks.programs import run_program
from tasks.remote import connect
from tasks.transfers import Progress

T = TypeVar("T")
Delivered = Moved | SparkrailError


class Parcel(BaseModel, frozen=True):
    """The image that is sent, as its source has it."""

    name: str
    id: str
    layers: tuple[str, ...]
    platform: str
    size: int


@dataclass
class Settled:
    """What one round leaves to do."""

    again: dict[str, Target] = field(default_factory=dict)
    failed: dict[str, SparkrailError] = field(default_factory=dict)
    with_platform: bool = False


def settle(found: Round, targets: Mapping[str, Target], with_platform: bool) -> Settled:
    """Who gets it in a further round, and how; everybody else has failed, or has it."""
    done = Settled(with_platform=with_platform)
    for name, error in found.failed.items():
        if not with_platform and LACKS_PLATFORM.search(error.details):
            done.with_platform = True
            done.again[name] = targets[name]
        else:
            done.failed[name] = error
    for name in found.refused:
        done.again[name] = targets[name].model_copy(update={"has": 0})
    # Without anybody who was to blame, a further round would end as this one.
    in_vain = not (found.loaded or found.failed or found.refused)
    for name, why in found.cut_off.items():
        if in_vain:
            done.failed[name] = NodeUnreachable(
                "the image did not get there over the fabric",
                node=name,
                details=why,
                remedy="Run again.",
            )
        else:
            done.again[name] = targets[name]
    return done


def note(
    moved: Moved, targets: Mapping[str, Target], refused: Mapping[str, str], unread: str = ""
) -> str:
    """Why more was sent than was lacking, if it was, and why by docker save."""
    by = f"by docker save: {unread}" if unread else ""
    return "; ".join(filter(None, (_why_more(moved, targets, refused), by)))


def _why_more(moved: Moved, targets: Mapping[str, Target], refused: Mapping[str, str]) -> str:
    if refused:
        return "all of it, since " + "; ".join(
            f"docker load on {name} refused the missing layers alone ({why})"
            for name, why in sorted(refused.items())
        )
    others = sorted(name for name, target in targets.items() if target.containerd)
    if moved.sent_anyway and moved.legacy and others:
        return (
            "all of it, since the image store of "
            f"{', '.join(others)} takes no layers alone from an engine before version 25"
        )
    if moved.sent_anyway:
        return f"{moved.sent_anyway} layers of it were there, but could not be told apart"
    return ""


def deliver(cluster: Cluster, nodes: Sequence[Node], parcel: Parcel) -> dict[str, Delivered]:
    """Send the image from the head to these workers; how that ended for each of them."""
    looked = side_by_side(lambda node: look(cluster, node, parcel.layers), nodes)
    ended: dict[str, Delivered] = {
        name: found for name, found in looked.items() if isinstance(found, SparkrailError)
    }
    targets = {name: found for name, found in looked.items() if isinstance(found, Target)}
    with_platform, refused, unread = False, dict[str, str](), ""
    source = look_at_source(cluster, parcel.id)
    store = store_of(source, parcel, targets.values())
    if store:
        remove_forgotten(cluster)
    blobs = survey(cluster, parcel, targets.values()) if source.containerd else {}
    with _bars(cluster, nodes, parcel.size) as bars:
        while targets:
            left_out = sorted(spare(parcel.layers, targets.values()))
            orders = {
                "save": save_command(parcel.name, parcel.platform if with_platform else ""),
                "layers": parcel.layers,
                "spare": left_out,
                "blobs": blobs,
                "legacy": not any(target.containerd for target in targets.values()),
                "store": store,
                "reader": store and reader(cluster, source, store, parcel.layers, left_out),
            }
            chain = [node for node in nodes if node.name in targets]
            try:
                found = stream(cluster, chain, orders, parcel.size, bars)
            except Cancelled:
                raise
            except FolderUnreadable as error:
                log.info("%s: %s; now by docker save", STEP, error)
                store, unread = None, error.brief
                continue
            except SparkrailError as error:
                found = Round(failed=dict.fromkeys(targets, error))
            for name, moved in found.loaded.items():
                said = note(moved, targets, refused, moved.unread or unread)
                ended[name] = moved.model_copy(update={"note": said})
            settled = settle(found, targets, with_platform)
            ended |= settled.failed
            refused |= found.refused
            if found.refused:
                store = None
            targets, with_platform = settled.again, settled.with_platform
        for name, bar in bars.items():
            end = ended[name]
            if isinstance(end, Moved):
                bar.finished(end.bytes)
            else:
                bar.stopped()
    return ended


def store_of(source: Source, parcel: Parcel, targets: Iterable[Target]) -> dict[str, str] | None:
    """Where the image may be read without docker, for stores that take the layout of that."""
    if source.driver != "overlay2" or any(target.containerd for target in targets):
        return None
    return {"root": source.root, "id": parcel.id, "name": parcel.name}


def survey(cluster: Cluster, parcel: Parcel, targets: Iterable[Target]) -> dict[str, str]:
    """Which layers lie in blobs of other names, where that is possible and of use."""
    if not spare(parcel.layers, targets):
        return {}
    said = run_program(
        connect(cluster, cluster.head),
        "image_survey",
        orders={"save": save_command(parcel.name), "layers": parcel.layers},
        timeout=deadline(parcel.size),
    )
    return dict(said["blobs"])


def side_by_side(
    function: Callable[[Node], T], nodes: Sequence[Node]
) -> dict[str, T | SparkrailError]:
    """What the function says of each node, or how it failed."""

    def attempt(node: Node) -> T | SparkrailError:
        try:
            return function(node)
        except Cancelled:
            raise
        except SparkrailError as error:
            return error

    with ThreadPoolExecutor(max(1, len(nodes)), "images") as pool:
        found = pool.map(attempt, nodes)
        return {node.name: answer for node, answer in zip(nodes, found, strict=True)}


@contextlib.contextmanager
def _bars(cluster: Cluster, nodes: Sequence[Node], size: int) -> Iterator[dict[str, Progress]]:
    """A bar for each worker; how much of the size is left out is not known before the end."""
    with contextlib.ExitStack() as stack:
        yield {
            node.name: stack.enter_context(Progress(STEP, cluster, node, size)) for node in nodes
        }


class Turns:
    """What the step of one worker brought to the others, until their own steps ask for it."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._brought: dict[tuple[str, str, str], Delivered] = {}

    def take(self, cluster: Cluster, run_id: str, node: Node) -> Delivered | None:
        return self._brought.pop((cluster.name, run_id, node.name), None)

    def get(
        self,
        cluster: Cluster,
        run_id: str,
        node: Node,
        send: Callable[[], Mapping[str, Delivered]],
    ) -> Moved:
        """What came of another step's sending, or else of ours; an error of it is raised."""
        with self._mine(node):
            found = self.take(cluster, run_id, node)
            if found is None:
                for name, delivered in send().items():
                    self._brought[cluster.name, run_id, name] = delivered
                found = self.take(cluster, run_id, node)
        assert found is not None
        if isinstance(found, SparkrailError):
            raise found
        return found

    @contextlib.contextmanager
    def _mine(self, node: Node) -> Iterator[None]:
        while not self._turn.acquire(timeout=remote.POLL):
            if remote.STOP.is_set():
                raise Cancelled("cancelled while the image was on its way", node=node.name)
        try:
            yield
        finally:
            self._turn.release()
