"""Which scheduled runs do nothing: late ones, superseded ones, and never one a person asked for."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun

from flows.skip import is_of_its_schedule, newest_success, reason_to_skip

DUE = datetime(2026, 11, 30, 4, 0, tzinfo=UTC)


def after(**time: float) -> datetime:
    return DUE + timedelta(**time)


@pytest.mark.parametrize(
    ("now", "newest", "said"),
    [
        pytest.param(DUE, None, "", id="on time"),
        pytest.param(after(minutes=59), None, "", id="late, within the limit"),
        pytest.param(after(hours=1), None, "", id="at the limit"),
        pytest.param(
            after(hours=1, seconds=1),
            None,
            "skipped: due at 2026-11-30 04:00 UTC, it starts 1 h 00 min late, and the limit",
            id="past the limit",
        ),
        pytest.param(
            after(days=1, hours=2, minutes=5), None, "it starts 26 h 05 min late", id="a day late"
        ),
        pytest.param(after(minutes=5), after(hours=-3), "", id="a success before it was due"),
        pytest.param(after(minutes=5), DUE, "", id="a success at that moment"),
        pytest.param(
            after(minutes=5),
            after(minutes=3),
            "skipped: due at 2026-11-30 04:00 UTC, and a deploy that ended at 2026-11-30 04:03 UTC "
            "was fine.",
            id="a success since then",
        ),
        pytest.param(after(hours=2), after(hours=1), "2 h 00 min late", id="late and superseded"),
        pytest.param(after(minutes=-1), None, "", id="a clock that is behind"),
    ],
)
def test_reason_to_skip(now: datetime, newest: datetime | None, said: str) -> None:
    reason = reason_to_skip(DUE, now, newest)
    assert said in reason
    assert bool(reason) == bool(said)


@pytest.mark.parametrize(
    ("auto_scheduled", "run_count", "history", "expected"),
    [
        pytest.param(True, 1, ["Scheduled", "Late", "Pending", "Running"], True, id="scheduled"),
        pytest.param(False, 1, ["Scheduled", "Pending", "Running"], False, id="on demand"),
        pytest.param(True, 2, ["Running", "Failed", "AwaitingRetry"], False, id="retried"),
        pytest.param(
            True,
            1,
            ["Scheduled", "Pending", "Crashed", "AwaitingRetry", "Running"],
            False,
            id="retried, and had never run",
        ),
    ],
)
def test_only_a_schedule_s_own_first_attempt_may_be_skipped(
    auto_scheduled: bool, run_count: int, history: Sequence[str], expected: bool
) -> None:
    run = FlowRun(flow_id=uuid4(), auto_scheduled=auto_scheduled, run_count=run_count)
    assert is_of_its_schedule(run, history) is expected


def run(ended: datetime | None, state: str, **parameters: Any) -> FlowRun:
    return FlowRun(
        flow_id=uuid4(),
        end_time=ended,
        state_name=state,
        parameters={"cluster": "sparks"} | parameters,
    )


@pytest.mark.parametrize(
    ("runs", "newest"),
    [
        pytest.param([], None, id="none"),
        pytest.param([run(DUE, "Changed"), run(after(hours=1), "Unchanged")], 1, id="the newest"),
        pytest.param([run(DUE, "Planned")], None, id="a dry run"),
        pytest.param([run(DUE, "Skipped")], None, id="one that was skipped itself"),
        pytest.param([run(DUE, "Changed", cluster="others")], None, id="another cluster's"),
        pytest.param([run(None, "Changed")], None, id="without an end"),
    ],
)
def test_newest_success(runs: list[FlowRun], newest: int | None) -> None:
    expected = None if newest is None else after(hours=newest)
    assert newest_success(runs, "sparks") == expected
