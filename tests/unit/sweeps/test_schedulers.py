"""A resumed sweep ends early the trials that the uninterrupted one does, and no trial that had ended."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

from lockstep.record.ledger.rows import EvaluationRow
from lockstep.record.ledger.tables import Rows
from lockstep.spec.sweep import SweepSpec
from lockstep.sweeps import trial as trials
from lockstep.sweeps.decisions import NAME, Decisions
from lockstep.sweeps.trial import Training
from tests.unit.sweeps.tune_order import NoRecorders, Tuned, sweep_of

LR = {"optimizer.lr": {"loguniform": [1e-4, 1e-1]}}
TRIALS = 8
STEPS = (10, 20, 30, 60, 90, 100)
RULES = {
    "asha": {"name": "asha", "grace_steps": 10, "reduction_factor": 3},
    "median": {"name": "median", "grace_steps": 10, "min_trials": 2},
}

Report = tuple[int, int, bool]
"""A trial, a step that it has evaluated, and whether it was over there."""


@pytest.fixture(params=sorted(RULES))
def sweep(request: pytest.FixtureRequest) -> SweepSpec:
    return sweep_of(LR, trials=TRIALS, scheduler=RULES[request.param])


class Session:
    """A sweep of so many trials at a time, whose losses and whose turns are drawn from a seed: the same in each session."""

    def __init__(self, sweep: SweepSpec, folder: Path, seed: int, at_once: int) -> None:
        self.tuned = Tuned(sweep, folder, total_steps=STEPS[-1])
        self._draw, self._seed, self._at_once = random.Random(seed), seed, at_once
        self._going: list[int] = []
        self._begun = 0
        self._place = dict.fromkeys(range(TRIALS), 0)

    def run(self, count: int = 1000, known: Sequence[Report] = ()) -> list[Report]:
        """So many reports. Those of an earlier session are only turns that were had."""
        reports: list[Report] = []
        while len(reports) < count:
            while self._begun < TRIALS and len(self._going) < self._at_once:
                if self._begun not in self.tuned.trials:
                    self.tuned.begin()
                self._going.append(self._begun)
                self._begun += 1
            if not self._going:
                break
            number = self._draw.choice(self._going)
            if len(reports) < len(known):
                step, over = known[len(reports)][1:]
            else:
                step = STEPS[self._place[number]]
                over = self.report(number, step, "finished" if step == STEPS[-1] else "")
            self._place[number] += 1
            if over:
                self._going.remove(number)
            reports.append((number, step, over))
        return reports

    def report(self, number: int, step: int, status: str) -> bool:
        value = random.Random(f"{self._seed}:{number}:{step}").random() + number % 3
        return self.tuned.report(number, step, value, status)

    def report_again(self, known: Sequence[Report]) -> None:
        """What an earlier session has heard, in another order; an end comes with the last result of its trial."""
        for number in range(1 + max(number for number, _, _ in known)):
            assert self.tuned.begin() == number
        again: dict[int, list[Report]] = {}
        for report in known:
            again.setdefault(report[0], []).append(report)
        ends = dict(self.tuned.decisions.ends)
        while again:
            number = max(again) if self._at_once > 1 else min(again)
            _, step, over = again[number].pop(0)
            assert self.report(number, step, ends[number]["status"] if over else "") == over
            if not again[number]:
                del again[number]


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("seed", range(2))
def test_a_resumed_sweep_decides_as_the_uninterrupted_one(
    sweep: SweepSpec, tmp_path: Path, seed: int, at_once: int
) -> None:
    """Wherever it is cut, and though the recorded results of the trials arrive in another order."""
    whole = Session(sweep, tmp_path / "whole", seed, at_once)
    reports = whole.run()
    assert any(over and step < STEPS[-1] for _, step, over in reports), "no trial is pruned"
    for cut in range(1, len(reports), 5):
        first = Session(sweep, tmp_path / str(cut), seed, at_once)
        assert first.run(cut) == reports[:cut]
        again = Session(sweep, tmp_path / str(cut), seed, at_once)
        again.report_again(reports[:cut])
        assert again.run(known=reports[:cut]) == reports
        assert again.tuned.rows() == whole.tuned.rows()


def without_results(folder: Path) -> None:
    """Leave of a sweep's decisions what versions recorded that did not record the results which the scheduler heard."""
    events = [json.loads(line) for line in (folder / NAME).read_text().splitlines()]
    for event in events:
        if event.pop("heard", None) is not None:
            event.pop("metric")
    kept = [event for event in events if event.keys() != {"trial"}]
    assert len(kept) < len(events)
    (folder / NAME).write_text("".join(json.dumps(event) + "\n" for event in kept))


