"""The circuit breaker: what is refused, and in which words."""

import pytest

from tasks.converge import Run
from tasks.failed_releases import FailedRelease, failure, parse_failed, refusal
from tests.unit.specs import RUN

FAILED = FailedRelease(
    digest="bad",
    ending="broken",
    run="run-0",
    at="2026-11-30T04:00:00+0100",
    cause="vLLM serve on head: out of memory",
    second="worker join on worker1: no connection",
)
FORCED = Run(id="run-1", who="ada", force=True)


@pytest.mark.parametrize(
    ("failed", "digest", "run", "refused"),
    [
        pytest.param(None, "bad", RUN, False, id="none failed"),
        pytest.param(FAILED, "bad", RUN, True, id="the same"),
        pytest.param(FAILED, "other", RUN, False, id="another"),
        pytest.param(FAILED, "bad", FORCED, False, id="the same, by force"),
    ],
)
def test_refusal(failed: FailedRelease | None, digest: str, run: Run, refused: bool) -> None:
    assert (refusal(failed, digest, run) is not None) == refused


def test_what_is_told() -> None:
    assert str(refusal(FAILED, "bad", RUN)) == (
        "release bad is not tried again: its rollback failed too, and everything was stopped at "
        "2026-11-30T04:00:00+0100 by run run-0\n"
        "It failed by: vLLM serve on head: out of memory\n"
        "The rollback failed by: worker join on worker1: no connection\n"
        "Nothing was touched. Change the spec, the image or the model; or, when the cause is "
        "mended, deploy with --force."
    )


@pytest.mark.parametrize(
    "text", ["", "\n", "{", '{"digest": "bad"}', '["bad"]'], ids=["absent", *"abcd"]
)
def test_what_cannot_be_read_keeps_nobody_from_trying(text: str) -> None:
    assert parse_failed(text) is None


def test_a_failure_survives_its_file() -> None:
    made = failure("bad", RUN, "rolled-back", "why")
    assert (made.cause, made.second, made.run) == ("why", "", "run-1")
    assert parse_failed(made.model_dump_json(indent=2)) == made
