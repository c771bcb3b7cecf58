"""A population: who takes over another trial's state goes on from the step at which that was decided."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.train import Checkpoint
from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

from lockstep.checkpoint.runs.names import give_name
from lockstep.checkpoint.storage.local import LocalStorage
from lockstep.spec.sweep import SweepSpec
from lockstep.sweeps.decisions import NAME, Decisions
from lockstep.sweeps.schedulers import RecordedScheduler, make_scheduler
from lockstep.sweeps.trial import run_name, spec_of, was_begun
from tests.unit.sweeps.tune_order import Tuned, sweep_of


class Controller:
    """What Tune's population-based training asks of its controller."""

    def __init__(self) -> None:
        self.trials: list[Any] = []

    def get_trials(self) -> list[Any]:
        return self.trials

    def get_live_trials(self) -> list[Any]:
        return [trial for trial in self.trials if not trial.is_finished()]

    def pause_trial(self, trial: Any, should_checkpoint: bool) -> None:
        trial.status = Trial.PAUSED

    def saved(self, trial: Any, folder: Path) -> None:
        trial.run_metadata.checkpoint_manager._latest_checkpoint_result = SimpleNamespace(
            checkpoint=Checkpoint(str(folder)), metrics={}
        )

    def _schedule_trial_save(self, trial: Any, result: Any) -> Any:
        return trial.checkpoint


@pytest.fixture
def controller() -> Controller:
    return Controller()


class Population:
    """A sweep whose members report to its scheduler."""

    def __init__(self, sweep: SweepSpec, folder: Path, controller: Controller, **more: Any) -> None:
        self._metric, self._controller = sweep.metric, controller
        folder.mkdir(exist_ok=True)
        self.decisions = Decisions(folder)
        rule = make_scheduler(sweep, 1000, 5)
        self.scheduler = RecordedScheduler(
            rule, sweep, self.decisions, lambda number, why: None, sweep.total, **more
        )
        for number in range(sweep.total):
            fields = sweep.sample(number)
            self.decisions.begin(number, fields)
            trial = Trial("stub", config={"trial": number, "fields": fields}, stub=True)
            trial.status = Trial.RUNNING
            controller.saved(trial, folder / str(number))
            controller.trials.append(trial)
            self.scheduler.on_trial_add(controller, trial)

    @property
    def members(self) -> list[Any]:
        return self._controller.trials

    def reports(self, number: int, step: int, loss: float) -> str:
        result = {"step": step, self._metric: loss, "run_id": f"run-{number}"}
        self.members[number].status = Trial.RUNNING
        return self.scheduler.on_trial_result(self._controller, self.members[number], result)

    def moves(self, step: int) -> list[dict[str, Any]]:
        """All report, the later the worse; the fields with which each goes on."""
        for number in range(len(self.members)):
            self.reports(number, step, float(number))
        return [dict(member.config["fields"]) for member in self.members]


def sweep_over(space: dict[str, Any], **fields: Any) -> SweepSpec:
    scheduler = {"name": "pbt", "every_steps": 5, "quantile": 0.5, "resample": 0.1}
    return sweep_of(space, scheduler=scheduler, **{"trials": 4, **fields})


def test_a_trial_goes_on_from_the_step_at_which_it_took_over_another_one(
    controller: Controller, tmp_path: Path
) -> None:
    """Also where that one has gone on, and Tune's folder has its next checkpoint, before it begins."""
    sweep = sweep_over({"optimizer.lr": {"loguniform": [1e-4, 1e-1]}}, trials=2)
    population = Population(sweep, tmp_path, controller)
    better, worse = population.members
    assert population.reports(0, 5, 1.0) == TrialScheduler.PAUSE
    population.reports(1, 5, 2.0)
    assert (better.config["trial"], worse.config["trial"]) == (0, 1)
    assert "fork" not in better.config
    assert worse.config["fork"] == {"run": "run-0", "step": 5}
    assert worse.config["fields"] != better.config["fields"]
    population.reports(0, 10, 0.5)
    assert worse.config["fork"] == {"run": "run-0", "step": 5}


def test_a_population_does_not_leave_the_space(controller: Controller, tmp_path: Path) -> None:
    """Tune's factors know no bounds: an average of more than the whole is no spec, a rate beyond its bounds not what was asked for."""
    space = {
        "ema": {"uniform": [0.9, 0.9999]},
        "optimizer.lr": {"loguniform": [1e-3, 2e-3]},
        "job.params.width": {"randint": [4, 7]},
        "precision": {"choice": ["fp32", "bf16"]},
    }
    sweep = sweep_over(space)
    population = Population(sweep, tmp_path, controller)
    seen: dict[str, set[Any]] = {field: set() for field in space}
    for step in range(5, 200, 5):
        for fields in population.moves(step):
            sweep.trial(fields)
            for field, value in fields.items():
                assert sweep.space[field].gives(value), f"{field}={value}"
                assert not isinstance(value, float) or value == sweep.space[field].rounded(value)
                seen[field].add(value)
    assert all(len(values) > 1 for values in seen.values())
    assert {0.9, 0.9999} <= seen["ema"], "nothing went as far as the bounds"


