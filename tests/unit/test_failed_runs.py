"""What a run that failed says: every step that did, and what was done about it."""

import pickle

from flows.failed_runs import Recovered, StepsFailed, summary_of, told
from flows.steps import as_state
from tasks.errors import CommandFailed, NotReady
from tasks.report import Report

CAUSE = StepsFailed(
    [("vLLM serve", "head", NotReady("out of memory", node="head", remedy="Use less."))]
)
SECOND = StepsFailed([("worker join", "worker1", CommandFailed("exit code 1", node="worker1"))])


def test_both_causes_are_told_in_their_order() -> None:
    error = Recovered(CAUSE, "The rollback failed, too.", "broken", SECOND)
    assert told(error) == (
        "vLLM serve on head: out of memory\nUse less.\nThe rollback failed, too.\n"
        "worker join on worker1: exit code 1"
    )
    assert summary_of(error) == (
        "vLLM serve on head: out of memory\nWhat to do: Use less.\nThe rollback failed, too.\n"
        "worker join on worker1: exit code 1"
    )
    assert error.first is CAUSE.first


def test_one_that_went_well_has_one_cause() -> None:
    error = Recovered(CAUSE, "Rolled back.", "rolled-back", None)
    assert told(error) == "vLLM serve on head: out of memory\nUse less.\nRolled back."


def test_it_survives_being_kept_by_prefect() -> None:
    error = pickle.loads(pickle.dumps(Recovered(CAUSE, "Rolled back.", "rolled-back", None)))
    assert (error.ending, str(error)) == ("rolled-back", told(error))


def test_the_state_of_a_plain_failure_keeps_its_name() -> None:
    plain = Report(cluster="x", state="failed", outcome="changed", seconds=1, error="why")
    cancelled = plain.model_copy(update={"cancelled": True})
    assert [as_state(each).name for each in (plain, cancelled)] == ["Failed", "Cancelled"]
