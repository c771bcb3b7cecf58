"""Which trials end early: Tune's schedulers, told every result once, and what they decided before decided again."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)

from lockstep.spec.sweep import Asha, Domain, Median, Pbt, SweepSpec
from lockstep.sweeps.decisions import Decisions, WithoutState

STEP = "step"
"""The time of a result, in optimizer steps: `training_iteration` counts results, and begins anew with each attempt."""


def make_scheduler(sweep: SweepSpec, total_steps: int, first_evaluation: int) -> Any:
    """Tune's scheduler for a sweep whose trials have `total_steps` steps and evaluate first after `first_evaluation`."""
    rule, told = sweep.scheduler, {"metric": sweep.metric, "mode": sweep.mode, "time_attr": STEP}
    match rule:
        case Asha():
            grace = min(rule.grace_steps or first_evaluation, total_steps)
            return ASHAScheduler(
                **told,
                max_t=total_steps,
                grace_period=grace,
                reduction_factor=rule.reduction_factor,
                stop_last_trials=False,
            )
        case Median():
            return MedianStoppingRule(
                **told,
                grace_period=rule.grace_steps or first_evaluation,
                min_samples_required=rule.min_trials,
            )
        case Pbt():
            return PopulationBasedTraining(
                **told,
                perturbation_interval=rule.every_steps,
                hyperparam_mutations={
                    "fields": {field: mutation(domain) for field, domain in sweep.space.items()}
                },
                quantile_fraction=rule.quantile,
                resample_probability=rule.resample,
                synch=True,
                log_config=False,
            )
    return FIFOScheduler()


def mutation(domain: Domain) -> Any:
    """A domain as population-based training knows it: values in their order, or something to draw from."""
    if domain.values is not None:
        return domain.values
    if domain.randint is not None:
        return tune.randint(*domain.randint)
    return tune.uniform(*domain.uniform) if domain.uniform else tune.loguniform(*(domain.loguniform or ()))


class RecordedScheduler(WithoutState, TrialScheduler):  # type: ignore[misc]
    """A scheduler that hears each step of a trial once, however often an attempt reports it, and stands by what it decided.

    `on_stop` is told of a trial that it ends. No more than `concurrency` trials are begun at a time.
    """

    def __init__(
        self,
        inner: Any,
        sweep: SweepSpec,
        decisions: Decisions,
        on_stop: Callable[[int, str], None],
        concurrency: int,
    ) -> None:
        super().__init__()
        self._concurrency = concurrency
        self._trials: list[Any] = []
        self._going: list[Any] = []
        self._numbers: dict[str, int] = {}
        self._inner, self._sweep, self._decisions, self._on_stop = inner, sweep, decisions, on_stop
        self._heard: dict[int, int] = {}
        self._random = random.Random(sweep.seed).getstate(), np.random.RandomState(sweep.seed).get_state()

    @property
    def metric(self) -> str:
        return self._sweep.metric

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        return not metric and not mode

    def on_trial_result(self, controller: Any, trial: Any, result: dict[str, Any]) -> str:
        number, step = trial.config["trial"], result.get(STEP, 0)
        if self._sweep.metric not in result or step <= self._heard.get(number, 0):
            return str(TrialScheduler.CONTINUE)
        self._heard[number] = step
        decision = self._seeded(lambda: self._inner.on_trial_result(controller, trial, result))
        if isinstance(self._sweep.scheduler, Pbt):
            for (
                other
            ) in self._trials:  # who takes over another one's values takes over its whole configuration
                other.config["trial"] = self._numbers[other.trial_id]
        before = self._decisions.stopped(number, step)
        if before is None and decision == TrialScheduler.STOP and not result.get("done"):
            before = f"{self._sweep.scheduler.name}: {self._sweep.metric} {result[self._sweep.metric]:.6g} at step {step} is not among the best"
            if number not in self._decisions.ends:
                self._decisions.stop(number, step, before)
        if before is not None:
            self._on_stop(number, before)
            return str(TrialScheduler.STOP)
        return str(TrialScheduler.CONTINUE if decision == TrialScheduler.STOP else decision)

    def _seeded(self, decide: Callable[[], str]) -> str:
        """With Tune's generators, which are the process's own, in a state that only the sweep's decisions move."""
        others = random.getstate(), np.random.get_state()
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])
        try:
            return decide()
        finally:
            self._random = random.getstate(), np.random.get_state()
            random.setstate(others[0])
            np.random.set_state(others[1])

    def on_trial_add(self, controller: Any, trial: Any) -> None:
        self._trials.append(trial)
        self._going.append(trial)
        self._numbers[trial.trial_id] = trial.config["trial"]
        # Population-based training refuses any search, for one would hear of its moves; ours draws by number.
        self._inner.on_trial_add(SimpleNamespace(search_alg=None), trial)

    def on_trial_error(self, controller: Any, trial: Any) -> None:
        self._inner.on_trial_error(controller, trial)

    def on_trial_complete(self, controller: Any, trial: Any, result: dict[str, Any]) -> None:
        if self._sweep.metric in result:
            self._inner.on_trial_complete(controller, trial, result)
        else:
            self._inner.on_trial_error(controller, trial)

    def on_trial_remove(self, controller: Any, trial: Any) -> None:
        self._inner.on_trial_remove(controller, trial)

    def choose_trial_to_run(self, controller: Any) -> Any:
        return self._inner.choose_trial_to_run(controller)

    def room(self) -> bool:
        """Whether another trial may begin now. All of a population do: it has to be whole before its first decision."""
        if isinstance(self._sweep.scheduler, Pbt):
            return True
        self._going = [trial for trial in self._going if not trial.is_finished()]
        running = [trial for trial in self._going if trial.status in {Trial.PENDING, Trial.RUNNING}]
        return len(running) < self._concurrency

    def debug_string(self) -> str:
        return str(self._inner.debug_string())
