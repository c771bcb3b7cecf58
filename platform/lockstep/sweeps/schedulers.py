"""Which trials end early: Tune's schedulers, told every result once, and what they decided before decided again."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from ray import tune
from ray.tune import schedulers
from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

from lockstep.errors import SpecError
from lockstep.spec.sweep import Domain, SweepSpec
from lockstep.sweeps.decisions import Decisions, WithoutState

STEP = "step"
"""The time of a result, in optimizer steps: `training_iteration` counts results, and begins anew with each attempt."""


def make_scheduler(sweep: SweepSpec, total_steps: int, first_evaluation: int) -> Any:
    """Tune's scheduler for a sweep whose trials have `total_steps` steps and evaluate first after `first_evaluation`."""
    rule = sweep.scheduler
    arguments = rule.arguments(total_steps, first_evaluation)
    if rule.is_timed:
        arguments |= {"metric": sweep.metric, "mode": sweep.mode, "time_attr": STEP}
    if rule.has_population:
        mutations = {field: mutation(domain) for field, domain in sweep.space.items()}
        arguments["hyperparam_mutations"] = {"fields": mutations}
    return getattr(schedulers, rule.tune_class)(**arguments)


def mutation(domain: Domain) -> Any:
    """A domain as population-based training knows it: values in their order, or something to draw from."""
    if domain.values is not None:
        return domain.values
    if domain.randint is not None:
        return tune.randint(*domain.randint)
    return tune.uniform(*domain.uniform) if domain.uniform else tune.loguniform(*(domain.loguniform or ()))


class _Member:
    """A trial as Tune's rules know it."""

    def __init__(self, number: int) -> None:
        self.trial_id = str(number)


class EndingRule:
    """Which trials end early by one of Tune's rules, which lives through the results and ends that the decisions have, in their order.

    So it is the same after a resume, before anything new. It knows trials by their numbers; whether others wait is nothing to it.
    """

    def __init__(self, inner: Any, metric: str) -> None:
        self._inner, self._metric = inner, metric
        self._members: dict[int, _Member] = {}
        self._going: set[int] = set()
        self._controller = SimpleNamespace(get_live_trials=list)

    def take(self, event: Mapping[str, Any]) -> bool:
        """Live through a decision. Whether a trial whose result it is should end there."""
        number, metric = event["trial"], event.get("metric")
        if "heard" in event:
            result = {STEP: event["heard"], self._metric: metric}
            verdict = self._inner.on_trial_result(self._controller, self._member(number), result)
            return bool(verdict != TrialScheduler.CONTINUE)
        if event.get("status", "failed") != "failed" and metric is not None:
            result = {STEP: event["step"], self._metric: metric}
            self._inner.on_trial_complete(self._controller, self._member(number), result)
            self._going.remove(number)
        return False

    def _member(self, number: int) -> _Member:
        member = self._members.setdefault(number, _Member(number))
        if number not in self._going:
            self._going.add(number)
            self._inner.on_trial_add(self._controller, member)
        return member


