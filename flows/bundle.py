"""An archive for a bug report: all that there is to know of a cluster, without its secrets."""

import platform
import subprocess
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from blocks import Cluster
from flows.status import tell
from flows.steps import Steps, call, conduct
from tasks.bundles import Parts, gather_node, write
from tasks.converge import Outcome
from tasks.errors import SparkrailError
from tasks.inventory import load_cluster, spec_text
from tasks.report import Report, as_json
from tasks.secret_values import load_secrets

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("sparkrail", "prefect", "fabric", "paramiko", "docker", "pydantic")
README = """\
What sparkrail knew of the cluster {cluster} on {at}.

status.json, status.txt   what runs where against what was asked
nodes/NAME/               facts, containers, logs (the last {lines} lines of each), our files
spec.yaml, versions.json  what was asked for, and by which sparkrail
report.md                 the last report of Prefect, where one is to be had

Secrets are {hidden} everywhere: those of the spec's blocks, those that the nodes hold, and what
looks like one. Host names, addresses, paths, users and processes are as they are; vLLM's log holds
prompts if it was told to log requests. Look it through before you send it.
"""


class Made(BaseModel, frozen=True):
    """What came of it; the document of `--json`."""

    cluster: str
    file: str | None = None
    bytes: int = 0
    missing: dict[str, str] = {}
    error: str | None = None
    exit_code: int = 0

    def as_json(self) -> str:
        return self.model_dump_json(indent=2, exclude={"exit_code"})

    @property
    def told(self) -> str:
        if self.file is None:
            return str(self.error)
        missing = "".join(f"\nnot in it: {why}" for why in self.missing.values())
        return f"{self.file}: {self.bytes / 1024:.0f} KiB; secrets are taken out{missing}"


def bundle(name: str, lines: int, output: str | None = None, *, prefect: bool = False) -> Made:
    """Write the archive; what cannot be read is told in it, and is no failure."""
    at = time.localtime()
    looked = conduct(name, tell, dry_run=True)
    if looked.exit_code == 2:
        return Made(cluster=looked.cluster, error=looked.error, exit_code=2)
    cluster = load_cluster(name)
    gathered: Parts = {}
    ended = conduct(name, partial(gather, lines=lines, into=gathered), dry_run=True)
    missing = gathered.pop("missing", {})
    if ended.error:
        missing["all"] = ended.error
    parts = about(cluster, name, looked, lines, at) | gathered
    if prefect:
        parts["report.md"] = last_report(cluster)
    if missing:
        parts["not-read.txt"] = "\n".join(missing.values()) + "\n"
    folder = f"sparkrail-{cluster.name}-{time.strftime('%Y%m%d-%H%M%S', at)}"
    path = Path(output or f"{folder}.tar.gz").expanduser()
    try:
        size = write(path, folder, parts)
    except OSError as error:
        why = f"{path} cannot be written: {error.strerror}; give another one by --output"
        return Made(cluster=cluster.name, error=why, exit_code=1)
    return Made(cluster=cluster.name, file=str(path), bytes=size, missing=missing)


def gather(steps: Steps, *, lines: int, into: Parts) -> None:
    """Every node, side by side; one that is away is a part of the answer."""
    missing = into["missing"] = {}
    try:
        load_secrets(steps.cluster)
    except Exception as error:  # Whatever Prefect's API raises: the nodes know their secrets too.
        missing["secrets"] = f"the secrets block: {error}"
    nodes = steps.cluster.nodes
    calls = [call(gather_node, node=node, lines=lines) for node in nodes]
    for node, result in zip(nodes, steps.attempt(calls), strict=True):
        if isinstance(result, Outcome):
            into |= {f"nodes/{node.name}/{name}": part for name, part in result.data.items()}
        elif isinstance(result, SparkrailError):
            missing[node.name] = str(result)
            into[f"nodes/{node.name}/not-read.txt"] = f"{result}\n"
        else:
            raise result


def about(cluster: Cluster, name: str, looked: Report, lines: int, at: time.struct_time) -> Parts:
    """What is known here."""
    words = {"cluster": cluster.name, "lines": lines, "hidden": "***"}
    return {
        "README.txt": README.format(at=time.strftime("%Y-%m-%d %H:%M:%S %z", at), **words),
        "spec.yaml": spec_text(name),
        "versions.json": versions(),
        "status.json": as_json(looked),
        "status.txt": in_words(looked),
    }


def in_words(looked: Report) -> str:
    rows = [f"{r.node}  {r.what}  {r.state}: {r.runs}" for r in looked.running or ()]
    rows += [f"{p.node}  {p.check}  {p.verdict}: {p.detail}" for p in looked.problems]
    return "\n".join([*rows, looked.error or ""]).strip() + "\n"


def versions() -> dict[str, str]:
    found = {name: version(name) for name in PACKAGES}
    found |= {"python": platform.python_version(), "system": platform.platform()}
    try:
        asked = ("git", "-C", str(ROOT), "describe", "--always", "--dirty")
        said = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=False)
        found["commit"] = said.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        pass  # Neither git nor a checkout is needed to run.
    return found


def last_report(cluster: Cluster) -> str:
    """The report of the last run, which Prefect keeps."""
    from prefect.artifacts import Artifact

    try:
        found: Any = Artifact.get(f"report-{cluster.name}")
    except Exception as error:  # Whatever the API client raises.
        return f"it could not be read: {error}\n"
    return "there is none\n" if found is None else f"{found.description}\n\n{found.data}\n"
