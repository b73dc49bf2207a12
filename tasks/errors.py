"""The errors we raise on purpose.

SparkrailError             brief, details, remedy
├── InvalidSpec            before any connection; all problems at once
├── PreflightFailed        all nodes, all problems, before anything is touched
├── Locked                 another run works on this cluster
├── NodeUnreachable        connecting, or the transport was lost; the step is tried again
├── HostKeyRefused         unknown or changed host key
├── LoginRefused           the node does not accept our user or key
├── CommandFailed          a command on a node exited with a code that is no answer
│   └── EngineSilent       docker's engine does not answer; the step is tried again
├── CommandTimedOut        a command on a node passed its deadline; its process group was ended
├── Cancelled              the run was cancelled; the remote process group was ended
├── FailedBefore           the same release failed before, and nobody wants it tried again
├── NotOurs                a container under our name that we did not start
├── NotConverged           steps ran, and the plan is still not empty
└── NotReady               the deadline passed, or what we waited for is gone
"""

from collections.abc import Sequence
from typing import Any


class SparkrailError(Exception):
    """What failed on which node, what it said, and what to do about it."""

    def __init__(self, brief: str, *, node: str = "", details: str = "", remedy: str = "") -> None:
        super().__init__(brief, node, details, remedy)
        self.brief = brief
        self.node = node
        self.details = details
        self.remedy = remedy

    def __str__(self) -> str:
        head = f"{self.node}: {self.brief}" if self.node else self.brief
        return "\n".join(part for part in (head, self.details, self.remedy) if part)

    def __reduce__(self) -> tuple[object, ...]:
        # Prefect pickles what a task raises; keyword-only arguments need this.
        words = (type(self), self.brief, self.node, self.details, self.remedy)
        return _rebuild, words, vars(self)


def _rebuild(
    kind: type[SparkrailError], brief: str, node: str, details: str, remedy: str
) -> SparkrailError:
    error = kind.__new__(kind)
    SparkrailError.__init__(error, brief, node=node, details=details, remedy=remedy)
    return error


class InvalidSpec(SparkrailError):
    """The cluster spec has mistakes; nothing was touched."""


class PreflightFailed(SparkrailError):
    """Something on the nodes would make the deploy fail; nothing was touched."""

    problems: Sequence[Any] = ()  # All rows of the table, tasks.preflight.Problem.


class Locked(SparkrailError):
    """Another run works on this cluster."""


class NodeUnreachable(SparkrailError):
    """No SSH connection to the node, or it broke."""


class HostKeyRefused(SparkrailError):
    """The node's host key is unknown, or not the one we know."""


class LoginRefused(SparkrailError):
    """The node answers, but does not let us in."""


class CommandFailed(SparkrailError):
    """A command on a node failed."""


class EngineSilent(CommandFailed):
    """The docker engine of the node does not answer; it may be restarting."""


class CommandTimedOut(SparkrailError):
    """A command on a node took longer than it may."""


class Cancelled(SparkrailError):
    """The run was cancelled."""


class FailedBefore(SparkrailError):
    """The same release failed before; it is not tried again by itself."""

    heals: bool = True  # Whether the last good release should run meanwhile.


class NotOurs(SparkrailError):
    """A container stands under our name, and we did not start it."""


class NotConverged(SparkrailError):
    """We acted, and the node is still not as wanted."""


class NotReady(SparkrailError):
    """What we waited for did not come."""

    retryable: bool = False  # Whether the same again may go better.


# What the same step may overcome some seconds later.
MAY_PASS = (NodeUnreachable, EngineSilent)
