"""The training loop, written in the order in which a run happens. It runs unchanged in a Ray worker, under torchrun and in one process."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.communication.group import Group
from lockstep.data.loader import Loader
from lockstep.data.table_pins import pinned
from lockstep.errors import SpecError, nearest
from lockstep.files import private
from lockstep.job.inputs.variables import reads_of, variables_noted
from lockstep.job.interface import Job, overrides
from lockstep.job.loading import others_out_of_sight
from lockstep.periodic import periodically
from lockstep.plan import Position
from lockstep.record.events.union import (
    Alive,
    Document,
    EvaluationRow,
    Finished,
    PeakMemory,
    Started,
    StepRow,
    Straggling,
    Tell,
    Warned,
    tell_nobody,
)
from lockstep.spec.fields import Spec
from lockstep.spec.locations import RECORD_OFF
from lockstep.training.auxiliary_state import beside_weights, put_beside, save_beside
from lockstep.training.checkpoints import Checkpoints
from lockstep.training.determinism import determinism
from lockstep.training.elastic.recovery import (
    LeftError,
    Recovery,
    RegroupError,
    Seat,
    can_recover,
    is_lost_peer,
    let_in,
    regrouped,
)
from lockstep.training.failure import job_at
from lockstep.training.final_model import keep_final_model
from lockstep.training.integrity.digests import check_same_weights
from lockstep.training.integrity.resume_check.check import SpareCheck
from lockstep.training.integrity.state_digest import tree_digest, weights_digest
from lockstep.training.observe import worker_memory
from lockstep.training.observe.not_finite import looked_into
from lockstep.training.observe.observations import Watch
from lockstep.training.observe.rank_speed import Pace
from lockstep.training.requests import NoRequests, Requests
from lockstep.training.setup import Run, check_followed, prepare
from lockstep.training.state import TrainState, tensors
from lockstep.training.step.compiled import NAME as COMPILED
from lockstep.training.step.results import StepResult
from lockstep.training.step.shards import Shard
from lockstep.training.weights import save_weights

Ending = Literal["finished", "stopped", "unwanted", "regrouping"]
"""Why a group takes no more steps: the run is at its end; a stop was requested; `requests.go_on` says that nobody wants more of it;
the workers go on in another group."""

ALIVE_S = 1.0
"""Seconds between signs of life while a run makes its final model, which may be large."""


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
        run = prepare(spec, job, group, tell, origin)
        tell(Started(dict(run.facts)))
        tell(run.history.past())
        tell_compiled(run, tell)
        seat = Seat(group, tell, requests, origin)
        outlives = recovery is not None and can_recover(spec, group, origin)
        if recovery is not None and outlives:
            recovery.ready(seat)
        return train_on(run, seat, recovery if outlives else None)


def join(
    spec: Spec, job: Job, device: torch.device, recovery: Recovery, origin: AttemptOrigin | None
) -> dict[str, Any] | None:
    """Join a run that is already training, receive its state, and train it to its end. Returns its summary, as `fit` does.

    `origin` is that of the attempt which the others began with. Returns None where they no longer let this worker in, or it leaves again.
    """
    with surroundings(spec), variables_noted(reads_of(job)):
        alone = Seat(Group(0, 1, device), tell_nobody, NoRequests(), origin)
        seen = {} if origin is None else origin.table_versions
        run = prepare(spec, job, alone.group, tell_nobody, joining_worker=True, versions=seen)
        entered = let_in(run, alone, recovery)
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
            if recovery is None or not (isinstance(error, RegroupError) or is_lost_peer(error)):
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
    ):
        checkpoints.hasty = hasty
        ending = take_steps(run, seat, clock, checkpoints, batches, check, regroups=hasty)
        if ending == "unwanted":
            return None
        if ending == "regrouping":
            checkpoints.leave()
        else:
            run.inputs.agree(run.group, run.facts, run.state.counters.step, seat.tell)
            checkpoints.finish()
            check.agree()
    if ending == "regrouping":
        raise RegroupError(f"the workers could not form another group after step {run.state.counters.step}")
    return report_end(run, seat, clock, checkpoints, stopped=ending == "stopped")


def take_steps(
    run: Run,
    seat: Seat,
    clock: Clock,
    checkpoints: Checkpoints,
    batches: Loader,
    check: SpareCheck,
    *,
    regroups: bool,
) -> Ending:
    """Take the remaining steps, with the evaluations and saves that are due. `regroups`: whether the workers may form another group."""
    tell, requests, origin = seat.tell, seat.requests, seat.origin
    pace, watch = Pace(run.group), Watch(run, origin)
    evaluated_before = run.state.counters.evaluated
    over = catch_up(run, tell)
    if not goes_on(run, requests):
        return "unwanted"
    checkpoints.make_up(evaluated=run.state.counters.evaluated > evaluated_before)
    for position in run.ahead(over):
        is_last = position.number == run.plan.total_steps
        watch.begin(position)
        regroup = regroups and requests.regroup()
        stop = requests.stop() or bool(check.refused)
        result = run.step(position, batches, stop=stop, save=checkpoints.wanted(), regroup=regroup)
        row = clock.row(run, position, result, batches)
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

        evaluated = evaluation_is_due(run, position)
        over = evaluated and evaluate(run, position, tell)
        if checkpoints.due(position, agreed=result.save):
            run.inputs.agree(run.group, run.facts, position.number, tell)
            with watch.saving():
                checkpoints.save()
            check.saved()
        clock.leave_out()
        if over or ends_replay(position, origin):
            break
        if evaluated and not is_last and not goes_on(run, requests):
            return "unwanted"
        if result.regroup and not is_last:
            return "regrouping"
    return "finished"


def report_end(
    run: Run, seat: Seat, clock: Clock, checkpoints: Checkpoints, *, stopped: bool
) -> dict[str, Any]:
    """Report the end of the run, with the memory that it took and the files that are kept. Returns its summary."""
    summary = summarise(run, clock, checkpoints, stopped=stopped)
    peaks = run.group.gather(peak_memory(run.group.device))
    seat.tell(PeakMemory(peaks))
    used = worker_memory.used(run.spec, run.plan, run.group.size, run.state, peaks)
    seat.tell(Document("memory.json", used))
    seat.tell(Finished(summary, kept(run, seat, stopped=stopped)))
    return summary


def ends_replay(position: Position, origin: AttemptOrigin | None) -> bool:
    """Whether an attempt that replays steps of another run has reached the last of them."""
    return origin is not None and origin.replay is not None and position.number >= origin.replay.until


def goes_on(run: Run, requests: Requests) -> bool:
    """Whether to go on; `requests.go_on` may wait. All ranks leave together: one that left alone would break the others' next collective."""
    decision = requests.go_on() if run.group.rank == 0 else True
    return bool(run.group.gather(decision)[0])


