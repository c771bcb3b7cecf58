"""What Optuna suggests comes from the results of all trials that have ended, in their order; also when the sweep is resumed."""

from __future__ import annotations

import math
import re
from pathlib import Path

import optuna
import pytest

from lockstep.spec.sweep import SweepSpec
from lockstep.sweeps import problems
from lockstep.sweeps.decisions import NAME
from tests.raised import raises
from tests.unit.sweeps.tune_order import Tuned, sweep_of

TRIALS = 24
AT_ONCE = 3


@pytest.fixture
def sweep() -> SweepSpec:
    space = {"optimizer.lr": {"loguniform": [1e-5, 1.0]}}
    return sweep_of(space, trials=TRIALS, search="optuna", seed=1, concurrency=AT_ONCE)


def loss(lr: float) -> float:
    return abs(math.log10(lr) + 3)


def order() -> list[int]:
    """Who begins (its number) and who ends (-1 - its number): of three at once the second one ends first."""
    found: list[int] = []
    going: list[int] = []
    waiting = [*range(TRIALS)]
    while waiting or going:
        while waiting and len(going) < AT_ONCE:
            going.append(waiting.pop(0))
            found.append(going[-1])
        found.append(-1 - going.pop(len(going) // 2))
    return found


def searched(tuned: Tuned, events: list[int]) -> list[float]:
    """The rates of the trials, as they begin."""
    rates: list[float] = []
    for event in events:
        if event >= 0:
            assert tuned.begin() == event
            rates.append(tuned.trials[event].config["fields"]["optimizer.lr"])
        else:
            tuned.report(-1 - event, 10, loss(rates[-1 - event]), "finished")
    return rates


def by_hand(events: list[int]) -> list[float]:
    """The same with a study of Optuna that is told each result."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=1))
    asked: list[optuna.Trial] = []
    rates: list[float] = []
    for event in events:
        if event >= 0:
            asked.append(study.ask())
            rates.append(float(f"{asked[-1].suggest_float('optimizer.lr', 1e-5, 1.0, log=True):.6g}"))
        else:
            study.tell(asked[-1 - event], loss(rates[-1 - event]))
    return rates


def test_optuna_is_told_the_result_of_each_trial_before_it_suggests_the_next(
    sweep: SweepSpec, tmp_path: Path
) -> None:
    events = order()
    rates = searched(Tuned(sweep, tmp_path), events)
    assert rates == by_hand(events)
    untold = by_hand([event for event in events if event >= 0])
    assert rates[:10] == untold[:10], "these are drawn before Optuna looks at results"
    assert rates[12:] != untold[12:]


@pytest.mark.parametrize("cut", [1, 20, 33, 40])
def test_a_resumed_search_suggests_what_the_uninterrupted_one_does(
    sweep: SweepSpec, tmp_path: Path, cut: int
) -> None:
    """The trials that had ended report again, and those that had not end then, in the order that they had."""
    before, after = order()[:cut], order()[cut:]
    rates = searched(Tuned(sweep, tmp_path), before)
    assert rates == by_hand(before)
    begun = [event for event in before if event >= 0]
    again = sorted(event for event in before if event < 0)
    assert searched(Tuned(sweep, tmp_path), [*begun, *again, *after]) == by_hand(order())


def test_a_failed_trial_and_one_without_a_number_have_no_value_for_optuna(tmp_path: Path) -> None:
    """Live as resumed: neither the last loss before the failure, nor NaN."""
    sweep = sweep_of({"optimizer.lr": {"loguniform": [1e-5, 1.0]}}, trials=16, search="optuna", seed=1)

    def run(tuned: Tuned, numbers: range, stop: int = 16) -> list[float]:
        rates = []
        for number in numbers:
            tuned.begin()
            rates.append(tuned.trials[number].config["fields"]["optimizer.lr"])
            if number < stop:
                value = math.nan if number == 3 else 0.0 if number == 2 else loss(rates[-1])
                tuned.report(number, 10, value, "failed" if number == 2 else "finished")
        return rates

    whole = run(Tuned(sweep, tmp_path / "whole"), range(16))
    cut = run(Tuned(sweep, tmp_path / "cut"), range(13), stop=12)
    assert cut == whole[:13]
    assert run(Tuned(sweep, tmp_path / "cut"), range(16)) == whole
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=1))
    for number, rate in enumerate(whole):
        trial = study.ask()
        assert float(f"{trial.suggest_float('optimizer.lr', 1e-5, 1.0, log=True):.6g}") == rate
        failed = number in {2, 3}
        state = optuna.trial.TrialState.FAIL if failed else optuna.trial.TrialState.COMPLETE
        study.tell(trial, None if failed else loss(rate), state=state)


def test_a_search_that_suggests_other_values_than_before_is_refused(sweep: SweepSpec, tmp_path: Path) -> None:
    searched(Tuned(sweep, tmp_path), order()[:30])
    path = tmp_path / NAME
    path.write_text(re.sub(r'"metric": [^,]+', '"metric": 1.0', path.read_text()))
    with raises(problems.OTHER_SUGGESTION):
        Tuned(sweep, tmp_path)
