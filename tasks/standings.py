"""What runs on the nodes against what was asked, in words: one row for each thing that matters."""

import calendar
import time
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel

from blocks import Cluster, Node
from tasks.containers import BOOT_LABEL, CLUSTER_LABEL, DIGEST_LABEL, SHARES_LABEL, Container
from tasks.endpoint import Answer
from tasks.errors import SparkrailError
from tasks.ray_nodes import RayNode, membership_problems
from tasks.topology import ContainerSpec, ray_container, serve_container

State = Literal[
    "as asked",
    "not there",
    "not ours",
    "ended",
    "rebooted since",
    "older image",
    "another spec",
    "Ray started anew",
    "rank lost",
    "no answer",
    "unreachable",
    "unknown",
]


class Standing(BaseModel, frozen=True):
    """A row of the table: what was asked of a node, and what runs there instead."""

    node: str
    what: Literal["Ray", "server", "endpoint"]
    state: State
    asked: str
    runs: str


class Found(BaseModel, frozen=True):
    """A container as docker inspects it, and what its image is."""

    container: Container
    started: str = ""  # As docker writes it; of what has ended, `finished` too.
    finished: str = ""
    exit_code: int = 0
    out_of_memory: bool = False
    image: str = ""  # The name by which it was started.
    image_content: str = ""  # Nothing when that image is gone.
    image_created: str = ""
    cause: str = ""  # What its log says, when it has ended.


class Looked(BaseModel, frozen=True):
    """What one node told: its containers, and which boot it is in."""

    boot: str = ""
    found: Mapping[str, Found] = {}


Finding = tuple[State, str]


def standings(
    cluster: Cluster,
    wanted: Mapping[str, Sequence[ContainerSpec]],
    looked: Mapping[str, Looked | SparkrailError],
    ray: Sequence[RayNode] | SparkrailError | None,
    answer: Answer | SparkrailError | None,
) -> list[Standing]:
    """The whole table; `ray` is what the head says of its nodes, None where nobody could be asked.

    A node without an entry in `wanted` is told as it is: what was asked of it is not known.
    """
    lost = dict(membership_problems(cluster, ray)) if isinstance(ray, Sequence) else {}
    rows = []
    for node in cluster.nodes:
        seen = looked.get(node.name)
        if isinstance(seen, Looked):
            specs = {spec.name: spec for spec in wanted.get(node.name, ())}
            rows += [
                _row(cluster, node, name, specs.get(name), seen, ray, lost.get(node.name, ""))
                for name in _names(cluster, node, seen)
            ]
        else:
            rows.append(_unreachable(cluster, node, seen, ray, lost))
    return [*rows, _endpoint(cluster, looked, answer)]


def _names(cluster: Cluster, node: Node, seen: Looked) -> list[str]:
    """Ray's container and, where it belongs or stands, the server's."""
    ray, serve = ray_container(cluster), serve_container(cluster)
    return [ray, serve] if node == cluster.head or serve in seen.found else [ray]


def _row(
    cluster: Cluster,
    node: Node,
    name: str,
    want: ContainerSpec | None,
    seen: Looked,
    ray: Sequence[RayNode] | SparkrailError | None,
    lost: str,
) -> Standing:
    is_ray = name == ray_container(cluster)
    belongs = is_ray or node == cluster.head
    found = seen.found.get(name)
    if found is None:
        findings: list[Finding] = [("not there", "nothing: there is no container of that name")]
    else:
        findings = _findings(cluster, want, found, seen)
        if not belongs:
            findings.append(("another spec", "a server on a node that is not the head"))
        if is_ray and found.container.running:
            findings += _membership(node == cluster.head, ray, lost)
    if not findings:
        findings = [("as asked", "as asked") if want else ("unknown", "runs")]
    told = "; ".join(dict.fromkeys(words for _, words in findings))
    since = f", since {_local(found.started)}" if found and found.container.running else ""
    return Standing(
        node=node.name,
        what="Ray" if is_ray else "server",
        state=findings[0][0],
        asked=_asked(cluster, is_ray, want, belongs=belongs),
        runs=f"{told}{since}",
    )