def catch_up(run: Run, tell: Tell) -> bool:
    """Make the evaluation that the previous attempt did not get to, if one is due. Returns whether the run is already over."""
    counters, rule = run.state.counters, run.spec.early_stop
    if counters.step > counters.evaluated:
        last = run.plan.position(counters.step - 1)
        if evaluation_is_due(run, last):
            return evaluate(run, last, tell)
    return rule is not None and run.state.best.enough(rule)


def note_step(run: Run, row: StepRow) -> None:
    """Add the row of a finished step to the history: from here on the step counts as done."""
    run.state.metrics |= {
        "train/loss": row.loss,
        **{f"train/{name}": value for name, value in row.parts.items()},
    }
    run.history.add(row)


def evaluation_is_due(run: Run, position: Position) -> bool:
    """Whether this step ends with an evaluation; the last step of the run always does."""
    if run.evaluate is None:
        return False
    return position.number == run.plan.total_steps or run.spec.evaluate.every.due(position)


def evaluate(run: Run, position: Position, tell: Tell) -> bool:
    """Evaluate the current model. Returns whether the run should end here."""
    assert run.evaluate is not None
    began, step = time.perf_counter(), position.number
    rule, over = run.spec.early_stop, False
    with run.state.averaged():
        metrics = run.evaluate(run.state.model, lambda: tell(Alive()))
    run.step.agreement.check()  # before it is reported: a reported evaluation is of bits that all ranks have
    # From here on no rank waits for another. So when one is lost, the others have either the whole evaluation, or make it again.
    tell_unripe_average(run, tell)
    if rule is not None:
        with run.state.averaged():
            over = run.state.best.judge(
                rule,
                _named(metrics, rule.metric),
                step,
                tensors(run.state),
                lambda: beside_weights(run.state.model, run.job, run.state.settings.changed),
            )
    row = EvaluationRow(step, position.epoch, metrics, time.perf_counter() - began, time.time())
    check_followed(run.state.schedule, metrics)  # a metric of the whole set may be known only now
    with job_at(f"the schedule after the evaluation of step {step}"):
        run.state.schedule.evaluated(metrics)
    run.state.counters.evaluated = step
    run.state.metrics |= metrics
    run.history.add_evaluation(row)
    tell(row)
    for name, text in run.evaluate.figures.items():
        tell(Document(f"evaluations/step-{step:09}/{name}", text))
    return over


