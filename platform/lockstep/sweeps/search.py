"""Which values the next trial has: drawn by number, or suggested by Optuna from the results so far."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from ray.tune.search import Searcher

from lockstep.spec.sweep import SweepSpec
from lockstep.sweeps import problems
from lockstep.sweeps.decisions import Decisions, WithoutState


class Search(WithoutState, Searcher):  # type: ignore[misc]
    """The trials of a sweep in order. Those that were made before it was interrupted are made again as they were."""

    def __init__(self, sweep: SweepSpec, decisions: Decisions, room: Callable[[], bool]) -> None:
        super().__init__(metric=sweep.metric, mode=sweep.mode)
        self._room = room
        self._sweep, self._decisions = sweep, decisions
        self._numbers: dict[str, int] = {}
        self._optuna: Any = optuna_search(sweep) if sweep.search == "optuna" else None
        self._suggested: set[int] = set()
        self._lived = 0
        """How many of the decisions Optuna has lived through."""
        self._catch_up()

    def suggest(self, trial_id: str) -> dict[str, Any] | Any:
        number = len(self._numbers)
        if number >= self._sweep.total:
            return Searcher.FINISHED
        if not self._room():
            return None
        self._numbers[trial_id] = number
        fields = self._decisions.began.get(number)
        if fields is None:
            self._catch_up()
            fields = self._suggest(number)
            self._decisions.begin(number, fields)
        return {"trial": number, "fields": fields}

    def _suggest(self, number: int) -> dict[str, Any]:
        if self._optuna is None:
            return self._sweep.sample(number)
        self._suggested.add(number)
        # Tune's warning is of a function that takes a second on a busy machine, and is not the user's.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Define-by-run function")
            suggested = self._optuna.suggest(str(number))
        return {name: json.loads(value) for name, value in suggested.items()}

    def _catch_up(self) -> None:
        """Have Optuna live through what it has not yet of the decisions, in their order: what has just been decided, or all after a resume."""
        if self._optuna is None:
            return
        for event in self._decisions.events[self._lived :]:
            self._lived += 1
            number = event["trial"]
            if "status" in event:
                self._tell(number, event)
            elif (
                "fields" in event
                and number not in self._suggested
                and (again := self._suggest(number)) != event["fields"]
            ):
                raise problems.OTHER_SUGGESTION(trial=number, got=again, wanted=event["fields"])

    def _tell(self, number: int, end: Mapping[str, Any]) -> None:
        metric = end["metric"]
        usable = end["status"] != "failed" and metric is not None and not math.isnan(metric)
        result = {self._sweep.metric: metric} if usable else None
        self._optuna.on_trial_complete(str(number), result, error=not usable)

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Nothing: Optuna hears of an end from the decisions, which have it first."""

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Nothing: the search hears of ends."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the decisions are the state."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing, likewise."""


def optuna_search(sweep: SweepSpec) -> Any:
    """Tune's way to Optuna, over the fields of the space; every value travels as JSON, for one may be a whole section."""
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise problems.NO_OPTUNA() from error
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def suggested(trial: Any) -> dict[str, Any]:
        chosen: dict[str, Any] = {}
        for field, domain in sweep.space.items():
            if not sweep.holds(domain.when, chosen):
                continue
            if domain.choice is not None:
                values = [json.dumps(value, sort_keys=True) for value in domain.choice]
                chosen[field] = json.loads(trial.suggest_categorical(field, values))
            elif domain.randint is not None:
                chosen[field] = trial.suggest_int(field, domain.randint[0], domain.randint[1] - 1)
            else:
                low, high = domain.uniform or domain.loguniform or (0.0, 0.0)
                drawn = trial.suggest_float(field, low, high, log=domain.loguniform is not None)
                chosen[field] = domain.rounded(drawn)
        return {field: json.dumps(value) for field, value in chosen.items()}

    return OptunaSearch(space=suggested, metric=sweep.metric, mode=sweep.mode, seed=sweep.seed)
