"""What to do when an attempt ends: pure, so that every case can be tested.

A mistake in the job comes back however often it is tried; the loss of a worker or a node does not. So the two have
separate budgets, and that of lost workers counts from the newest checkpoint on: a run that makes progress is never given up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from lockstep.errors import (
    ClusterError,
    CorruptionError,
    JobError,
    LockstepError,
    NumericsError,
    ResumeError,
    TransientStorageError,
)
from lockstep.spec.fields import Faults

Outcome = Literal["worker lost", "corrupted", "storage", "job error", "final"]
"""Why an attempt ended early. "final": what another attempt cannot fix, such as a mistake in the spec or a store that refuses."""

LONGEST_PAUSE_S = 30.0
FIRST_STORAGE_PAUSE_S = 4.0


def outcome_of(error: LockstepError) -> Outcome:
    """The outcome that an error stands for."""
    if isinstance(error, ClusterError):
        return "worker lost"
    if isinstance(error, ResumeError):  # every later attempt would be a resume
        return "final"
    if isinstance(error, CorruptionError):
        return "corrupted"
    if isinstance(error, TransientStorageError):
        return "storage"
    if isinstance(error, JobError | NumericsError):
        return "job error"
    return "final"


class Decision(NamedTuple):
    """Whether to start another attempt, after how many seconds, and why or why not."""

    again: bool
    pause_s: float
    why: str


@dataclass(slots=True)
class RetryBudget:
    """How often attempts may end early, and how often they have."""

    faults: Faults
    job_errors: int = 0
    lost: int = 0
    """Attempts that ended for lost workers, wrong bits or failed storage since the checkpoint of `step`."""
    step: int = 0
    """The step of the newest checkpoint at the last such end."""
    contradicted: bool = False
    """Whether an attempt has refused the job that an earlier one had trained."""

    def decide(self, outcome: Outcome, step: int, *, contradicts: bool = False) -> Decision:
        """What to do after an attempt that ended with `outcome`; `step` is that of the newest checkpoint, 0 without one.

        `contradicts`: it refused a job that an earlier attempt had trained. A bit that flips while the job is rehearsed looks like that.
        """
        if outcome in ("worker lost", "corrupted", "storage"):
            self.lost = self.lost + 1 if step <= self.step else 1
            self.step = max(self.step, step)
            most = self.faults.max_worker_failures
            if self.lost > most:
                return Decision(
                    False,
                    0.0,
                    f"{self.lost} attempts in a row ended without a new checkpoint; faults.max_worker_failures is {most}",
                )
            if outcome == "storage":  # a disk that is full or a service that is away needs time
                pause_s = min(LONGEST_PAUSE_S, FIRST_STORAGE_PAUSE_S * 2.0 ** (self.lost - 1))
                return Decision(True, pause_s, f"it is tried again in {pause_s:.0f} s")
            pause_s = 0.0 if self.lost == 1 else min(LONGEST_PAUSE_S, 2.0 ** (self.lost - 2))
            why = "a lost worker is replaced" if outcome == "worker lost" else "these steps are taken again"
            return Decision(True, pause_s, why)
        if outcome == "job error" and self.job_errors < self.faults.max_job_errors:
            self.job_errors += 1
            return Decision(True, 0.0, f"faults.max_job_errors allows {self.faults.max_job_errors}")
        if contradicts and not self.contradicted:
            self.contradicted = True
            return Decision(True, 0.0, "an earlier attempt has trained this job, so it is tried once more")
        return Decision(False, 0.0, "it would end in the same way again")
