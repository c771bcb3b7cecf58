"""The space of a sweep: what it draws is a pure function, what is wrong with it is said in one line."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import SpecError
from lockstep.job.identity import deciding, identity_digest
from lockstep.spec import problems
from lockstep.spec.loading import load_spec
from lockstep.spec.messages import shown
from lockstep.spec.sweep import SweepSpec, load_sweep
from tests.raised import raises

BASE = {"job": {"use": "jobs.digits.job:Digits"}, "record": {"uri": "off"}}


def sweep(space: dict[str, Any], **more: Any) -> SweepSpec:
    return load_sweep({"spec": BASE, "space": space, "trials": 8, **more})


def test_the_same_seed_draws_the_same_trials() -> None:
    space = {"optimizer.lr": {"loguniform": [1e-4, 1e-1]}, "precision": {"choice": ["fp32", "bf16", "fp16"]}}
    first, again, other = sweep(space, seed=3), sweep(space, seed=3), sweep(space, seed=4)
    assert [first.sample(i) for i in range(8)] == [again.sample(i) for i in range(8)]
    assert [first.sample(i) for i in range(8)] != [other.sample(i) for i in range(8)]


def test_a_field_more_leaves_the_others_as_they_are() -> None:
    lr = {"optimizer.lr": {"loguniform": [1e-4, 1e-1]}}
    with_seed = sweep({"seed": {"randint": [0, 100]}, **lr})
    assert [sweep(lr).sample(i)["optimizer.lr"] for i in range(8)] == [
        with_seed.sample(i)["optimizer.lr"] for i in range(8)
    ]


def test_draws_lie_within_their_bounds() -> None:
    space = {
        "optimizer.lr": {"loguniform": [1e-4, 1e-1]},
        "clip_norm": {"uniform": [0.5, 2.0]},
        "seed": {"randint": [3, 6]},
    }
    spec = sweep(space, trials=300)
    drawn = [spec.sample(i) for i in range(300)]
    assert all(1e-4 <= fields["optimizer.lr"] <= 1e-1 for fields in drawn)
    assert all(0.5 <= fields["clip_norm"] <= 2.0 for fields in drawn)
    assert {fields["seed"] for fields in drawn} == {3, 4, 5}
    decades = Counter(int(-4 + 3 * (i / 300)) for i in range(300))
    assert min(decades.values()) > 0
    below = sum(fields["optimizer.lr"] < 10**-2.5 for fields in drawn)
    assert 110 < below < 190, "half of the draws lie in the lower half of a logarithmic range"


def test_grids_are_gone_through() -> None:
    space = {"precision": {"grid": ["fp32", "bf16"]}, "batch.micro": {"grid": [8, 16, 32]}}
    every = load_sweep({"spec": BASE, "space": space})
    assert every.total == 6
    assert [tuple(every.sample(i).values()) for i in range(7)] == [
        *itertools.product(["fp32", "bf16"], [8, 16, 32]),
        ("fp32", 8),
    ]
    searched = load_sweep(
        {"spec": BASE, "search": "grid", "space": {"precision": {"choice": ["fp32", "bf16"]}}}
    )
    assert [searched.sample(i)["precision"] for i in range(searched.total)] == ["fp32", "bf16"]


def test_a_trial_of_a_large_grid_is_made_without_the_others() -> None:
    grid = {"grid": [*range(1000)]}
    space = {f"job.params.{name}": grid for name in "abcdef"}
    spec = {**BASE, "job": {"use": "jobs:Job", "params": {}}}
    large = load_sweep({"spec": spec, "space": space, "trials": 2000})
    assert [*large.sample(1999).values()] == [0, 0, 0, 0, 1, 999]


@pytest.mark.scenario
def test_a_field_may_depend_on_another() -> None:
    space = {
        "schedule.name": {"choice": ["cosine", "step"]},
        "schedule.every": {"randint": [10, 20], "when": {"schedule.name": "step"}},
    }
    drawn = [sweep(space, trials=40).sample(i) for i in range(40)]
    assert {("schedule.every" in fields) == (fields["schedule.name"] == "step") for fields in drawn} == {True}
    assert {fields["schedule.name"] for fields in drawn} == {"cosine", "step"}


def test_a_field_may_depend_on_a_value_of_its_section_or_of_the_base() -> None:
    """A section that is drawn decides, not the base: its optimizer is adamw."""
    space = {
        "optimizer": {"choice": [{"name": "sgd"}, {"name": "adamw"}]},
        "optimizer.lr": {"loguniform": [1e-4, 1e-1]},
        "clip_norm": {"uniform": [0.5, 2.0], "when": {"optimizer.name": "sgd", "length.steps": None}},
        "seed": {"randint": [0, 9], "when": {"schedule.name": "step"}},
    }
    drawn = [sweep(space, trials=20).sample(i) for i in range(20)]
    assert {fields["optimizer"]["name"] for fields in drawn} == {"sgd", "adamw"}
    assert all(("clip_norm" in fields) == (fields["optimizer"]["name"] == "sgd") for fields in drawn)
    assert not any("seed" in fields for fields in drawn)
    trial = sweep(space).trial(drawn[0])
    assert (trial.optimizer.name, trial.optimizer.lr) == (
        drawn[0]["optimizer"]["name"],
        drawn[0]["optimizer.lr"],
    )


LR = {"loguniform": [1e-4, 1e-1]}


@pytest.mark.parametrize(
    ("when", "line"),
    [
        ({"optimizer.nmae": "adamw"}, "when.optimizer.nmae: unknown key; did you mean 'name'?"),
        ({"optimizer.name": "AdamW"}, "when.optimizer.name: got 'AdamW', wanted 'adamw', "),
        ({"optimiser.name": "adamw"}, "when.optimiser: unknown key; did you mean 'optimizer'?"),
        ({"precision.kind": "fp32"}, "precision"),
        ({"seed": "1"}, "when.seed: got '1', wanted a whole number; remove the quotes"),
        ({"job.params.widht": 8}, "in neither the space nor spec; did you mean 'job.params.width'?"),
        ({"precision": "fp8"}, "when.precision: got 'fp8', wanted one of 'fp32', 'bf16'"),
        ({"schedule.name": "step"}, "when.schedule.name: got 'step', wanted one of 'cosine', 'linear'"),
        ({"threads": 4}, "when.threads: got 4, wanted a value of space.threads"),
        ({"clip_norm": "1"}, "when.clip_norm: got '1', wanted a value of space.clip_norm"),
        ({"ema": 1}, "it depends on ema, which must come before it"),
    ],
)
def test_a_condition_that_is_never_true_is_one_line(when: dict[str, Any], line: str) -> None:
    """Else every trial would be one of the base's values; the control is the field without its condition."""
    space = {
        "precision": {"choice": ["fp32", "bf16"]},
        "schedule": {"choice": [{"name": "cosine"}, {"name": "linear"}]},
        "threads": {"randint": [1, 4]},
        "clip_norm": {"uniform": [0.5, 2.0]},
        "job.params.width": {"choice": [8, 16]},
        "optimizer.lr": LR,
    }
    assert sweep(space).total == 8
    if "ema" in when:
        space["ema"] = {"choice": [None]}
    if "precision.kind" in when or "seed" in when:
        del space["precision"]
    with pytest.raises(SpecError) as caught:
        sweep({**space, "optimizer.lr": {**LR, "when": when}})
    assert line in str(caught.value)
    assert str(caught.value).startswith("space.optimizer.lr")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("space", "line"),
    [
        (
            {"optimizer.lr": LR, "optimizer": {"choice": [{"name": "sgd"}]}},
            "space.optimizer.lr: optimizer replaces the section that it is in; put optimizer before it",
        ),
        (
            {"optimizer": {"choice": [{"name": "sgd"}, {"name": "sgd", "lr": 0.5}]}, "optimizer.lr": LR},
            "space.optimizer.lr: a value of space.optimizer, {'name': 'sgd', 'lr': 0.5}, has it too; leave out one of the two",
        ),
    ],
)
def test_a_value_that_another_field_of_the_space_replaces_is_one_line(
    space: dict[str, Any], line: str
) -> None:
    """Else the table and the search would have a value that was not trained."""
    with pytest.raises(SpecError) as caught:
        sweep(space)
    assert str(caught.value) == line


