"""What follows on the end of an attempt."""

from __future__ import annotations

import pytest

from lockstep.attempts.retry_policy import LONGEST_PAUSE_S, RetryBudget, outcome_of
from lockstep.errors import (
    ClusterError,
    CorruptionError,
    DeterminismError,
    DriftError,
    JobError,
    LockstepError,
    NumericsError,
    ResumeError,
    SpecError,
    StorageError,
    TransientStorageError,
)
from lockstep.spec.fields import Faults


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ClusterError(""), "worker lost"),
        (JobError(""), "job error"),
        (NumericsError(""), "job error"),
        (ResumeError(""), "final"),
        (SpecError(""), "final"),
        (StorageError(""), "final"),
        (DeterminismError(""), "final"),
        (DriftError(""), "final"),
        (CorruptionError(""), "corrupted"),
    ],
)
def test_each_error_is_one_kind_of_end(error: LockstepError, outcome: str) -> None:
    assert outcome_of(error) == outcome


def test_lost_workers_are_replaced_until_nothing_moves() -> None:
    budget = RetryBudget(Faults(max_worker_failures=2))
    assert budget.decide("worker lost", 0)[:2] == (True, 0.0)
    assert budget.decide("worker lost", 0)[:2] == (True, 1.0)
    last = budget.decide("worker lost", 0)
    assert not last.again
    assert last.why == ("3 attempts in a row ended without a new checkpoint; faults.max_worker_failures is 2")


def test_a_run_that_moves_is_never_given_up() -> None:
    """A month may lose more workers than an hour: what counts is whether a checkpoint came between."""
    budget = RetryBudget(Faults(max_worker_failures=1))
    for step in range(1, 1000):
        assert budget.decide("worker lost", step).again
    assert budget.decide("worker lost", 999).again is False


def test_waits_grow_to_a_bound() -> None:
    budget = RetryBudget(Faults(max_worker_failures=100))
    pauses = [budget.decide("worker lost", 5).pause_s for _ in range(12)]
    assert pauses[:5] == [0.0, 1.0, 2.0, 4.0, 8.0]
    assert pauses[-1] == LONGEST_PAUSE_S


def test_a_job_error_is_not_tried_again_unless_allowed() -> None:
    assert not RetryBudget(Faults()).decide("job error", 10).again
    budget = RetryBudget(Faults(max_job_errors=1))
    assert [budget.decide("job error", 10).again for _ in range(2)] == [True, False]


def test_a_job_that_has_trained_and_is_refused_is_tried_once_more() -> None:
    """A bit that flips in a rehearsal looks like a mistake of the job."""
    budget = RetryBudget(Faults())
    assert [budget.decide("job error", 10, contradicts=True).again for _ in range(2)] == [True, False]
    budget = RetryBudget(Faults())
    assert budget.decide(outcome_of(DeterminismError("other bits")), 10, contradicts=True).again
    assert not RetryBudget(Faults()).decide("job error", 10, contradicts=False).again


def test_what_no_attempt_can_mend_ends_the_run() -> None:
    budget = RetryBudget(Faults(max_worker_failures=100, max_job_errors=100))
    assert not budget.decide("final", 10).again


def test_storage_that_fails_is_tried_again_after_a_pause_and_not_for_ever() -> None:
    error = TransientStorageError("a disk or quota is full")
    budget = RetryBudget(Faults(max_worker_failures=3))
    found = [budget.decide(outcome_of(error), 4) for _ in range(4)]
    assert [decision.again for decision in found] == [True, True, True, False]
    assert [decision.pause_s for decision in found[:3]] == [4.0, 8.0, 16.0]
    assert budget.decide(outcome_of(error), 8).pause_s == 4.0  # a new checkpoint: it went on meanwhile
    assert outcome_of(StorageError("no permission")) == "final"


def test_wrong_bits_are_taken_again_as_often_as_a_lost_worker_is_replaced() -> None:
    budget = RetryBudget(Faults(max_worker_failures=1))
    first = budget.decide("corrupted", 4)
    assert (first.again, first.why) == (True, "these steps are taken again")
    assert not budget.decide("worker lost", 4).again
