"""The training loop, written in the order in which a run happens. It runs unchanged in a Ray worker, under torchrun and in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, Literal

import torch

from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.communication.group import Group
from lockstep.data.loader import Loader
from lockstep.data.table_pins import pinned
from lockstep.files import private
from lockstep.job.inputs.variables import reads_of, variables_noted
from lockstep.job.interface import Job
from lockstep.job.loading import others_out_of_sight
from lockstep.plan import Position
from lockstep.record.events.union import (
    Document,
    Finished,
    PeakMemory,
    Started,
    Straggling,
    Tell,
    tell_nobody,
)
from lockstep.record.ledger.rows import StepRow
from lockstep.spec.fields import Spec
from lockstep.training.checkpoints import Checkpoints
from lockstep.training.clock import Clock
from lockstep.training.determinism import determinism
from lockstep.training.driver_requests import NoRequests, Requests
from lockstep.training.elastic import problems as elastic_problems
from lockstep.training.elastic.errors import LeftError, RegroupError
from lockstep.training.elastic.recovery import (
    Recovery,
    Seat,
    can_recover,
    is_lost_peer,
    let_in,
    regrouped,
)
from lockstep.training.evaluation.evaluation_schedule import Evaluations
from lockstep.training.evaluation.final_test import tested
from lockstep.training.final_results import kept, peak_memory, summarise
from lockstep.training.integrity.resume_check.spare_check import SpareCheck
from lockstep.training.observe import worker_memory
from lockstep.training.observe.not_finite import looked_into
from lockstep.training.observe.observations import Watch
from lockstep.training.observe.rank_speed import Pace
from lockstep.training.run import Run
from lockstep.training.setup import prepare
from lockstep.training.step.compiled import NAME as COMPILED

Ending = Literal["finished", "stopped", "unwanted", "regrouping"]
"""Why a group takes no more steps: the run is at its end; a stop was requested; `requests.go_on` says that nobody wants more of it;
the workers go on in another group."""


def fit(
    spec: Spec,
    job: Job,
    group: Group,
    tell: Tell,
    requests: Requests,
    origin: AttemptOrigin | None = None,
    recovery: Recovery | None = None,
) -> dict[str, Any] | None:
    """Train one run to its end as one worker of `group`. Returns its summary, the same on every rank.

    `tell` receives the run's events, and `requests` is what others ask of it. `origin` says which attempt of which run this is; without one
    nothing is saved or resumed. `recovery` is where the workers meet to go on in another group; without it the loss of one ends them all.

    Returns None, without an event, where `requests.go_on` says that nobody wants more of the run, or where this worker leaves it. Raises
    LockstepError with one clear line for whatever is wrong with the spec, the job or the machine.
    """
    with surroundings(spec), variables_noted(reads_of(job)):
        seat = Seat(group, tell, requests, origin)
        # A recovery that cannot be used is none from here on.
        meets = recovery if can_recover(spec, group, origin) else None
        # No name for the run here: in another group it is another one, and the parameters of this one must go.
        return train_on(begun(spec, job, seat, meets), seat, meets)


def begun(spec: Spec, job: Job, seat: Seat, recovery: Recovery | None) -> Run:
    """Prepare a run, and tell that it begins."""
    run = prepare(spec, job, seat.group, seat.tell, seat.origin)
    seat.tell(Started(dict(run.facts)))
    seat.tell(run.history.past())
    tell_compiled(run, seat.tell)
    if recovery is not None:
        recovery.ready(seat)
    return run


def join(
    spec: Spec, job: Job, device: torch.device, recovery: Recovery, origin: AttemptOrigin | None
) -> dict[str, Any] | None:
    """Join a run that is already training, receive its state, and train it to its end. Returns its summary, as `fit` does.

    `origin` is that of the attempt which the others began with. Returns None where they no longer let this worker in, or it leaves again.
    """
    with surroundings(spec), variables_noted(reads_of(job)):
        alone = Seat(Group(0, 1, device), tell_nobody, NoRequests(), origin)
        seen = {} if origin is None else origin.table_versions
        entered = let_in(
            prepare(spec, job, alone.group, tell_nobody, joining_worker=True, versions=seen), alone, recovery
        )
        return None if entered is None else train_on(*entered, recovery)


@contextmanager
def surroundings(spec: Spec) -> Iterator[None]:
    """The process-wide settings that a run needs while it trains."""
    with (
        determinism(spec.determinism, spec.threads),
        others_out_of_sight(),
        private(spec.record.private),
        pinned({}),
    ):
        yield


def train_on(run: Run, seat: Seat, recovery: Recovery | None) -> dict[str, Any] | None:
    """Train to the end, in one group after another where there is a `recovery`."""
    while True:
        try:
            return train(run, seat, hasty=recovery is not None)
        except Exception as error:
            left = isinstance(error, RegroupError) or is_lost_peer(error) or seat.group.gives_anything
            if recovery is None or not left:
                raise
            cause = error
        try:
            run, seat = regrouped(run, seat, recovery, cause)
        except LeftError:
            return None
        del cause  # its frames keep what the abandoned step had computed


def tell_compiled(run: Run, tell: Tell) -> None:
    """On rank 0, at the beginning of a run whose losses are compiled: report what was compiled, and how far it is from eager."""
    compiled, start = run.state.compiled, run.start
    if compiled is not None and run.group.rank == 0 and (start is None or start.fork):
        tell(Document(COMPILED, compiled.text()))


def train(run: Run, seat: Seat, *, hasty: bool = False) -> dict[str, Any] | None:
    """Take the remaining steps from the current state. `hasty`: if this group loses a rank, the others go on.

    Raises RegroupError after the step that the ranks have agreed on as the last one of this group.
    """
    clock = Clock(seat.origin)
    run.step.keeps_start = hasty
    with (
        looked_into(run, seat.tell, seat.origin),
        run.checkpoints(seat.tell, seat.requests, seat.origin) as checkpoints,
        closing(run.loader()) as batches,
        SpareCheck(run, seat.tell, checkpoints) as check,
        Evaluations(run, seat.tell, seat.origin) as evaluations,
    ):
        checkpoints.hasty = hasty
        ending = take_steps(run, seat, clock, checkpoints, evaluations, batches, check, regroups=hasty)
        if ending == "unwanted":
            return None
        if ending == "regrouping":
            checkpoints.leave()
        else:
            run.inputs.agree(run.group, run.facts, run.state.counters.step, seat.tell)
            checkpoints.finish()
            check.agree()
    if ending == "regrouping":
        raise elastic_problems.NO_OTHER_GROUP(step=run.state.counters.step)
    return report_end(run, seat, clock, checkpoints, stopped=ending == "stopped")


def take_steps(
    run: Run,
    seat: Seat,
    clock: Clock,
    checkpoints: Checkpoints,
    evaluations: Evaluations,
    batches: Loader,
    check: SpareCheck,
    *,
    regroups: bool,
) -> Ending:
    """Take the remaining steps, with the evaluations and saves that are due. `regroups`: whether the workers may form another group."""
    tell, requests, origin = seat.tell, seat.requests, seat.origin
    pace, watch = Pace(run.group), Watch(run, origin)
    evaluated_before = run.state.counters.evaluated
    over = evaluations.catch_up()
    # Before the gate, as in a step: a population decides about a state that is saved.
    checkpoints.make_up(evaluated=run.state.counters.evaluated > evaluated_before)
    if not goes_on(run, requests, ends=over or run.state.counters.step == run.plan.total_steps):
        return "unwanted"
    for position in run.ahead(over):
        is_last = position.number == run.plan.total_steps
        watch.begin(position)
        regroup = regroups and requests.regroup()
        stop = requests.stop() or bool(check.refused)
        result = run.step(position, batches, stop=stop, save=checkpoints.wanted(), regroup=regroup)
        row = clock.timed(result.row, position, batches)
        note_step(run, row)
        run.step.digests.compare()
        run.inputs.look(run.facts, position.number, tell)
        tell(row)
        check.stepped(row)
        watch.end(position, row, tell)
        for straggler in pace.add(position.number, result.pace):
            tell(Straggling(straggler))
        if result.stop and not is_last:
            return "stopped"

        decided, over = evaluations.after(position)
        if checkpoints.due(position, agreed=result.save):
            run.inputs.agree(run.group, run.facts, position.number, tell)
            with watch.saving():
                checkpoints.save()
            check.saved()
        clock.leave_out()
        if over or ends_replay(position, origin):
            break
        if decided and not is_last and not goes_on(run, requests):
            return "unwanted"
        if result.regroup and not is_last:
            return "regrouping"
    return "finished"


def report_end(
    run: Run, seat: Seat, clock: Clock, checkpoints: Checkpoints, *, stopped: bool
) -> dict[str, Any]:
    """Report the end of the run, with the memory that it took and the files that are kept. Returns its summary."""
    summary = summarise(run, clock, checkpoints, stopped=stopped)
    replay = None if seat.origin is None else seat.origin.replay
    if not stopped and (
        replay is None or replay.weights is not None
    ):  # a result that is compared has its test
        summary |= tested(run, seat.tell)
    peaks = run.group.gather(peak_memory(run.group.device))
    seat.tell(PeakMemory(peaks))
    used = worker_memory.used(run.spec, run.plan, run.group.size, run.state, peaks)
    seat.tell(Document("memory.json", used))
    seat.tell(Finished(summary, kept(run, seat, stopped=stopped)))
    return summary


def ends_replay(position: Position, origin: AttemptOrigin | None) -> bool:
    """Whether an attempt that replays steps of another run has reached the last of them."""
    return origin is not None and origin.replay is not None and position.number >= origin.replay.until


def goes_on(run: Run, requests: Requests, *, ends: bool = False) -> bool:
    """Whether to go on; `requests.go_on` may wait. All ranks leave together: one that left alone would break the others' next collective."""
    decision = requests.go_on(run.group.waits.look, ends=ends) if run.group.rank == 0 else True
    return bool(run.group.gather(decision)[0])


def note_step(run: Run, row: StepRow) -> None:
    """Add the row of a finished step to the history: from here on the step counts as done."""
    run.state.metrics |= {
        "train/loss": row.loss,
        **{f"train/{name}": value for name, value in row.parts.items()},
    }
    run.history.add(row)
