"""What a deploy that changes nothing spends beyond its remote commands.

`python -m tests.bench.unchanged NAME` for a cluster that is deployed, with PREFECT_API_URL set.
"""

import argparse
import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tasks import endpoint, engines, locks, remote

Span = tuple[float, float]


@dataclass
class Watched:
    """When anything at all was asked of a node, by what kind of question."""

    spans: dict[str, list[Span]] = field(default_factory=dict)

    def wrap(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.monotonic()
            try:
                return function(*arguments, **options)
            finally:
                self.spans.setdefault(kind, []).append((began, time.monotonic()))

        return timed

    def seconds(self, *kinds: str) -> float:
        """Of these kinds, or of all; what goes on side by side counts once."""
        chosen = [span for kind in kinds or self.spans for span in self.spans.get(kind, [])]
        return union(chosen)


def union(spans: list[Span]) -> float:
    """How long at least one of them lasted."""
    total, until = 0.0, float("-inf")
    for began, ended in sorted(spans):
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total


@dataclass(frozen=True)
class Figures:
    """Of one run, in seconds."""

    outcome: str
    total: float
    remote: float
    kinds: dict[str, float]

    @property
    def beyond(self) -> float:
        return self.total - self.remote

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {seconds:.2f}" for kind, seconds in self.kinds.items())
        return (
            f"{self.outcome}: {self.total:.2f} s, at least one remote question open for "
            f"{self.remote:.2f} s ({kinds}), beyond them {self.beyond:.2f} s"
        )


WATCHED: tuple[tuple[str, Any, str], ...] = (
    ("logins", remote, "_log_in"),
    ("commands", remote.Remote, "run"),
    ("commands", remote.Remote, "start"),
    ("tunnels", remote.Remote, "open_tunnel"),
    ("docker", engines._OverConnection, "send"),
    ("endpoint", endpoint, "_response"),
    ("commands", locks, "_answer"),
)


@contextlib.contextmanager
def watched() -> Iterator[Watched]:
    """While every question to a node is timed."""
    found = Watched()
    before = [(owner, name, getattr(owner, name)) for _, owner, name in WATCHED]
    try:
        for kind, owner, name in WATCHED:
            setattr(owner, name, found.wrap(kind, getattr(owner, name)))
        yield found
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def measure(cluster: str) -> Figures:
    """One deploy: by Prefect where an API is set, else by plain calls."""
    from prefect.settings import PREFECT_API_URL

    from flows.deploy import bring_up, deploy
    from flows.steps import conduct

    with watched() as found:
        began = time.monotonic()
        if PREFECT_API_URL.value():
            state: Any = deploy(cluster=cluster, return_state=True)
            outcome = str(state.name)
        else:
            outcome = conduct(cluster, bring_up).outcome
        total = time.monotonic() - began
    kinds = {kind: found.seconds(kind) for kind in found.spans}
    return Figures(outcome, total, found.seconds(), kinds)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.unchanged", description=__doc__)
    parser.add_argument("cluster", metavar="NAME")
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    for _ in range(options.times):
        print(measure(options.cluster), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
