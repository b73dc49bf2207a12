"""The programs in `tasks/relayed/`, run on a node by its own python3; nothing is written there."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.errors import CommandFailed
from tasks.remote import Remote

FOLDER = Path(__file__).parent / "relayed"
NEIGHBOUR = re.compile(r"^from tasks\.relayed\.(\w+) import", re.MULTILINE)
# Makes the neighbours of a program known to it under their names here; then comes the program.
WITH_NEIGHBOURS = """\
import sys, types
for name, text in {neighbours!r}.items():
    module = sys.modules[f"tasks.relayed.{{name}}"] = types.ModuleType(f"tasks.relayed.{{name}}")
    exec(compile(text, f"{{name}}.py", "exec", dont_inherit=True), module.__dict__)
sys.argv += {orders!r}
exec(compile({text!r}, {name!r}, "exec", dont_inherit=True))
"""


def program(name: str, orders: Any = None) -> bytes:
    """A program as one text, with the neighbours that it imports and its orders.

    The orders are its last argument, as JSON; unlike the others they do not show in `ps`.
    """
    text = read(name)
    neighbours: dict[str, str] = {}
    _gather(text, neighbours)
    if not neighbours and orders is None:
        return text.encode()
    return WITH_NEIGHBOURS.format(
        neighbours=neighbours,
        orders=[] if orders is None else [json.dumps(orders)],
        text=text,
        name=f"{name}.py",
    ).encode()


def _gather(text: str, found: dict[str, str]) -> None:
    """What a text imports of its neighbours, and these in turn, in the order of their need."""
    for name in NEIGHBOUR.findall(text):
        if name not in found:
            needed = read(name)
            _gather(needed, found)
            found[name] = needed


def read(name: str) -> str:
    return (FOLDER / f"{name}.py").read_text()


def run_program(
    remote: Remote,
    name: str,
    *arguments: str,
    timeout: float,
    on_progress: Callable[[Any], None] | None = None,
    prefix: tuple[str, ...] = (),
    orders: Any = None,
) -> Any:
    """What the program says in its last line of JSON; the lines before it tell its progress."""
    result = remote.run(
        (*prefix, "python3", "-", name, *arguments),
        timeout=timeout,
        stdin=program(name, orders),
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