def test_a_sweep_of_a_version_that_recorded_no_results_goes_on(sweep: SweepSpec, tmp_path: Path) -> None:
    """Trials that ended stay as they were; with one at a time what is decided later is as in the uninterrupted sweep, also when it is resumed twice."""
    whole = Session(sweep, tmp_path / "whole", 0, 1)
    reports = whole.run()
    ends = [place + 1 for place, (_, _, over) in enumerate(reports) if over]
    first, second = ends[3], ends[5] + 1
    Session(sweep, tmp_path / "old", 0, 1).run(first)
    without_results(tmp_path / "old")
    for cut, until in ((first, second), (second, len(reports))):
        session = Session(sweep, tmp_path / "old", 0, 1)
        session.report_again(reports[:cut])
        assert session.run(until, known=reports[:cut]) == reports[:until]
    assert session.tuned.rows() == whole.tuned.rows()


@pytest.mark.parametrize("old", [False, True])
def test_trials_that_had_ended_are_not_judged_again(tmp_path: Path, old: bool) -> None:
    """Trial 0 was ahead of trial 1 when it was judged, and is the best; now the results of trial 1 arrive first."""
    sweep = sweep_of(LR, trials=2, scheduler=RULES["asha"])
    curves = {0: {10: 0.5, 20: 0.2, 30: 0.01}, 1: {10: 0.4, 20: 0.3, 30: 0.1}}
    for turns in ((0, 1), (1, 0)):
        tuned = Tuned(sweep, tmp_path, total_steps=30)
        assert [tuned.begin(), tuned.begin()] == [0, 1]
        for step in (10, 20, 30):
            for number in turns:
                status = "finished" if step == 30 else ""
                assert tuned.report(number, step, curves[number][step], status) == bool(status)
        assert tuned.rows() == [(0, "finished", 30, 0.01), (1, "finished", 30, 0.1)]
        if old:
            without_results(tmp_path)


def test_a_trial_that_was_told_to_end_when_the_sweep_was_killed_ends(
    sweep: SweepSpec, tmp_path: Path
) -> None:
    decisions = Decisions(tmp_path)
    decisions.begin(0, sweep.sample(0))
    decisions.hear(0, 10, 5.0, "asha: not among the best")
    tuned = Tuned(sweep, tmp_path)
    tuned.begin()
    assert tuned.report(0, 10, 5.0)
    assert tuned.rows() == [(0, "pruned", 10, 5.0)]


def test_no_trial_waits_for_others_that_have_not_begun(sweep: SweepSpec, tmp_path: Path) -> None:
    """Tune's median would pause it, for which it has to be saved at any evaluation."""
    waiting = SimpleNamespace(get_live_trials=lambda: [SimpleNamespace(status=Trial.PENDING)])
    tuned = Tuned(sweep, tmp_path)
    tuned.begin()
    for step in STEPS[:3]:
        result = {"step": step, sweep.metric: 1.0, "run_id": "run-0"}
        assert tuned.scheduler.on_trial_result(waiting, tuned.trials[0], result) == TrialScheduler.CONTINUE


def told_again(
    sweep: SweepSpec, rows: list[EvaluationRow], status: str, folder: Path, patch: pytest.MonkeyPatch
) -> list[dict[str, Any]]:
    """What Tune is given of a trial that had ended with this status, of which these evaluations are recorded."""
    found = SimpleNamespace(
        run_id="run-0", status="KILLED" if status == "pruned" else "FINISHED", summary={"weights_digest": "d"}
    )
    for name, value in {
        "run_of_name": "run-0",
        "find_run": found,
        "doubt": "",
        "find_history": Rows([], rows),
    }.items():
        patch.setattr(trials, name, lambda *_, value=value: value)
    end = {"trial": 0, "status": status, "step": 20, "metric": 1.0, "reason": ""}
    training = Training(sweep.base, 0, "sweep", NoRecorders(), [], folder, end, may_reuse=False)
    given = [training.next_result()]
    while not given[-1].get("done"):
        given.append(training.next_result())
    return given


@pytest.mark.parametrize("status", ["finished", "pruned"])
def test_the_last_result_of_a_trial_that_had_ended_comes_with_its_end(
    sweep: SweepSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    """As where it is trained: a scheduler is not asked about it."""
    rows = [EvaluationRow(step, 0, {sweep.metric: 1.0}, 0.1, 1.0) for step in (10, 20)]
    given = told_again(sweep, rows, status, tmp_path, monkeypatch)
    assert [(result["step"], result.get("status")) for result in given] == [(10, None), (20, status)]


def test_an_evaluation_without_the_metric_has_not_that_of_the_one_before(
    sweep: SweepSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        EvaluationRow(10, 0, {sweep.metric: 1.0}, 0.1, 1.0),
        EvaluationRow(20, 0, {"eval/f1": 0.5}, 0.1, 1.0),
    ]
    given = told_again(sweep, rows, "finished", tmp_path, monkeypatch)
    assert [(result["step"], result.get(sweep.metric)) for result in given] == [(10, 1.0), (20, None)]
    tuned = Tuned(sweep, tmp_path)
    tuned.begin()
    for result in given:
        tuned.table.on_trial_result(0, [], tuned.trials[0], result)
    (row,) = tuned.table.trials
    assert row["curve"] == [(10, 1.0)]
    assert "gave no 'eval/loss', but eval/f1, and the value is that of step 10" in row["reason"]
