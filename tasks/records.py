"""The record of releases: what was deployed, kept on the head, newest first."""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from blocks import Cluster, Node
from tasks import hidden
from tasks.remote import connect
from tasks.topology import ContainerSpec

KEPT = 5
READ = 'cd -- "$HOME/.sparkrail/$1" 2>/dev/null && [ -e "$2" ] && cat -- "$2" || true'
FOLDER = 'umask 077; mkdir -p -- "$HOME/.sparkrail/$1" && cd -- "$HOME/.sparkrail/$1" && pwd'


class Figures(BaseModel, frozen=True):
    """What the canary measured of a release."""

    seconds: float  # Of a short completion.
    tokens_per_second: float


class OnNode(BaseModel, frozen=True):
    """What a release ran on, on one node; the variables are those that are no secrets."""

    interface: str = ""
    rdma: tuple[str, ...] = ()
    driver: str = ""
    boot_id: str = ""
    environment: Mapping[str, str] = {}


class Release(BaseModel, frozen=True):
    """What was deployed, when and by which run; no value in it is a secret."""

    digest: str
    at: str
    run: str
    image: str
    image_content: str
    weights: str
    script: str = ""
    arguments: tuple[str, ...] = ()
    versions: Mapping[str, str] = {}
    canary: Figures | None = None
    started: str = ""  # When its containers were last started, and what they found then:
    nodes: Mapping[str, OnNode] = {}
    spec_digest: str = ""
    spec: Mapping[str, Any] = {}
    containers: Mapping[str, tuple[ContainerSpec, ...]] = {}

    @property
    def title(self) -> str:
        return f"{self.digest} of {self.at}"

    @property
    def restorable(self) -> bool:
        """Whether it says enough to be started again; an older sparkrail's may not."""
        return bool(self.containers) and self._then is not None

    @property
    def _then(self) -> Cluster | None:
        """Its spec, if that is still one."""
        try:
            return Cluster.model_validate(self.spec)
        except ValidationError:
            return None

    def cluster(self, now: Cluster) -> Cluster:
        """Its spec, with the nodes reached as they are reached now."""
        then = self._then
        assert then is not None, "only a release that is restorable is asked for its spec"
        known = {node.name: node for node in now.nodes}
        return then.model_copy(
            update={
                "ssh": now.ssh,
                "residue": now.residue,
                "canary": now.canary,
                "head": _reached(then.head, known),
                "workers": tuple(_reached(worker, known) for worker in then.workers),
            }
        )


def _reached(then: Any, known: Mapping[str, Node]) -> Any:
    now = known.get(then.name)
    names = ("address", "user", "port", "proxy_command", "transport")
    same = {name: getattr(now, name) for name in names if hasattr(now, name)} if now else {}
    return then.model_copy(update={name: same[name] for name in same if hasattr(then, name)})


def spec_digest(cluster: Cluster) -> str:
    """Of everything that the user wrote."""
    return hashlib.sha256(cluster.model_dump_json().encode()).hexdigest()[:16]


def parse_releases(text: str) -> list[Release]:
    """The record as it stands on the head, newest first; what cannot be read is left out."""
    try:
        found = json.loads(text) if text.strip() else []
    except ValueError:
        return []
    return list(_releases(found)) if isinstance(found, list) else []


def _releases(rows: Sequence[Any]) -> Iterator[Release]:
    for row in rows:
        try:
            yield Release.model_validate(row)
        except ValidationError:
            continue


def read_releases(cluster: Cluster) -> list[Release]:
    """The releases that the head has on record, newest first."""
    return parse_releases(read_state(cluster, "releases.json"))


def read_state(cluster: Cluster, name: str) -> str:
    """A file of the cluster's folder on the head; nothing where there is none."""
    argv = ("sh", "-c", READ, "sh", cluster.name, name)
    return connect(cluster, cluster.head).run(argv).stdout


def write_state(cluster: Cluster, name: str, text: str, mode: int = 0o644) -> None:
    """Write a file of the cluster's folder on the head, which is made where there is none."""
    remote = connect(cluster, cluster.head)
    folder = remote.run(("sh", "-ec", FOLDER, "sh", cluster.name)).stdout.strip()
    remote.put(f"{folder}/{name}", text.encode(), mode)


def renewed(rows: Sequence[Release], release: Release) -> list[Release]:
    """The record with a release on top; one that is there already keeps when it was deployed."""
    if rows and rows[0].digest == release.digest:
        first = release.model_copy(update={"at": rows[0].at, "run": rows[0].run})
        if not release.started:  # It ran already; what its start told stands on record.
            first = first.model_copy(update={"versions": rows[0].versions})
        return [rows[0] if rows[0].restorable and not release.started else first, *rows[1:]]
    return [release, *(each for each in rows if each.digest != release.digest)][:KEPT]


def as_text(rows: Sequence[Release]) -> bytes:
    """For people and for `parse_releases`."""
    text = json.dumps([row.model_dump(mode="json") for row in rows], indent=2)
    return (hidden.shown(text) + "\n").encode()


def now() -> str:
    """For the record: local time with its offset, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