def _asked(cluster: Cluster, is_ray: bool, want: ContainerSpec | None, *, belongs: bool) -> str:
    if not belongs:
        return "nothing"
    what = "Ray" if is_ray else cluster.model.name
    return f"{what} in {cluster.image.name}" + (f" ({want.image_content[:12]})" if want else "")


def _findings(
    cluster: Cluster, want: ContainerSpec | None, found: Found, seen: Looked
) -> list[Finding]:
    """What is not as asked about one container, the most telling first."""
    container = found.container
    if container.label(CLUSTER_LABEL) != cluster.name:
        words = f"a container ({container.id[:12]}) that sparkrail did not start"
        return [("not ours", words)]
    findings: list[Finding] = []
    boot = container.label(BOOT_LABEL)
    rebooted = bool(boot and seen.boot and boot != seen.boot)
    if rebooted:
        findings.append(("rebooted since", "the node was rebooted since this was deployed"))
    if not container.running:
        # What it said last is not why it ended, where it ended with its node.
        findings.append(("ended", _ended(found, "" if rebooted else found.cause)))
    if want is None:
        return findings
    if found.image_content != want.image_content:
        findings.append(("older image", _image(found)))
    elif container.label(DIGEST_LABEL) != want.digest:
        words = "deployed with another spec (arguments, variables, files or weights)"
        findings.append(("another spec", words))
    if container.running and want.shares:
        shared = seen.found.get(want.shares)
        if shared is None or container.label(SHARES_LABEL) != shared.container.id:
            findings.append(("Ray started anew", "the Ray that it was started on is gone"))
    return findings


def _image(found: Found) -> str:
    if not found.image_content:
        return f"runs an image {found.image} that is not on the node any more"
    made = f", made {_local(found.image_created)}" if found.image_created else ""
    return f"runs an older image: {found.image} ({found.image_content[:12]}{made})"


def _ended(found: Found, cause: str) -> str:
    state = found.container.state
    if state in ("created", "restarting", "paused"):
        return f"is {state}"
    words = f"ended with exit code {found.exit_code}"
    if found.out_of_memory:
        words += ", out of memory"
    if found.finished:
        words += f", {_local(found.finished)}"
    return f"{words}: {cause}" if cause else words


def _membership(
    is_head: bool, ray: Sequence[RayNode] | SparkrailError | None, lost: str
) -> list[Finding]:
    if isinstance(ray, SparkrailError):
        return [("no answer", f"its container runs, but {ray.brief}")] if is_head else []
    if not lost:
        return []
    return [("rank lost", f"its container runs, but its rank is lost: {lost}")]


def _unreachable(
    cluster: Cluster,
    node: Node,
    error: SparkrailError | None,
    ray: Sequence[RayNode] | SparkrailError | None,
    lost: Mapping[str, str],
) -> Standing:
    told = error.brief if error else "it was not asked"
    if isinstance(ray, Sequence):
        told += "; Ray on the head " + (
            "has lost it too" if node.name in lost else "still has it alive"
        )
    return Standing(
        node=node.name,
        what="Ray",
        state="unreachable",
        asked=_asked(cluster, True, None, belongs=True),
        runs=f"cannot be looked at: {told}",
    )


def _endpoint(
    cluster: Cluster,
    looked: Mapping[str, Looked | SparkrailError],
    answer: Answer | SparkrailError | None,
) -> Standing:
    head = looked.get(cluster.head.name)
    state, told = _answered(answer)
    if state == "as asked" and isinstance(head, Looked):
        server = head.found.get(serve_container(cluster))
        if server is None or not server.container.running:
            state, told = "not ours", f"another process than our server {told}"
    asked = f"{cluster.model.name} on port {cluster.serve.port}"
    return Standing(node=cluster.head.name, what="endpoint", state=state, asked=asked, runs=told)


def _answered(answer: Answer | SparkrailError | None) -> Finding:
    if isinstance(answer, Answer):
        return "as asked", answer.told
    if answer is None:
        return "unknown", "the head cannot be asked"
    return "no answer", f"does not answer: {answer.brief}"


def _local(text: str) -> str:
    """docker's time, which is UTC, as it is here; nanoseconds are nothing for people."""
    try:
        at = time.strptime(text[:19], "%Y-%m-%dT%H:%M:%S")
    except ValueError:
        return text
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(calendar.timegm(at)))
