"""What follows on the end of an attempt: pure, so that every case can be tested.

A mistake of the job comes again however often it is tried; a worker or a node that was lost does not. So the two have
budgets of their own, and that of lost workers counts from the newest checkpoint on: a run that moves is never given up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from lockstep.errors import ClusterError, JobError, LockstepError, NumericsError
from lockstep.spec.fields import Faults

Outcome = Literal["worker lost", "job error", "final"]
"""Why an attempt ended early. "final": what no other attempt can mend, a mistake in the spec or a store that refuses."""

LONGEST_PAUSE_S = 30.0


def outcome_of(error: LockstepError) -> Outcome:
    """What kind of end an error is."""
    if isinstance(error, ClusterError):
        return "worker lost"
    if isinstance(error, JobError | NumericsError):
        return "job error"
    return "final"


class Decision(NamedTuple):
    """Whether there is another attempt, after how many seconds, and why or why not."""

    again: bool
    pause_s: float
    why: str


@dataclass(slots=True)
class Budget:
    """How often attempts may end early, and how often they have."""

    faults: Faults
    job_errors: int = 0
    lost: int = 0
    """Ends for lost workers since `step`."""
    step: int = 0
    """Where the newest checkpoint was at the last one."""

    def decide(self, outcome: Outcome, step: int) -> Decision:
        """What to do after an attempt that ended with `outcome`; `step` is that of the newest checkpoint, 0 without one."""
        if outcome == "worker lost":
            self.lost = self.lost + 1 if step <= self.step else 1
            self.step = max(self.step, step)
            most = self.faults.max_worker_failures
            if self.lost > most:
                return Decision(
                    False,
                    0.0,
                    f"{self.lost} attempts in a row ended without a new checkpoint; faults.max_worker_failures is {most}",
                )
            pause_s = 0.0 if self.lost == 1 else min(LONGEST_PAUSE_S, 2.0 ** (self.lost - 2))
            return Decision(True, pause_s, "a lost worker is replaced")
        if outcome == "job error" and self.job_errors < self.faults.max_job_errors:
            self.job_errors += 1
            return Decision(True, 0.0, f"faults.max_job_errors allows {self.faults.max_job_errors}")
        return Decision(False, 0.0, "it would end in the same way again")