@pytest.mark.parametrize(
    ("space", "more", "line"),
    [
        ({"optimizer.lrr": {"uniform": [0.1, 0.2]}}, {}, "did you mean 'lr'"),
        ({"precision": {"choice": []}}, {}, "space.precision.choice: got []"),
        ({"precision": {"choice": ["fp32", "fp8"]}}, {}, "precision: got 'fp8'"),
        ({"optimizer.lr": {"loguniform": [0.0, 0.1]}}, {}, "wanted bounds above 0"),
        ({"optimizer.lr": {"uniform": [0.2, 0.1]}}, {}, "lower below upper"),
        ({"optimizer.lr": {"uniform": [0.1, 0.2], "choice": [1.0]}}, {}, "wanted exactly one of"),
        ({"optimizer.lr": {"normal": [0.1, 0.2]}}, {}, "space.optimizer.lr.normal: unknown key"),
        ({"workers.min": {"choice": [1, 2]}}, {}, "where a trial runs"),
        ({"optimizer.lr": {"uniform": [0.1, 0.2]}}, {"search": "grid"}, "search=grid needs choice or grid"),
        ({"optimizer.lr": {"uniform": [0.1, 0.2]}}, {"trials": None}, "trials: missing"),
        (
            {"optimizer.lr": {"uniform": [0.1, 0.2]}},
            {"trials": 100_001},
            "trials: got 100001 trials, wanted at most 100000",
        ),
        (
            {"optimizer.lr": {"grid": [0.1] * 400}, "seed": {"grid": [*range(400)]}},
            {"trials": None},
            "space: got 160000 trials, wanted at most 100000",
        ),
        ({"optimizer.lr": {"uniform": [0.1, 0.2]}}, {"scheduler": "asha2"}, "scheduler"),
        (
            {"optimizer.lr": {"uniform": [0.1, 0.2]}},
            {"trial": 3},
            "trial: unknown key; did you mean 'trials'",
        ),
        ({}, {}, "space"),
    ],
)
def test_mistakes_are_one_line(space: dict[str, Any], more: dict[str, Any], line: str) -> None:
    with pytest.raises(SpecError) as caught:
        sweep(space, **more)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_names_its_spec_and_overrides_reach_both(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text('job: {use: "jobs.digits.job:Digits"}\nlength: {epochs: 9}\n')
    (tmp_path / "sweep.yaml").write_text(
        "spec: train.yaml\ntrials: 2\nspace: {optimizer.lr: {loguniform: [1e-4, 1e-1]}}\n"
    )
    loaded = load_sweep(tmp_path / "sweep.yaml", ["trials=5", "spec.length.steps=3"], uri="off")
    assert (loaded.total, loaded.base.length.steps, loaded.base.length.epochs) == (5, 3, None)
    assert load_sweep(loaded.document()) == loaded, "what the record keeps is the sweep"


def test_an_override_of_steps_leaves_the_epochs_of_a_job_and_the_seconds_of_a_budget() -> None:
    given = {
        "spec": {**BASE, "job": {**BASE["job"], "params": {"epochs": 3}}},
        "space": {"precision": {"grid": ["fp32", "bf16"]}},
        "budget": {"seconds": 3600},
    }
    loaded = load_sweep(given, ["spec.job.params.steps=10", "budget.steps=500"])
    assert loaded.spec["job"]["params"] == {"epochs": 3, "steps": 10}
    assert (loaded.budget.seconds, loaded.budget.steps) == (3600, 500)


def test_a_value_reaches_its_trial_as_it_is() -> None:
    """Whatever characters it has: a trial is not made of text."""
    values = ["🦊", "\u2028", "1e3", None, {"a": ["é", 1e-7, True]}]
    every = load_sweep({"spec": BASE, "space": {"job.params.kind": {"grid": values}}})
    assert [every.trial(every.sample(i)).job.params["kind"] for i in range(5)] == values


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("optimizer.name", ["adamw", "adam", "sgd"]),
        ("schedule.name", ["cosine", "constant"]),
        ("batch.global", [16, 40]),
        ("evaluate.limit", [4]),
        ("length.steps", [4]),
        ("job.params.width", [8]),
    ],
)
def test_a_trial_is_the_run_with_its_fields_as_overrides(field: str, values: list[Any]) -> None:
    """Another field's default may follow from one of the space: what nobody has written is not passed on."""
    base = {**BASE, "schedule": {"name": "cosine"}}
    every = load_sweep({"spec": base, "space": {field: {"grid": values}}})
    again = load_sweep(every.document())
    for i, value in enumerate(values):
        run = load_spec(base, [f"{field}={value}"])
        assert every.trial(every.sample(i)) == again.trial(again.sample(i)) == run


