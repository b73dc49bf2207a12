"""The programs in `tasks/relayed/`, run on a node by its own python3; nothing is written there."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.errors import CommandFailed
from tasks.remote import Remote

FOLDER = Path(__file__).parent / "relayed"


def run_program(
    remote: Remote,
    name: str,
    *arguments: str,
    timeout: float,
    on_progress: Callable[[Any], None] | None = None,
    prefix: tuple[str, ...] = (),
) -> Any:
    """What the program says in its last line of JSON; the lines before it tell its progress."""
    result = remote.run(
        (*prefix, "python3", "-", name, *arguments),
        timeout=timeout,
        stdin=(FOLDER / f"{name}.py").read_bytes(),
        on_output=_by_line(on_progress) if on_progress else None,
    )
    try:
        return json.loads(result.stdout.rstrip().rpartition("\n")[2])
    except ValueError as error:
        raise CommandFailed(
            f"{name}.py does not answer in JSON",
            node=remote.node.name,
            details=(result.stderr or result.stdout)[-1000:],
        ) from error


def _by_line(on_progress: Callable[[Any], None]) -> Callable[[str], None]:
    rest = ""

    def take(text: str) -> None:
        nonlocal rest
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            if line.startswith('{"progress"'):
                on_progress(json.loads(line)["progress"])

    return take
