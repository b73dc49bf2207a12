"""How a relayed program talks with the run that started it: JSON lines, until its input ends.

Relayed with other programs; standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

_speaking = threading.Lock()


def configuration() -> Any:
    """The first line of our input. The end of it, whenever it comes, ends this process."""
    first = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    return first


def _end_with_input() -> None:
    while sys.stdin.buffer.read(1):
        pass
    os._exit(0)


def say(value: Any) -> None:
    """One line, from any thread; where nobody listens, there is nothing left to do."""
    try:
        with _speaking:
            print(json.dumps(value), flush=True)
    except OSError:
        os._exit(0)


def wait_for_the_end() -> None:
    threading.Event().wait()
