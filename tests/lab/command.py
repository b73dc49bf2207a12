"""Running the host's programs."""

import subprocess
import sys
from collections.abc import Sequence
from typing import IO

from tests.lab.errors import LabError


def run(argv: Sequence[str], *, stdin: str | IO[bytes] | None = None, timeout: float = 120) -> str:
    """The program's stdout; raises with its stderr when it fails or takes too long."""
    try:
        done = subprocess.run(
            argv,
            input=stdin.encode() if isinstance(stdin, str) else None,
            stdin=(stdin or subprocess.DEVNULL) if not isinstance(stdin, str) else None,
            capture_output=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LabError(f"`{' '.join(argv)}` did not end within {timeout:.0f} s") from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise LabError(f"`{' '.join(argv)}` failed with {done.returncode}:\n{said}")
    return str(done.stdout.decode(errors="replace"))


def say(message: str) -> None:
    """One line of progress."""
    print(message, file=sys.stderr, flush=True)
