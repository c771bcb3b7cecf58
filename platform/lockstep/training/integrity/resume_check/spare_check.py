"""Has a spare process take up a checkpoint now and then, and compares its next step with the one that was trained.

On rank 0 alone, and at its step boundaries. It costs the trainer the digests of one step for each check, and a look at the clock in the others:

    saved       a checkpoint is due to be tried: note what the job holds, and have the next step note its gradients
    stepped     the step after it is done: keep its evidence; later steps look whether the checkpoint is published, and start the process
    stepped     the process has answered: its step has the same bits, or is tried once more and then ends the run

The run's end is agreed on: rank 0 votes to stop in the exchange of the next step, as on a signal, and every rank raises the error once the last
checkpoint is written.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType

from lockstep.errors import ResumeError
from lockstep.record.events.union import ResumeChecked, Tell, Warned
from lockstep.record.ledger.rows import StepRow
from lockstep.spec.fields import Spec
from lockstep.training.checkpoints import Checkpoints
from lockstep.training.integrity import problems
from lockstep.training.integrity.resume_check.check_schedule import CheckSchedule
from lockstep.training.integrity.resume_check.evidence import Evidence, cause_of, held_values
from lockstep.training.integrity.resume_check.launch import Spare, Start, start_spare
from lockstep.training.integrity.resume_check.request import NotTried, Refused, Request, Taken
from lockstep.training.integrity.resume_check.spare_memory import lacking_memory
from lockstep.training.run import Run
from lockstep.training.spare_process import ProcessContext

LOOK_S = 0.2
"""How often it is looked whether the process has ended."""

LIMIT_S = 3600.0
"""A process that has not answered by then is ended. With the least priority on a busy core it takes minutes for seconds of work."""

ADVICE = (
    "return it from job.state_dict() and restore it in job.load_state_dict(), or keep it in a buffer of the model or in the optimizer's state; then "
    "begin anew, or go on from the newest checkpoint with --fork"
)


def is_checked(spec: Spec) -> bool:
    """Whether checkpoints of a run are tried: where bits are promised, and self-checks are not turned off."""
    promised = spec.determinism == "strict" and spec.reduction == "exact"
    return (
        promised
        and spec.rehearsal != "off"
        and spec.recheck != 0
        and spec.checkpoint.verify_after_s is not None
    )


@dataclass(slots=True)
class Trial:
    """A checkpoint that is tried, and what is known of it."""

    step: int
    values: Mapping[str, str]
    """What the job held when it was saved, by place."""
    cost_s: float
    """What it has cost the trainer."""
    later: Mapping[str, str] = field(default_factory=dict)
    """What the job held a step later."""
    evidence: Evidence | None = None
    """Of the step after it."""
    process: Spare | None = None
    began: float = 0.0


class SpareCheck:
    """The checks of one group's rank 0; on other ranks, and where none are made, every call returns at once. A context manager, which ends the process."""

    def __init__(self, run: Run, tell: Tell, checkpoints: Checkpoints, *, start: Start | None = None) -> None:
        self._run, self._tell, self._checkpoints = run, tell, checkpoints
        self._start = start or start_spare
        self._schedule: CheckSchedule = run.check_schedule
        self._context = self._schedule.began_in = self._schedule.began_in or ProcessContext.here()
        self._on = run.group.rank == 0 and checkpoints.origin is not None and is_checked(run.spec)
        if self._on and self._schedule.at is None:
            self._schedule.at = time.monotonic() + (run.spec.checkpoint.verify_after_s or 0.0)
        self._trial: Trial | None = None
        self._look_at = 0.0
        self._doubt = ""
        """What the last process found otherwise, before another one has confirmed it."""
        self.refused: ResumeError | None = None
        """Why the run must not go on; None as long as it may."""

    def saved(self) -> None:
        """Called when a save of the current state has begun, on all ranks. Takes it for a trial, if one is due."""
        if not self._on or self._schedule.off or self.refused:
            return
        trial, counters = self._trial, self._run.state.counters
        if trial is not None and (trial.process is not None or self._is_published(trial)):
            return
        now, last = time.monotonic(), counters.step >= self._run.plan.total_steps
        if last or self._schedule.at is None or now < self._schedule.at:
            return
        self._run.step.digests.note_all_in(counters.step + 1)
        values = held_values(self._run)
        self._trial = Trial(counters.step, values, time.monotonic() - now)

    def stepped(self, row: StepRow) -> None:
        """Called after each step, before its evaluation."""
        trial = self._trial
        if trial is None or self.refused:
            return
        now = time.monotonic()
        if trial.evidence is None:
            if row.step == trial.step + 1:
                trial.evidence, trial.later = Evidence.of(self._run, row), held_values(self._run)
                trial.cost_s += time.monotonic() - now
            return
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        if trial.process is None:
            if self._is_published(trial):
                self._begin(trial, now)
        elif trial.process.ended():
            self._hear(trial, now)
        elif now - trial.began > LIMIT_S:
            trial.process.end()
            self._schedule.wait(now - trial.began)
            self._came_to_nothing(trial, f"had not answered after {LIMIT_S:.0f} s")

    def agree(self) -> None:
        """Called by all ranks when they take no more steps. ResumeError on each where rank 0's check ends the run."""
        refused: ResumeError | None = self._run.group.gather(self.refused)[0]
        if refused is not None:
            raise refused

    # --- one trial --------------------------------------------------------------------------------------------

    def _is_published(self, trial: Trial) -> bool:
        return self._checkpoints.published_step >= trial.step

    def _begin(self, trial: Trial, now: float) -> None:
        run = self._run
        lacking = lacking_memory(run.group.device)
        if lacking:
            self._leave_out(lacking)
            return
        device = str(run.group.device)
        request = Request(run.spec.document(), self._checkpoints.run_id, trial.step, device, self._context)
        try:
            trial.process, trial.began = self._start(request), now
        except OSError as error:
            self._leave_out(f"the system starts no process: {error}")

    def _leave_out(self, why: str) -> None:
        """Make no more checks, and tell why, once."""
        self._tell(Warned(f"resume check: no checkpoint is tried while this run trains: {why}"))
        self._schedule.off, self._trial = True, None

    def _hear(self, trial: Trial, now: float) -> None:
        assert trial.process is not None
        assert trial.evidence is not None
        answer = trial.process.answer()
        trial.process.end()
        trial.process = None
        spent = now - trial.began if isinstance(answer, str) else answer.cpu_s
        self._schedule.wait(spent + trial.cost_s, sooner=bool(self._doubt))
        match answer:
            case str():
                self._came_to_nothing(trial, answer)
            case NotTried():
                self._came_to_nothing(trial, answer.message)
            case Refused():
                self._differs(
                    trial,
                    f"cannot take step {trial.step + 1}: {answer.message}; after an outage this run could not go on",
                )
            case Taken():
                first = trial.evidence.first_difference(answer.evidence)
                if not first:
                    self._same(trial, answer)
                    return
                cause = cause_of(trial.values, trial.later, answer.values)
                self._differs(
                    trial,
                    f"computes step {trial.step + 1} otherwise, first {first}; {cause}, so after an outage this run would go on with other bits",
                )

    def _same(self, trial: Trial, answer: Taken) -> None:
        self._trial = None
        if not self._doubt:
            self._tell(ResumeChecked(trial.step, round(answer.cpu_s, 3)))
            return
        self._tell(
            Warned(
                f"resume check: of two processes that took up the checkpoint, one computed the run's bits, and the one before it {self._doubt}. The "
                "job gives other bits now and then, or this machine does: look for what follows a process, such as its id or a clock, and at the machine"
            )
        )
        self._doubt = ""

    def _differs(self, trial: Trial, how: str) -> None:
        """A bit that flips in either process looks like this too, so a second process has the last word."""
        if not self._doubt:
            self._doubt = how
            return  # the next look starts another process on the same checkpoint
        self.refused = problems.RESUMED_OTHERWISE(step=trial.step, got=how, remedy=ADVICE)
        self._trial = None

    def _came_to_nothing(self, trial: Trial, why: str) -> None:
        """The run goes on, and its owner is told once."""
        self._trial = None
        if not self._schedule.told:
            self._schedule.told = True
            self._tell(
                Warned(
                    f"resume check: the process that was to take up the checkpoint of step {trial.step} {why}; training goes on, and a later "
                    "checkpoint is tried"
                )
            )

    # --- as a context manager ---------------------------------------------------------------------------------

    def __enter__(self) -> SpareCheck:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._trial is not None and self._trial.process is not None:
            self._trial.process.end()
        self._trial = None
