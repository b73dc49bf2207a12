"""What a bug report needs to know of a node, and the archive that holds it without secrets."""

import io
import json
import os
import tarfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from blocks import Cluster, Node
from tasks import containers
from tasks.converge import Outcome, Run, step
from tasks.engines import engine
from tasks.errors import SparkrailError
from tasks.facts import observe_facts
from tasks.log_streams import Stream, Wanted, know_secrets, streams
from tasks.redaction import redacted, redacted_document, redacted_environment
from tasks.remote import connect
from tasks.topology import ray_container, serve_container

# Of our folder on a node only what is named here: a record of the future may hold secrets.
STATE = (
    "run/launch",
    "run/serve.args",
    "releases.json",
    "engine.json",
    "holders.json",
    "stopped.json",
    "lock/owner.json",
)
# Each file that is there, behind a mark that none of them holds.
READ = r"""
cd -- "$HOME/.sparkrail/$1" 2>/dev/null || exit 0
shift
for file in "$@"; do
    [ ! -f "$file" ] || { printf '\036%s\n' "$file"; head -c 1000000 -- "$file"; }
done"""
ENVIRONMENT = "run/node.env"
ERRORS = "not-read.txt"

Parts = dict[str, Any]  # Texts, and documents for JSON, by the file of the archive they become.


@step("gather")
def gather_node(cluster: Cluster, node: Node, run: Run, lines: int) -> Outcome:  # noqa: ARG001 - as every step
    """All of one node, secrets included: only `write` makes it fit to be seen."""
    connect(cluster, node)  # One that is away is told once, not for each part.
    parts: Parts = {}
    errors: list[str] = []

    def read(what: str, look: Callable[[], Parts]) -> None:
        try:
            parts.update(look())
        except SparkrailError as error:
            errors.append(f"{what}: {error}")

    # The secrets first: what cannot be read after them is said in an error that may repeat one.
    read("the node's variables", lambda: {ENVIRONMENT: know_secrets(cluster, node)})
    read("its facts", lambda: {"facts.json": _facts(cluster, node)})
    read("its containers", lambda: {"containers.json": _inspected(cluster, node)})
    read("our files", lambda: _state(cluster, node))
    for stream in streams(cluster, node, Wanted(lines)):
        read(f"the log of {stream.what}", partial(_log, stream))
    if errors:
        parts[ERRORS] = "\n".join(errors) + "\n"
    detail = f"{len(parts)} files" + (f", {len(errors)} not to be read" if errors else "")
    return Outcome(step="gather", node=node.name, status="unchanged", detail=detail, data=parts)


# A node that stays silent is told soon, not tried for long.
gather_node = gather_node.with_options(retries=0)


def _facts(cluster: Cluster, node: Node) -> Any:
    return observe_facts(cluster, node).model_dump(mode="json")


def _inspected(cluster: Cluster, node: Node) -> Any:
    with engine(cluster, node) as client:
        names = (ray_container(cluster), serve_container(cluster))
        api: Any = client.api
        return [
            api.inspect_container(each.id) for each in containers.observe(client, names).values()
        ]


def _state(cluster: Cluster, node: Node) -> Parts:
    said = connect(cluster, node).run(("sh", "-c", READ, "sh", cluster.name, *STATE)).stdout
    pairs = (part.partition("\n")[::2] for part in said.split("\036")[1:])
    return dict(pairs)


def _log(stream: Stream) -> Parts:
    said: list[str] = []

    def say(what: str, line: str) -> None:
        said.append(f"{what} | {line}" if what.startswith("rank ") else line)

    stream.run(say)
    return {f"{stream.what}.log": "\n".join(said) + "\n"}


def write(path: Path, folder: str, parts: Mapping[str, Any]) -> int:
    """The archive, whole or not at all and for nobody else's eyes; its size."""
    now = time.time()
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name, part in parts.items():
            data = as_text(name, part).encode()
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size, member.mtime, member.mode = len(data), int(now), 0o600
            archive.addfile(member, io.BytesIO(data))
    aside = path.with_name(f"{path.name}.tmp")
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content.getbuffer())
    aside.replace(path)
    return len(content.getbuffer())


def as_text(name: str, part: Any) -> str:
    """A part as others may see it."""
    if name.endswith(ENVIRONMENT):
        return redacted_environment(part)
    if name.endswith(".json"):
        # Of the document, not of its text: quoting would disguise a secret.
        try:
            document = json.loads(part) if isinstance(part, str) else part
        except ValueError:
            return redacted(part)
        return json.dumps(redacted_document(document), indent=2) + "\n"
    return redacted(part)