def test_a_population_evaluates_and_saves_where_it_meets() -> None:
    space = {"optimizer.lr": {"loguniform": [1e-4, 1e-1]}}
    found = sweep(space, scheduler={"name": "pbt", "every_steps": 7})
    assert (found.base.evaluate.every.steps, found.base.checkpoint.keep_every) == (7, 7)
    assert found.base.checkpoint.every is not None
    assert found.base.checkpoint.every.steps == 7
    assert load_sweep(found.document()) == found


def test_a_population_keeps_what_the_base_evaluates() -> None:
    sets = {"noisy": {"limit": 2}}
    evaluate = {"limit": 4, "sets": sets, "every": {"epochs": 2}}
    base = sweep(PBT["space"], scheduler=PBT["scheduler"], spec={**BASE, "evaluate": evaluate}).base
    assert (base.evaluate.limit, base.evaluate.of("noisy").limit, base.evaluate.every.steps) == (4, 2, 4)


PBT = {
    "scheduler": {"name": "pbt", "every_steps": 4},
    "space": {"optimizer.lr": {"loguniform": [1e-4, 1e-1]}},
}


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({**PBT, "spec": {**BASE, "evaluate": {"beside": True}}}, r"spec\.evaluate\.beside: got true with scheduler=pbt, .*; leave it out"),
        ({**PBT, "spec": {**BASE, "evaluate": {"delay": 3}}}, r"spec\.evaluate\.delay: got 3 with scheduler=pbt, .*; leave it out"),
        ({**PBT, "space": {"evaluate.delay": {"choice": [0, 4]}}}, r"space\.evaluate\.delay: got values to choose from with scheduler=pbt"),
        ({"space": {"evaluate.beside": {"choice": [True, False]}}}, r"space\.evaluate\.beside: it decides where a trial runs.*; set spec\.evaluate\.beside$"),
        ({"space": {"data.loader_processes": {"choice": [0, 1]}}}, r"space\.data\.loader_processes: it decides where a trial runs"),
    ],
)  # fmt: skip
def test_a_population_decides_at_once_and_placement_is_not_searched(
    changed: dict[str, Any], line: str
) -> None:
    given = {"spec": BASE, "space": {"seed": {"randint": [0, 9]}}, "trials": 8, **changed}
    with pytest.raises(SpecError, match=f"^{line}"):
        load_sweep(given)


