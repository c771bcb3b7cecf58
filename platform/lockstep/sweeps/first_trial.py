"""The first trial of a sweep is prepared once before the sweep begins, and nothing of it is trained: a mistake is told before anything is recorded.

A fault of the machine that is met there is no mistake: it is tried again as an attempt of a run would be.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

import torch

from lockstep.attempts.policy import RetryBudget, outcome_of
from lockstep.communication.group import Group
from lockstep.driver.signals import StopSignal
from lockstep.errors import ClusterError, LockstepError, SilentError, SpecError
from lockstep.job.loading import load_job
from lockstep.job.recorded_source import imported_from
from lockstep.record.events import tell_nobody
from lockstep.spec.fields import KeepBest
from lockstep.spec.sweep import SweepSpec
from lockstep.training.determinism import determinism
from lockstep.training.failure import as_lockstep_error
from lockstep.training.setup import prepare


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
    what to do where a fault stays. SpecError where the job never gives the metric of the sweep.
    """
    faults = spec.base.faults
    budget = RetryBudget(faults)
    while True:
        try:
            return _on_gpu(spec, source) if gpu else _prepared(spec, str(Path.cwd()))
        except LockstepError as error:
            outcome = outcome_of(error)
            decision = budget.decide(outcome, 0)
            if stop.asked or (not decision.again and outcome in ("job error", "final")):
                raise
            if not decision.again:
                tries = f"{budget.lost} {'try' if budget.lost == 1 else 'tries'}"
                raise type(error)(
                    f"{error} (the first trial could not be prepared in {tries}; "
                    f"faults.max_worker_failures is {faults.max_worker_failures}; {then})"
                ) from error
            pause = f" in {decision.pause_s:.0f} s" if decision.pause_s else ""
            say(f"warning: the first trial could not be prepared: {error}; it is tried again{pause}")
        stop.wait(decision.pause_s)


def _on_gpu(spec: SweepSpec, source: Mapping[str, bytes] | None) -> dict[str, int]:
    import ray

    from lockstep.clusters.answers import answer_of

    asked = ray.remote(_prepared).options(num_cpus=1, num_gpus=1).remote(spec, str(Path.cwd()), source)
    whose = "a worker with a GPU, which was to prepare a trial,"
    try:
        found: dict[str, int] = answer_of(asked, whose, spec.base.faults.longest_start_s)
    except SilentError:
        ray.cancel(asked, force=True)  # the next try needs its GPU
        raise
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise ClusterError(f"{whose} was lost: {' '.join(str(error).split())[-300:]}") from error
    return found


def _prepared(sweep: SweepSpec, folder: str, source: Mapping[str, bytes] | None = None) -> dict[str, int]:
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        with imported_from(source) if source else nullcontext():
            return _prepared_here(sweep)
    except Exception as error:
        known = as_lockstep_error(error, "the first trial, before training")
        if known is error:
            raise
        raise known from error


def _prepared_here(sweep: SweepSpec) -> dict[str, int]:
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
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        with determinism(spec.determinism, spec.threads):
            run = prepare(spec, load_job(spec.job.use, spec.job.params), Group.join(device), tell_nobody)
    except SpecError as error:
        raise SpecError(
            str(error)
            .replace("checkpoint.keep_best.metric", "metric")
            .replace("checkpoint.keep_best", "metric")
        ) from error
    return {
        "total_steps": run.plan.total_steps,
        "first_evaluation": next(
            (position.number for position in run.plan.positions(0) if spec.evaluate.every.due(position)),
            run.plan.total_steps,
        ),
    }