def tell_unripe_average(run: Run, tell: Tell) -> None:
    """Warn, once, where an evaluation decides what is kept and the average that it judges is not one yet."""
    rules = {"early_stop": run.spec.early_stop, "checkpoint.keep_best": run.spec.checkpoint.keep_best}
    rule = next((name for name, value in rules.items() if value is not None), None)
    if rule is not None and run.state.average is not None:
        for text in run.state.average.told_where_it_decides(run.state.counters.updates, rule):
            tell(Warned(text))


def _named(metrics: Mapping[str, float], name: str) -> float:
    """The metric of the evaluation that a rule uses. SpecError where there is none of that name."""
    if name not in metrics:
        raise SpecError(f"early_stop.metric: the job gives no {name!r}{nearest(name, metrics)}")
    return metrics[name]


def kept(run: Run, seat: Seat, *, stopped: bool) -> list[Path]:
    """On rank 0, write the results of the run into its folder. Returns their paths; no path where the attempt saves nothing.

    These are the weights of the last step, their average and the best ones, where there are any, and what is beside them. A run that was not stopped also gets the
    final model, of the average where there is one: those weights were evaluated. A stopped run has no time for it.
    """
    folder = None if run.group.rank > 0 else kept_in(run, seat)
    if run.state.sharding is not None:
        folder = run.group.given(folder, 0)  # the others send their rows
    if folder is None or seat.origin is None:
        return []
    best = run.state.best.weights
    files = save_whole(run, folder, "final", tensors(run.state))
    if run.state.has_average:
        with run.state.averaged():
            files += save_whole(run, folder, "ema", tensors(run.state))
    files += [] if best is None else save_whole(run, folder, "best", best)
    final = final_model_of(run) if seat.origin.saves and not stopped else run.state.model
    if run.group.rank > 0:
        return []
    of_weights = {path.stem: path for path in files}
    files += [save_beside(of_weights[name], tree) for name, tree in _beside(run.state).items() if tree]
    if not seat.origin.saves:
        return []
    if not stopped and run.spec.record.uri != RECORD_OFF:
        with (
            periodically(lambda: lambda: seat.tell(Alive()), ALIVE_S, "lockstep-final-model"),
            run.state.averaged(),
        ):
            files += keep_final_model(run.job, final, folder)
    return files


def whole_weights(run: Run, weights: Mapping[str, Any]) -> dict[str, Tensor]:
    """`weights` with whole tensors in the places of shards, in host memory, on rank 0; the other ranks, which call it too, get what is not sharded."""
    gathered: dict[int, Tensor | None] = {}
    for value in weights.values():
        if isinstance(value, Shard) and id(value) not in gathered:
            whole = value.gathered(run.group, 0)
            gathered[id(value)] = whole if whole is None else whole.cpu()
    every = {name: gathered.get(id(value), value) for name, value in weights.items()}
    return {name: value for name, value in every.items() if isinstance(value, Tensor)}


def save_whole(run: Run, folder: Path, name: str, weights: Mapping[str, Any]) -> list[Path]:
    """Write weights on rank 0. All ranks of a sharded model call it."""
    whole = whole_weights(run, weights)
    return save_weights(folder, {name: whole}) if run.group.rank == 0 else []


def final_model_of(run: Run) -> nn.Module:
    """The run's model with its final weights, or their average; of a sharded one a second model, which rank 0 has whole. All ranks call it."""
    state = run.state
    if state.sharding is None or not overrides(run.job, "example_input"):
        return state.model
    with state.averaged():
        weights = whole_weights(run, tensors(state))
    if run.group.rank > 0:
        return state.model
    beside = beside_weights(state.model, run.job, state.settings.changed)
    with job_at("while its model was made for the final model"):
        model = run.job.model()
    with torch.no_grad():
        put_beside(model, run.job, weights, {kind: tree for kind, tree in beside.items() if kind != "job"})
    return model


def kept_in(run: Run, seat: Seat) -> Path | None:
    """The folder of the results; None for an attempt that leaves none. Steps that are taken again may be asked for theirs."""
    if seat.origin is None:
        return None
    if seat.origin.saves:
        return run.spec.folder / seat.requests.run_id()
    folder = seat.origin.replay.weights if seat.origin.replay is not None else None
    return None if folder is None else Path(folder)