NOISY = {"evaluate": {"sets": {"noisy": {"every": {"steps": 9}}}}}


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("evaluate.every", {"steps": 2}, "evaluate.every: got {'steps': 2}, wanted {'steps': 4}"),
        ("evaluate.every.steps", 5, "evaluate.every"),
        ("evaluate", {"beside": True, "every": {"steps": 4}}, "evaluate.beside: got true, wanted false"),
        ("evaluate", {"delay": 1, "every": {"steps": 4}}, "evaluate.delay: got 1, wanted 0"),
        ("evaluate.sets.noisy.every", {"steps": 9}, "evaluate.sets.noisy.every"),
        ("length.steps", 9, "length: got {'steps': 9}, wanted {'epochs': 1}"),
    ],
)  # fmt: skip
def test_members_of_a_population_meet_at_the_same_steps(field: str, value: Any, line: str) -> None:
    """Else one waits for another that never comes. A set of another metric may have a cadence of its own."""
    given = {**PBT, "spec": {**BASE, **NOISY}, "trials": 2, "metric": "eval/noisy/loss"}
    assert load_sweep(given).base.evaluate.of("noisy").every.steps == 4
    assert load_sweep({**given, "metric": "eval/other/loss"}).base.evaluate.of("noisy").every.steps == 9
    with raises(problems.POPULATION, members=f"{field}={shown(value)}") as caught:
        load_sweep({**given, "space": {field: {"choice": [value]}}})
    assert line in str(caught.value)


def test_trials_evaluate_beside_and_have_the_bits_of_those_that_do_not() -> None:
    """A delay may be searched; where the process runs is no part of a trial's identity."""
    space = {"seed": {"randint": [0, 9]}, "evaluate.delay": {"choice": [1, "next"]}}
    trials = [
        load_sweep({"spec": {**BASE, "evaluate": {"beside": beside}}, "space": space, "trials": 8}).trial(
            {"seed": 3, "evaluate.delay": 1}
        )
        for beside in (True, False)
    ]
    assert [trial.evaluate.beside for trial in trials] == [True, False]
    assert [trial.evaluate.delay for trial in trials] == [1, 1]
    assert len({identity_digest(deciding(trial)) for trial in trials}) == 1
