"""The one error of the lab: what went wrong, in words for a person."""

from pathlib import Path


class LabError(Exception):
    """Printed as it is; the command then exits with 1."""


def log_tail(path: Path, lines: int = 15) -> str:
    """The end of a log, indented, to stand below an error."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return f"  (no log at {path})"
    tail = text.splitlines()[-lines:] or ["(empty)"]
    return "\n".join([f"  {path}:", *(f"  | {line}" for line in tail)])