def _beside(state: TrainState) -> dict[str, dict[str, Any]]:
    """What is beside the final weights and the best ones, by the names of their files, where that is known."""
    best = {} if state.best.beside is None else {"best": state.best.beside}
    return {"final": beside_weights(state.model, state.job, state.settings.changed), **best}


def peak_memory(device: torch.device) -> int:
    """The most memory in bytes that this rank has held: what torch has allocated on a GPU, else the process's resident set."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def summarise(run: Run, clock: Clock, checkpoints: Checkpoints, *, stopped: bool) -> dict[str, Any]:
    """The summary of the run. Raises DriftError where the ranks' weights are not the same bits."""
    state = run.state
    digest = _common_digest(run, "weights")
    ema_digest = None
    if state.has_average:
        with state.averaged():
            ema_digest = _common_digest(run, "averages of the weights")
    best = state.best.weights
    return {
        "identity": run.facts["identity"],
        "step": state.counters.step,
        "epoch": state.epoch(run.plan),
        "samples": state.counters.samples,
        "skipped": state.counters.skipped,
        "stopped": stopped,
        "workers": run.group.size,
        "metrics": dict(state.metrics),
        "weights_digest": digest,
        "ema_digest": ema_digest,
        "best_digest": _digest(run, best) if best is not None else None,
        "best_step": state.best.step if best is not None else None,
        "beside": {name: tree_digest(tree) if tree else None for name, tree in _beside(state).items()},
        "checkpoint": checkpoints.newest,
        "unsaved": checkpoints.unsaved,
        **clock.figures(),
    }


def _digest(run: Run, weights: Mapping[str, Any]) -> str:
    """The digest of weights; of sharded ones rank 0 computes it, with one whole tensor after another."""
    digest = weights_digest(whole_weights(run, weights))
    return digest if run.state.sharding is None else str(run.group.given(digest, 0))


def _common_digest(run: Run, what: str) -> str:
    """The digest of the current weights. DriftError where the ranks have different ones."""
    if run.state.sharding is not None:
        return _digest(run, tensors(run.state))
    digests = run.group.gather(_digest(run, tensors(run.state)))
    if len(set(digests)) > 1:
        strays = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        check_same_weights(run.group, run.state.model, run.state.counters.step, strays, what)
    return str(digests[0])


class Clock:
    """Measures the timing columns: what a run took, apart from what it computed."""

    def __init__(self, origin: AttemptOrigin | None = None) -> None:
        self.attempt = 1 if origin is None else origin.attempt
        self.first_step_at: float | None = None
        self._mark = time.perf_counter()
        self._waited_s = 0.0
        self._steps = self._samples = 0
        self._steady_s = self._steady_wait_s = 0.0

    def row(self, run: Run, position: Position, result: StepResult, batches: Loader) -> StepRow:
        """The ledger's row of the step that has just ended."""
        now, wall = time.perf_counter(), time.time()
        step_s, wait_s = now - self._mark, batches.waited_s - self._waited_s
        self._mark, self._waited_s = now, batches.waited_s
        if self.first_step_at is None:
            self.first_step_at = wall
        else:
            self._steps, self._samples = self._steps + 1, self._samples + position.samples
            self._steady_s, self._steady_wait_s = self._steady_s + step_s, self._steady_wait_s + wait_s
        return StepRow(
            step=position.number,
            epoch=position.epoch,
            samples=run.state.counters.samples,
            loss=result.loss,
            weight=result.weight,
            parts=result.parts,
            lr=result.lr,
            grad_norm=result.grad_norm,
            clipped_norm=result.clipped_norm,
            scale=result.scale,
            skipped=result.skipped,
            data_wait_s=wait_s,
            step_s=step_s,
            wall_clock=wall,
            attempt=self.attempt,
            digests=result.digests,
        )

    def leave_out(self) -> None:
        """Start the next step's time here: an evaluation or a save is not part of it."""
        self._mark = time.perf_counter()

    def figures(self) -> dict[str, float | None]:
        """Rates over all steps but the first, which pays for warming up."""
        seconds = self._steady_s
        return {
            "first_step_at": self.first_step_at,
            "steps_per_s": self._steps / seconds if seconds else None,
            "samples_per_s": self._samples / seconds if seconds else None,
            "data_wait_share": self._steady_wait_s / seconds if seconds else None,
        }
