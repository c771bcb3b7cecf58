"""The first trial of a sweep is prepared once before the sweep begins, and nothing of it is trained: a mistake is told before anything is recorded.

A fault of the machine that is met there is no mistake: it is tried again as an attempt of a run would be.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

import torch

from lockstep.attempts.retry_policy import RetryBudget, outcome_of
from lockstep.communication.group import Group, assigned_device
from lockstep.driver.signals import StopSignal
from lockstep.errors import LockstepError, SilentError, SpecError
from lockstep.job.loading import load_job
from lockstep.job.recorded_source import imported_from
from lockstep.record.events.union import tell_nobody
from lockstep.running_time import running_s
from lockstep.spec.fields import KeepBest
from lockstep.spec.sweep import SweepSpec
from lockstep.sweeps import problems
from lockstep.training.determinism import determinism
from lockstep.training.failure import as_lockstep_error
from lockstep.training.setup import prepare

LOOK_S = 0.2
"""How often the wait for a worker looks for a signal."""

TELL_S = 20.0
"""How long a worker is waited for until it is told: another job may have the GPUs."""


def first_trial(
    spec: SweepSpec,
    source: Mapping[str, bytes] | None,
    *,
    gpu: bool,
    stop: StopSignal,
    say: Callable[[str], None],
    then: str,
) -> dict[str, int]:
    """Prepare it, as often as `faults` of the spec allows: its number of steps, and the first that ends with an evaluation.

    `source` are the files of a job of `__main__`, which this process imports already. With `gpu` a worker does it. `then` says
    what to do where a fault stays. SpecError where the job never gives the metric of the sweep; Interrupted where a signal
    comes while a worker is waited for.
    """
    faults = spec.base.faults
    budget = RetryBudget(faults)
    while True:
        try:
            if gpu:
                return _on_gpu(spec, source, stop, say)
            return _prepared(spec, str(Path.cwd()), gpu=False)
        except LockstepError as error:
            outcome = outcome_of(error)
            decision = budget.decide(outcome, 0)
            if stop.asked or (not decision.again and outcome in ("job error", "final")):
                raise
            if not decision.again:
                tries = f"{budget.lost} {'try' if budget.lost == 1 else 'tries'}"
                raise error.with_message(
                    f"{error} (the first trial could not be prepared in {tries}; "
                    f"faults.max_worker_failures is {faults.max_worker_failures}; {then})"
                ) from error
            pause = f" in {decision.pause_s:.0f} s" if decision.pause_s else ""
            say(f"warning: the first trial could not be prepared: {error}; it is tried again{pause}")
        stop.wait(decision.pause_s)


def _on_gpu(
    spec: SweepSpec, source: Mapping[str, bytes] | None, stop: StopSignal, say: Callable[[str], None]
) -> dict[str, int]:
    import ray

    from lockstep.attempts.worker_group import why_lost
    from lockstep.clusters.bounded_calls import unanswered

    ref = (
        ray.remote(_prepared).options(num_cpus=1, num_gpus=1).remote(spec, str(Path.cwd()), source, gpu=True)
    )
    whose = "a worker with a GPU, which was to prepare a trial,"
    limit_s, announced, began = spec.base.faults.longest_start_s, False, running_s()
    try:
        while not ray.wait([ref], timeout=LOOK_S)[0]:
            waited_s = running_s() - began
            stop.check()  # there is nothing to save yet
            if waited_s > limit_s:
                raise unanswered(whose, limit_s)
            if waited_s > TELL_S and not announced:
                announced = True
                say(
                    f"waiting up to {limit_s:.0f} s (faults.longest_start_s) for a worker with a GPU to prepare the first trial"
                )
        facts: dict[str, int] = ray.get(ref)
    except (SilentError, KeyboardInterrupt):
        ray.cancel(ref, force=True)  # the next try needs its GPU
        raise
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise problems.GPU_WORKER_LOST(got=why_lost(str(error))) from error
    return facts


def _prepared(
    sweep: SweepSpec, folder: str, source: Mapping[str, bytes] | None = None, *, gpu: bool
) -> dict[str, int]:
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        with imported_from(source) if source else nullcontext():
            return _prepared_here(sweep, gpu)
    except Exception as error:
        lockstep_error = as_lockstep_error(error, "the first trial, before training")
        if lockstep_error is error:
            raise
        raise lockstep_error from error


def _of_sweep(error: SpecError) -> LockstepError:
    """The error with `metric`, the field of the sweep, in place of the field of a trial's spec that it becomes."""

    def renamed(text: str) -> str:
        return text.replace("checkpoint.keep_best.metric", "metric").replace("checkpoint.keep_best", "metric")

    sweep_error = error.with_message(renamed(str(error)))
    for name in ("field", "evidence", "remedy"):
        setattr(sweep_error, name, renamed(getattr(error, name)))
    sweep_error.facts = {name: renamed(value) for name, value in error.facts.items()}
    return sweep_error


def _prepared_here(sweep: SweepSpec, gpu: bool) -> dict[str, int]:
    first = sweep.trial(sweep.sample(0))
    spec = first.model_copy(
        update={
            "determinism": "fast",  # nothing of this is kept
            "early_stop": None,
            "checkpoint": first.checkpoint.model_copy(
                update={"keep_best": KeepBest(metric=sweep.metric, mode=sweep.mode)}
            ),
        }
    )
    group = Group.join(assigned_device(gpu and torch.cuda.is_available()))
    try:
        with determinism(spec.determinism, spec.threads):
            run = prepare(spec, load_job(spec.job.use, spec.job.params), group, tell_nobody)
    except SpecError as error:
        raise _of_sweep(error) from error
    return {
        "total_steps": run.plan.total_steps,
        "first_evaluation": next(
            (
                position.number
                for position in run.plan.positions(0)
                if run.evaluate is not None and run.evaluate.is_of(sweep.metric, run.evaluate.due(position))
            ),
            run.plan.total_steps,
        ),
    }
