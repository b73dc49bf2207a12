"""The launch script and what it reads, on a node: the same bytes everywhere, written whole."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from pydantic import BaseModel

from blocks import Cluster, Node
from tasks.converge import Outcome, Run, converge, step
from tasks.remote import Remote, connect
from tasks.topology import Files, run_folder

NAMES = ("launch", "node.env", "serve.args")
# Prints "mode sha256 name" for each of the files that is there; none of them is no error.
LOOK = """\
cd -- "$1" 2>/dev/null || exit 0
shift
for name in "$@"; do
    [ -f "$name" ] || continue
    sum=$(sha256sum <"$name") && echo "$(stat -c %a -- "$name") ${sum%% *} $name"
done"""


class File(BaseModel, frozen=True):
    """A file as it stands on a node."""

    mode: int
    sha256: str


@dataclass(frozen=True)
class PutFile:
    """Write one file; its content never shows."""

    name: str
    mode: int
    content: bytes = field(repr=False)

    def __str__(self) -> str:
        return f"write {self.name}"


@dataclass(frozen=True)
class RemoveFile:
    """Take away a file that this node must not have."""

    name: str

    def __str__(self) -> str:
        return f"remove {self.name}"


Step = PutFile | RemoveFile


def parse_look(stdout: str) -> dict[str, File]:
    """What LOOK printed."""
    rows = (line.split(" ", 2) for line in stdout.splitlines())
    return {name: File(mode=int(mode, 8), sha256=digest) for mode, digest, name in rows}


def plan(want: Files, have: Mapping[str, File]) -> list[Step]:
    """Files that differ are written, files that do not belong here are removed."""
    wanted = {
        name: (PutFile(name, mode, content), File(mode=mode, sha256=sha256(content).hexdigest()))
        for name, content, mode in want.items()
    }
    stale: list[Step] = [RemoveFile(name) for name in have if name not in wanted]
    return [put for name, (put, file) in wanted.items() if have.get(name) != file] + stale


def observe(remote: Remote, folder: str) -> dict[str, File]:
    return parse_look(remote.run(("sh", "-c", LOOK, "sh", folder, *NAMES)).stdout)


def act(remote: Remote, folder: str, step: Step) -> None:
    path = f"{folder}/{step.name}"
    if isinstance(step, PutFile):
        remote.put(path, step.content, step.mode)
    else:
        remote.run(("rm", "-f", "--", path))


@step("script relay")
def relay_script(cluster: Cluster, node: Node, run: Run, home: str, want: Files) -> Outcome:
    """The node has the launch script, its own variables (mode 0600), and vLLM's arguments."""
    remote = connect(cluster, node)
    folder = run_folder(cluster, home)
    return converge(
        "script relay",
        node.name,
        lambda: observe(remote, folder),
        lambda have: plan(want, have),
        lambda do: act(remote, folder, do),
        dry_run=run.dry_run,
    )
