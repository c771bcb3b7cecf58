"""A sweep that is taken up again is the same sweep: what would change the bits of its trials is refused, what places them is not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.driver.options import RunOptions
from lockstep.record import problems as record_problems
from lockstep.record.mirror.run_store import SWEEP_FILE
from lockstep.redaction_marks import HIDDEN
from lockstep.spec.sweep import SweepSpec, load_sweep
from lockstep.sweeps import driver, problems
from lockstep.sweeps.sweep_record import SweepRecord
from lockstep.sweeps.sweep_resume import resume_sweep
from lockstep.sweeps.trial import run_name, spec_of
from tests.in_process import here
from tests.raised import raises

FIELDS = {"optimizer.lr": 0.1}


@pytest.fixture
def began(monkeypatch: pytest.MonkeyPatch) -> list[SweepSpec]:
    """The sweeps that were taken up."""
    found: list[SweepSpec] = []
    monkeypatch.setattr(driver, "run_sweep", lambda options, spec, sweep_id, hold: found.append(spec))
    return found


def recorded(storage: Path, **job: Any) -> list[str]:
    """Record a sweep; the overrides that say where it lies."""
    document = {
        "spec": {"job": {"use": "jobs.digits.job:Digits", **job}, "record": {"uri": "off"}},
        "space": {"optimizer.lr": {"choice": [0.1, 0.2]}},
        "trials": 2,
    }
    (storage / "sweep-a").mkdir()
    (storage / "sweep-a" / SWEEP_FILE).write_text(yaml.safe_dump(document))
    return [f"checkpoint.storage={storage}"]


def resume(words: list[str], **how: Any) -> None:
    resume_sweep(RunOptions(), "sweep-a", words, uri="off", **how)


@pytest.mark.parametrize(
    ("override", "field", "was", "now"),
    [
        ("optimizer.weight_decay=0.5", "optimizer.weight_decay", "0.01", "0.5"),
        ("seed=7", "seed", "0", "7"),
        ("job.params.width=8", "job.params.width", "32", "8"),
    ],
)
def test_a_resumed_sweep_refuses_what_would_change_the_bits_of_its_trials(
    tmp_path: Path, began: list[SweepSpec], override: str, field: str, was: str, now: str
) -> None:
    """Else trials that had ended would be trained again with it, beside decisions that others led to."""
    words = recorded(tmp_path)
    with raises(problems.FIELD_CHANGED, field=field, sweep="sweep-a", wanted=was, got=now):
        resume([*words, override])
    assert began == []
    resume([*words, "data.loader_processes=2", "faults.max_worker_failures=9"])
    assert [one.base.data.loader_processes for one in began] == [2]


@pytest.mark.parametrize(
    ("edit", "field", "was", "now"),
    [
        ({"seed": 7}, "seed", "0", "7"),
        ({"trials": 3}, "trials", "2", "3"),
        ({"trials": None}, "trials", "2", "none"),
        (
            {"space": {"optimizer.lr": {"grid": [0.1, 0.3]}}},
            "space.optimizer.lr.grid",
            "[0.1, 0.2]",
            "[0.1, 0.3]",
        ),
    ],
)
def test_a_sweep_file_that_was_edited_since_the_sweep_began_is_refused(
    tmp_path: Path, began: list[SweepSpec], edit: dict[str, Any], field: str, was: str, now: str
) -> None:
    """Else further trials would be drawn from another seed or space than the first. Where and how many train at once is free."""
    document = {
        "spec": {
            "job": {"use": "jobs.digits.job:Digits"},
            "record": {"uri": "off"},
            "checkpoint": {"storage": str(tmp_path)},
        },
        "space": {"optimizer.lr": {"grid": [0.1, 0.2]}},
        "trials": 2,
    }
    sweep_id = SweepRecord(load_sweep(document), None).run_id
    file = tmp_path / sweep_id / SWEEP_FILE
    recorded = yaml.safe_load(file.read_text())
    words = [f"checkpoint.storage={tmp_path}"]
    file.write_text(yaml.safe_dump({name: v for name, v in {**recorded, **edit}.items() if v is not None}))
    with raises(problems.FILE_CHANGED, field=field, sweep=sweep_id, wanted=was, got=now):
        resume_sweep(RunOptions(), sweep_id, words, uri="off")
    assert began == []
    file.write_text(yaml.safe_dump({**recorded, "concurrency": 1, "budget": {"steps": 9}}))
    resume_sweep(RunOptions(), sweep_id, words, uri="off")
    assert len(began) == 1


def test_a_secret_that_a_sweep_does_not_record_is_asked_for(tmp_path: Path, began: list[SweepSpec]) -> None:
    """Else its trials would be trained with the mark that stands in its place."""
    words = recorded(tmp_path, params={"source": f"https://{HIDDEN}@example.org/digits"})
    with raises(problems.SECRET_FIELD, field="job.params.source", sweep="sweep-a"):
        resume(words)
    assert began == []


@pytest.mark.parametrize("how", [{"fork": True}, {"step": 100}])
def test_a_sweep_is_neither_forked_nor_resumed_from_a_step(
    tmp_path: Path, began: list[SweepSpec], how: dict[str, Any]
) -> None:
    words = recorded(tmp_path)
    with raises(problems.FORK_OR_STEP, sweep="sweep-a"):
        resume(words, **how)
    with raises(problems.LOCAL_OR_CHAOS):
        resume_sweep(RunOptions(local=True), "sweep-a", words, uri="off")
    assert began == []


def test_a_trial_that_is_placed_otherwise_is_the_same_run() -> None:
    """By its name a resumed sweep finds it; the control is a trial of other bits."""

    def name(*overrides: str) -> str:
        document = {
            "spec": {"job": {"use": "jobs.digits.job:Digits"}, "record": {"uri": "off"}},
            "space": {"optimizer.lr": {"choice": [0.1, 0.2]}},
            "trials": 2,
        }
        sweep = load_sweep(document, [f"spec.{one}" for one in overrides])
        return run_name("sweep-a", 0, spec_of(sweep, 0, {"fields": FIELDS}))

    assert name() == name("data.loader_processes=2") == name("sharding=optimizer")
    assert name() == name("determinism={mode: strict, recheck: 0.5}", "workers.min=2")
    assert name() != name("seed=1")


@pytest.mark.parametrize("content", ["spec: [", "", "[]", "spec: 3"])
def test_a_sweep_file_that_is_none_is_one_line(tmp_path: Path, began: list[SweepSpec], content: str) -> None:
    words = recorded(tmp_path)
    (tmp_path / "sweep-a" / SWEEP_FILE).write_text(content)
    no_sweep = re.compile("^is no sweep: ")
    with raises(record_problems.SWEEP_FILE, run="sweep-a", file=SWEEP_FILE, got=no_sweep) as raised:
        resume(words)
    assert "\n" not in str(raised.value) and began == []


@pytest.mark.parametrize("known", [True, False])
def test_an_error_of_the_sweep_itself_is_told_and_not_that_there_is_no_run_of_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], known: bool
) -> None:
    """The command looks for a run of the id first. What a sweep meets later says nothing of whether there is one."""

    def full(*_: Any) -> None:
        raise record_problems.UNREADABLE(run="sweep-a", file="journal", got="No space left on device")

    monkeypatch.setattr(driver, "run_sweep", full)
    words = recorded(tmp_path) if known else [f"checkpoint.storage={tmp_path}"]
    code, _, err = here(monkeypatch, capfd, tmp_path, "resume", "sweep-a", *words, "--uri", "off")
    assert ("No space left on device" in err) == known, err
    assert ("sweep-a" in err, bool(code)) == (True, True)
