"""What the engine in an image says of the arguments that it will be started with."""

import hashlib
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from blocks import Cluster, Node
from tasks.containers import CLUSTER_LABEL, RUN_LABEL
from tasks.converge import Outcome, Run, converge, step
from tasks.engines import engine
from tasks.errors import CommandFailed, CommandTimedOut
from tasks.remote import Remote, Result, connect
from tasks.topology import arguments, state_folder

STEP = "engine check"
ROLE_LABEL = "sparkrail.role"
ROLE = "check"
PROGRAM = (Path(__file__).parent / "relayed" / "engine_check.py").read_bytes()
TIMEOUT = 150.0  # Longer than the program gives itself.
NO_PYTHON = 127
KEPT = 20


class Verdict(BaseModel, frozen=True):
    """What is missing in an image, and what its parser refuses, each in its own words."""

    missing: tuple[str, ...] = ()
    versions: Mapping[str, str] = {}
    refused: str = ""
    unparsed: str = ""  # Why its parser could not be asked.
    source: Literal["asked", "remembered"] = "asked"


def key(content: str, words: tuple[str, ...]) -> str:
    """What a verdict depends on."""
    asked = json.dumps([content, words, hashlib.sha256(PROGRAM).hexdigest()])
    return hashlib.sha256(asked.encode()).hexdigest()[:32]


def parse_memory(text: str) -> dict[str, Any]:
    """The verdicts as the head keeps them; what cannot be read is asked anew."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def remembered(memory: Mapping[str, Any], wanted: str) -> Verdict | None:
    try:
        return Verdict.model_validate({**memory[wanted], "source": "remembered"})
    except (KeyError, TypeError, ValidationError):
        return None


@dataclass(frozen=True)
class Keep:
    """Write the verdicts that are known, the newest first."""

    memory: Mapping[str, Any]

    def __str__(self) -> str:
        return "keep the verdict"


def plan(wanted: str, verdict: Mapping[str, Any], have: Mapping[str, Any]) -> list[Keep]:
    """The last few are kept: going back to an older image or to older arguments is common."""
    if have.get(wanted) == verdict:
        return []
    others = [(name, kept) for name, kept in have.items() if name != wanted]
    return [Keep(dict([(wanted, verdict), *others][:KEPT]))]


def check_command(cluster: Cluster, run: Run, words: tuple[str, ...]) -> tuple[str, ...]:
    """A throwaway container: no GPU, no network, and of the node's files only the model."""
    model = cluster.model.path
    return (
        "docker",
        "run",
        "--rm",
        "--interactive",
        # Passes our end on: as process 1, python would not mind a SIGTERM.
        "--init",
        "--pull=never",
        "--network=none",
        "--workdir=/",
        "--env=HF_HUB_OFFLINE=1",
        f"--name=sparkrail-{cluster.name}-check-{run.id}-{secrets.token_hex(3)}",
        f"--label={CLUSTER_LABEL}={cluster.name}",
        f"--label={ROLE_LABEL}={ROLE}",
        f"--label={RUN_LABEL}={run.id}",
        f"--mount=type=bind,source={model},target={model},readonly",
        "--entrypoint=python3",
        cluster.image.name,
        "-",
        json.dumps(words),
    )


def parse_verdict(result: Result) -> Verdict:
    """What the relayed program said; a program that came to no end is no verdict."""
    if result.code == NO_PYTHON:
        return Verdict(missing=("python3", "vllm", "ray"))
    last = result.stdout.strip().rpartition("\n")[2]
    try:
        return Verdict.model_validate_json(last)
    except ValidationError:
        said = (result.stderr or result.stdout).strip().splitlines()[-1:]
        return Verdict(unparsed=f"exit code {result.code}: {' '.join(said)}")


@step(STEP)
def check_engine(cluster: Cluster, node: Node, run: Run, home: str, content: str) -> Outcome:
    """The verdict on the head's image of this content: remembered there, or asked for."""
    remote = connect(cluster, node)
    words = arguments(cluster)
    known = read_memory(remote, memory_path(cluster, home))
    verdict = remembered(known, key(content, words)) or ask(cluster, node, remote, run, words)
    return Outcome(
        step=STEP, node=node.name, status="unchanged", detail=_told(verdict), data=verdict
    )


@step("engine verdict")
def remember_engine(
    cluster: Cluster, node: Node, run: Run, home: str, content: str, verdict: Verdict
) -> Outcome:
    """The head keeps the verdict, so that the same question costs nothing the next time."""
    remote = connect(cluster, node)
    path, wanted = memory_path(cluster, home), key(content, arguments(cluster))
    kept = verdict.model_dump(mode="json", exclude={"source"})

    def put(new: Mapping[str, Any]) -> None:
        remote.put(path, (json.dumps(new, indent=1) + "\n").encode())

    return converge(
        "engine verdict",
        node.name,
        lambda: read_memory(remote, path),
        lambda have: plan(wanted, kept, have),
        lambda do: put(do.memory),
        dry_run=run.dry_run,
    )


def memory_path(cluster: Cluster, home: str) -> str:
    return f"{state_folder(cluster, home)}/engine.json"


def read_memory(remote: Remote, path: str) -> dict[str, Any]:
    return parse_memory(remote.run(("sh", "-c", '[ ! -e "$1" ] || cat -- "$1"', "sh", path)).stdout)


def ask(cluster: Cluster, node: Node, remote: Remote, run: Run, words: tuple[str, ...]) -> Verdict:
    _remove_forgotten(cluster, node)
    try:
        result = remote.run(
            check_command(cluster, run, words), stdin=PROGRAM, timeout=TIMEOUT, ok=range(256)
        )
    except CommandTimedOut as error:
        return Verdict(unparsed=error.brief)
    if result.code == 125:  # docker itself could not run it.
        raise CommandFailed(
            "the engine's parser could not be started",
            node=node.name,
            details=result.stderr.strip()[-1000:],
        )
    return parse_verdict(result)


def _remove_forgotten(cluster: Cluster, node: Node) -> None:
    """What a run left that was killed together with the node's docker client."""
    labels = [f"{CLUSTER_LABEL}={cluster.name}", f"{ROLE_LABEL}={ROLE}"]
    with engine(cluster, node) as client:
        for row in client.api.containers(all=True, filters={"label": labels}):
            if time.time() - row.get("Created", 0) > 2 * TIMEOUT:
                client.api.remove_container(row["Id"], force=True, v=True)


def _told(verdict: Verdict) -> str:
    if verdict.missing:
        return f"no {', no '.join(verdict.missing)}"
    if verdict.unparsed or verdict.refused:
        return verdict.unparsed or f"refused: {verdict.refused}"
    named = ", ".join(f"{name} {version}" for name, version in verdict.versions.items())
    return f"{named}, arguments accepted ({verdict.source})"
