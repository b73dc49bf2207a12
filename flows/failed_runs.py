"""How a run fails: by steps that failed, and in the words that people read first."""

from collections.abc import Sequence
from typing import Literal

from tasks.errors import SparkrailError
from tasks.report import Report

Failure = tuple[str, str, BaseException]  # Step, node, error.
Ending = Literal["rolled-back", "broken"]


class StepsFailed(SparkrailError):
    """One or more steps failed; all of them are named."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        self.failures = tuple(failures)
        super().__init__("\n".join(_failure_text(*failure) for failure in failures))

    @property
    def first(self) -> BaseException:
        return self.failures[0][2]


class Recovered(StepsFailed):
    """Steps failed after the old release was stopped, and this is what was done about it."""

    def __init__(
        self, cause: StepsFailed, told: str, ending: Ending | None, second: StepsFailed | None
    ) -> None:
        super().__init__(cause.failures)
        self.told = told
        self.ending = ending
        self.second = second
        said = [told, str(second)] if second else [told]
        SparkrailError.__init__(self, "\n".join([self.brief, *said]))


class RunFailed(SparkrailError):
    """How a flow run that failed ended: what Prefect keeps of a failure must be an exception."""

    def __init__(self, report: Report) -> None:
        super().__init__(report.error or "")
        self.report = report


def _failure_text(step: str, node: str, error: BaseException) -> str:
    if not isinstance(error, SparkrailError):
        return f"{step} on {node}: {type(error).__name__}: {error}"
    if error.node not in ("", node):
        return f"{step} on {node}: {error}"
    # What waits for something says itself what for.
    said = (error.brief.removeprefix(f"{step}: "), error.details, error.remedy)
    return f"{step} on {node}: " + "\n".join(part for part in said if part)


def told(error: BaseException | None) -> str | None:
    """What a report says of an error."""
    if error is None or isinstance(error, SparkrailError):
        return None if error is None else str(error)
    return f"{type(error).__name__}: {error}"


def summary_of(error: BaseException | None) -> str:
    """What the Prefect UI shows without line breaks: what to do before all that was said."""
    if not isinstance(error, StepsFailed):
        return told(error) or ""
    lines = [_failure_summary(*failure) for failure in error.failures]
    if isinstance(error, Recovered):
        lines.append(error.told)
        lines += [_failure_summary(*each) for each in error.second.failures] if error.second else []
    return "\n".join(lines)


def _failure_summary(step: str, node: str, error: BaseException) -> str:
    if not isinstance(error, SparkrailError):
        return _failure_text(step, node, error)
    where = "" if error.node in ("", node) else f"{error.node}: "
    return "\n".join(
        part
        for part in (
            f"{step} on {node}: {where}{error.brief.removeprefix(f'{step}: ')}",
            error.remedy and f"What to do: {error.remedy}",
            error.details and f"What was said: {error.details}",
        )
        if part
    )