class RecordedScheduler(WithoutState, TrialScheduler):  # type: ignore[misc]
    """A scheduler that hears each step of a trial once, however often an attempt reports it, and stands by what it decided.

    `on_stop` is told of a trial that it ends. No more than `concurrency` trials are begun at a time. `begun` says whether a run of a
    trial, by its number, with a configuration was begun by an earlier session.
    """

    def __init__(
        self,
        inner: Any,
        sweep: SweepSpec,
        decisions: Decisions,
        on_stop: Callable[[int, str], None],
        concurrency: int,
        begun: Callable[[int, Mapping[str, Any]], bool] = lambda number, config: False,
    ) -> None:
        super().__init__()
        self._begun, self._resumed = begun, bool(decisions.events)
        self._concurrency = concurrency
        self._trials: list[Any] = []
        self._going: list[Any] = []
        self._numbers: dict[str, int] = {}
        self._inner, self._sweep, self._decisions, self._on_stop = inner, sweep, decisions, on_stop
        self._population = sweep.scheduler.has_population
        ends = sweep.scheduler.is_timed and not self._population
        self._rule = EndingRule(inner, sweep.metric) if ends else None
        self._lived = 0
        """How many of the decisions the rule has lived through."""
        self._reached: dict[int, dict[str, Any]] = {}
        """The run and the step of each member's last result."""
        self._results: dict[Any, dict[str, Any]] = {}
        """Each member's last one."""
        self._random = random.Random(sweep.seed).getstate(), np.random.RandomState(sweep.seed).get_state()

    @property
    def metric(self) -> str:
        return self._sweep.metric

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        return not metric and not mode

    def on_trial_result(self, controller: Any, trial: Any, result: dict[str, Any]) -> str:
        if self._sweep.metric not in result:
            return str(TrialScheduler.CONTINUE)
        if self._population:
            return self._on_member_result(controller, trial, result)
        number = trial.config["trial"]
        why = self._verdict(number, result.get(STEP, 0), result[self._sweep.metric])
        if why is None:
            return str(TrialScheduler.CONTINUE)
        self._on_stop(number, why)
        return str(TrialScheduler.STOP)

    def _verdict(self, number: int, step: int, metric: float) -> str | None:
        """Why a trial is to end after this result, as it was decided where it was; None where it goes on."""
        why = self._decisions.stopped(number, step)
        if self._rule is None or step <= self._decisions.heard.get(number, 0):
            return why
        end = self._decisions.ends.get(number)
        if end is None:
            self._catch_up()
            ends = self._rule.take({"trial": number, "heard": step, "metric": metric})
            if why is None and ends:
                rule = self._sweep.scheduler.name
                why = f"{rule}: {self._sweep.metric} {metric:.6g} at step {step} is not among the best"
            self._decisions.hear(number, step, metric, why)
            self._lived = len(self._decisions.events)
        elif step < end["step"]:  # decided by a version that did not record what was heard
            self._decisions.hear(number, step, metric)
        return why

    def _catch_up(self) -> None:
        """Have the rule live through what it has not yet of the decisions: what has just ended, or all after a resume."""
        assert self._rule is not None
        new = self._decisions.events[self._lived :]
        last = {event["trial"]: index for index, event in enumerate(new) if "heard" in event}

        def order(position: int) -> float:
            """The end of a trial comes after its results. In a sweep of a version that recorded no results, they stand behind the end."""
            event = new[position]
            return max(position, last.get(event["trial"], 0) + 0.5) if "status" in event else position

        for index in sorted(range(len(new)), key=order):
            self._rule.take(new[index])
        self._lived += len(new)

    def _on_member_result(self, controller: Any, trial: Any, result: dict[str, Any]) -> str:
        number, step = trial.config["trial"], result.get(STEP, 0)
        if step <= self._reached.get(number, {STEP: 0})[STEP]:
            return str(TrialScheduler.CONTINUE)
        self._reached[number] = {"run": result["run_id"], STEP: step}
        self._results[trial] = result
        decision = self._seeded(lambda: self._inner.on_trial_result(controller, trial, result))
        self._take_over()
        return str(decision)

    def _take_over(self) -> None:
        """Tell the trials that have just taken over another one's state which one that is, and give them their own number back.

        Tune copies the whole configuration. With it they get the folder of that trial's checkpoint, into which its next one may be
        written before they begin: so the run and the step stand in their configuration.
        """
        for current in self._trials:
            number, source_number = self._numbers[current.trial_id], current.config["trial"]
            if source_number != number:
                current.config |= {"trial": number, "fork": self._reached[source_number]}
                origin = next(
                    trial for trial in self._trials if self._numbers[trial.trial_id] == source_number
                )
                current.config["fields"] = self._explored(number, current.config, origin.config["fields"])

    def _explored(
        self, number: int, config: Mapping[str, Any], source_fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The fields of a trial that goes on from another trial's state; `source_fields` are that trial's.

        Tune's, which know no bounds, within the space; what was decided before stays.
        """
        step, fields = config["fork"][STEP], dict(config["fields"])
        explored = self._decisions.explored(number, step)
        if explored is None:
            explored = self._within(fields, source_fields)
            if explored != fields and self._resumed and self._begun(number, config):
                explored = fields  # by a version that left the space
            self._decisions.explore(number, step, explored)
        return explored

    def _within(self, fields: Mapping[str, Any], source_fields: Mapping[str, Any]) -> dict[str, Any]:
        """Explored fields in their domains; where no spec has all of them, as many of them as a spec accepts beside the `source_fields`."""
        within = {field: self._sweep.space[field].nearest(value) for field, value in fields.items()}
        if self._is_spec(within):
            return within
        accepted = dict(source_fields)
        for field, value in within.items():
            if self._is_spec({**accepted, field: value}):
                accepted[field] = value
        return accepted

    def _is_spec(self, fields: Mapping[str, Any]) -> bool:
        try:
            self._sweep.trial(fields)
        except SpecError:
            return False
        return True

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
        self._going.append(trial)
        if self._population:
            self._trials.append(trial)
            self._numbers[trial.trial_id] = trial.config["trial"]
            # Population-based training refuses any search, for one would hear of its moves; ours draws by number.
            self._inner.on_trial_add(SimpleNamespace(search_alg=None), trial)

    # The rules hear of ends from the decisions, and a population of none.

    def on_trial_error(self, controller: Any, trial: Any) -> None: ...

    def on_trial_complete(self, controller: Any, trial: Any, result: dict[str, Any]) -> None: ...

    def on_trial_remove(self, controller: Any, trial: Any) -> None: ...

    def choose_trial_to_run(self, controller: Any) -> Any:
        chosen = self._inner.choose_trial_to_run(controller)
        if chosen is None and self._population and self._waits_for_nobody():
            trial = next(trial for trial in self._trials if not trial.is_finished())
            self._seeded(lambda: self._inner.on_trial_result(controller, trial, self._results[trial]))
            self._take_over()
            chosen = self._inner.choose_trial_to_run(controller)
        return chosen

    def _waits_for_nobody(self) -> bool:
        """Whether the whole population waits, and the one that it waited for has ended for good: Tune decides only where one reports."""
        unfinished = [trial for trial in self._trials if not trial.is_finished()]
        ended = [self._numbers[trial.trial_id] for trial in self._trials if trial.is_finished()]
        return (
            bool(unfinished)
            and len(self._trials) == self._sweep.total
            and all(trial.status == Trial.PAUSED and trial in self._results for trial in unfinished)
            and all(number in self._decisions.ends for number in ended)
        )

    def room(self) -> bool:
        """Whether another trial may begin now. All of a population do: it has to be whole before its first decision."""
        if self._population:
            return True
        self._going = [trial for trial in self._going if not trial.is_finished()]
        running = [trial for trial in self._going if trial.status in {Trial.PENDING, Trial.RUNNING}]
        return len(running) < self._concurrency

    def debug_string(self) -> str:
        return str(self._inner.debug_string())
