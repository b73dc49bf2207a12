"""What an engine image says of itself, and its own parser of the arguments of `vllm serve`.

Run by the image's own python3 in a throwaway container, without a GPU: it imports vLLM and parses,
and starts nothing. Argument: the words after `vllm`, in JSON. Prints one line of JSON at its end.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import shutil
import signal
import sys
from importlib import metadata
from typing import Any

# Whoever started us may be gone, and our container with us then.
SECONDS = 120
PROGRAMS = ("vllm", "ray")
# Distributions of the same thing for several CUDAs; one is there.
VERSIONS = {
    "vllm": ("vllm",),
    "ray": ("ray",),
    "torch": ("torch",),
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
}
LONGEST = 600


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name, distributions in VERSIONS.items():
        for distribution in distributions:
            with contextlib.suppress(metadata.PackageNotFoundError):
                found.setdefault(name, metadata.version(distribution))
    return found


def parser() -> tuple[Any, Any]:
    """vLLM's parser of its command line, and its command `serve`."""
    from vllm.entrypoints.cli import serve

    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:  # vLLM before 0.12
        from vllm.utils import FlexibleArgumentParser
    made = FlexibleArgumentParser(prog="vllm")
    commands = made.add_subparsers(required=True, dest="subparser")
    command = serve.cmd_init()[0]
    command.subparser_init(commands)
    return made, command


def refusal(words: list[str], made: Any, command: Any) -> str:
    """Why `vllm serve` would not begin with these words, by itself; nothing when it would."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            arguments = made.parse_args(words)
            command.validate(arguments)
    except SystemExit as ended:
        if not ended.code:
            return "it would print its help and end"
        return last_error(said.getvalue()) or f"it ends with exit code {ended.code}"
    except Exception as error:  # What a wrong value is depends on the option.
        return f"{type(error).__name__}: {error}"[:LONGEST]
    return ""


def last_error(text: str) -> str:
    """Without the usage, which lists every option there is."""
    return text.rpartition("error: ")[2].strip()[:LONGEST]


def look(words: list[str]) -> dict[str, Any]:
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    found: dict[str, Any] = {"missing": missing, "versions": versions()}
    if missing:
        return found
    try:
        made, command = parser()
    except Exception as error:  # Without a GPU, or in another version, vLLM may do anything.
        return {**found, "unparsed": f"{type(error).__name__}: {error}"[:LONGEST]}
    return {**found, "refused": refusal(words, made, command)}


def main(arguments: str) -> None:
    signal.alarm(SECONDS)
    # Our program came by standard input: modules must not come from the folder that we are in.
    sys.path[:] = [entry for entry in sys.path if entry]
    # What vLLM prints while it is imported must not mix with our answer.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps(look(json.loads(arguments))), file=answer, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