def test_explored_fields_of_which_there_is_no_spec_are_left_as_they_were(
    controller: Controller, tmp_path: Path
) -> None:
    """A batch of 64 has no micro-batches of 24; the rate that is explored with them is taken."""
    space = {
        "batch.global": {"choice": [48, 64]},
        "batch.micro": {"choice": [16, 24]},
        "optimizer.lr": {"loguniform": [1e-4, 1e-1]},
    }
    sweep = sweep_over(space, seed=10)  # all that begin can be trained
    population = Population(sweep, tmp_path, controller)
    seen: dict[str, set[Any]] = {field: set() for field in space}
    for step in range(5, 150, 5):
        for fields in population.moves(step):
            sweep.trial(fields)
            for field, value in fields.items():
                seen[field].add(value)
    assert seen["batch.global"] == {48, 64}
    assert seen["batch.micro"] == {16, 24}
    assert len(seen["optimizer.lr"]) > 10


def test_a_resumed_population_goes_on_with_the_fields_that_were_explored(tmp_path: Path) -> None:
    """Also those with which a version left the space, where a run began with them; where none could, they are in it now."""
    space = {"ema": {"uniform": [0.9, 0.9999]}, "optimizer.lr": {"loguniform": [1e-3, 2e-3]}}
    sweep = sweep_over(space)
    steps = range(5, 50, 5)
    whole = Population(sweep, tmp_path, Controller())
    expected = [whole.moves(step) for step in steps]
    again = Population(sweep, tmp_path, Controller(), begun=lambda number, config: True)
    assert [again.moves(step) for step in steps] == expected
    assert (tmp_path / NAME).read_text().count("explored") == 2 * len(steps)

    (tmp_path / "old").mkdir()
    for number in range(4):
        Decisions(tmp_path / "old").begin(number, sweep.sample(number))
    asked: list[dict[str, Any]] = []

    def begun(number: int, config: dict[str, Any]) -> bool:
        asked.append({"trial": number, **config["fields"]})
        return bool(config["fields"]["ema"] < 1)

    old = Population(sweep, tmp_path / "old", Controller(), begun=begun)
    moved = old.moves(5)
    kept = [one for one in asked if one["ema"] < 1]
    assert kept
    for one in asked:
        number = one.pop("trial")
        assert (moved[number] == one) is (one["ema"] < 1)
    assert Decisions(tmp_path / "old").explored(3, 5) == moved[3]


@pytest.mark.parametrize("status", ["failed", "stopped"])
def test_a_population_does_not_wait_for_a_member_that_has_failed(
    controller: Controller, tmp_path: Path, status: str
) -> None:
    """It goes on as where the member had failed before the others came; but it does where one was stopped, which comes back when the sweep does."""
    sweep = sweep_over({"optimizer.lr": {"loguniform": [1e-4, 1e-1]}})
    population = Population(sweep, tmp_path, controller)
    for number in range(3):
        population.reports(number, 5, float(number))
        population.members[number].status = Trial.PAUSED
    assert population.scheduler.choose_trial_to_run(controller) is None, "the fourth is on its way"
    population.members[3].status = Trial.TERMINATED
    if status == "failed":
        population.decisions.end(3, status, 4, None, "the loss is not finite")
    chosen = population.scheduler.choose_trial_to_run(controller)
    moved = [member.config["fields"] for member in population.members]
    if status == "stopped":
        assert chosen is None
        assert moved == [sweep.sample(number) for number in range(4)]
        return
    assert chosen is population.members[0]

    other = Population(sweep, tmp_path / "other", Controller())
    other.members[3].status = Trial.TERMINATED
    for number in range(3):
        other.reports(number, 5, float(number))
    assert moved == [member.config["fields"] for member in other.members]
    assert moved[2] != sweep.sample(2)


@pytest.mark.parametrize("at_work", [True, False])
def test_a_sweep_that_is_to_end_does_not_wait_for_members_that_wait(tmp_path: Path, at_work: bool) -> None:
    """They have a checkpoint; another one may be stopped before it gets to where they are."""
    tuned = Tuned(sweep_over({"optimizer.lr": {"loguniform": [1e-4, 1e-1]}}), tmp_path)
    members = [SimpleNamespace(config={"trial": number, "fields": {}}, status="RUNNING") for number in (0, 1)]
    for member in members:
        tuned.table.on_trial_start(0, members, member)
    tuned.table.on_step_begin(0, members)
    tuned.table.over = "stopped by a signal"
    members[0].status = "PAUSED"
    if not at_work:
        result = {"done": True, "status": "stopped", "reason": ""}
        tuned.table.on_trial_result(0, members, members[1], result)
        members[1].status = "TERMINATED"
    assert tuned.table.stop_all() is not at_work
    expected = ["running", "running"] if at_work else ["stopped", "stopped"]
    assert [row["status"] for row in tuned.table.trials] == expected
    assert not Decisions(tmp_path).ends


def test_a_run_of_an_earlier_session_is_found_by_its_configuration(tmp_path: Path) -> None:
    sweep = sweep_over({"ema": {"uniform": [0.9, 0.9999]}}, spec={"checkpoint": {"storage": str(tmp_path)}})
    config = {"trial": 1, "fields": {"ema": 0.95}, "fork": {"run": "run-0", "step": 5}}
    assert not was_begun(sweep, "sweep", 1, config)
    spec = spec_of(sweep, 1, config)
    assert spec.fork is not None
    assert (spec.fork.run, spec.fork.step, spec.fork.storage) == ("run-0", 5, str(tmp_path))
    give_name(LocalStorage(tmp_path), run_name("sweep", 1, spec), "run-1")
    assert was_begun(sweep, "sweep", 1, config)
    assert not was_begun(sweep, "sweep", 1, {"trial": 1, "fields": {"ema": 0.95}})
    assert not was_begun(sweep, "sweep", 1, {**config, "fields": {"ema": 0.96}})
    assert not was_begun(sweep, "sweep", 1, {**config, "fields": {"ema": 1.2}})
