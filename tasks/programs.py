"""The programs in `tasks/relayed/`, run on a node by its own python3; nothing is written there."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tasks.errors import CommandFailed
from tasks.remote import Remote

FOLDER = Path(__file__).parent / "relayed"
# What a program imports of ours goes with it, and what it is told must not show in `ps`.
PACKAGE = "tasks.relayed"
BUNDLE = """\
import json, sys, types
for name, text in json.loads({parts!r}).items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
sys.argv.append({orders!r})
exec(compile({program!r}, {name!r}, "exec"))
"""


def run_program(
    remote: Remote,
    name: str,
    *arguments: str,
    timeout: float,
    on_progress: Callable[[Any], None] | None = None,
    prefix: tuple[str, ...] = (),
    parts: tuple[str, ...] = (),
    orders: Any = None,
) -> Any:
    """What the program says in its last line of JSON; the lines before it tell its progress.

    `orders` are its last argument, which nobody else on the node sees; `parts` the modules of
    `relayed` that it imports.
    """
    result = remote.run(
        (*prefix, "python3", "-", name, *arguments),
        timeout=timeout,
        stdin=program_text(name) if orders is None else bundle(name, parts, orders),
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


def program_text(name: str) -> bytes:
    return (FOLDER / f"{name}.py").read_bytes()


def bundle(name: str, parts: Sequence[str], orders: Any) -> bytes:
    """One program of a program, its parts, and what it is told."""
    texts = {f"{PACKAGE}.{part}": program_text(part).decode() for part in parts}
    return BUNDLE.format(
        parts=json.dumps(texts),
        orders=json.dumps(orders),
        program=program_text(name).decode(),
        name=f"{name}.py",
    ).encode()


def _by_line(on_progress: Callable[[Any], None]) -> Callable[[str], None]:
    rest = ""

    def take(text: str) -> None:
        nonlocal rest
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            if line.startswith('{"progress"'):
                on_progress(json.loads(line)["progress"])

    return take
