"""What is wrong with a sweep, its trials and its recorders is told as the problem that it is."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from lockstep.spec.sweep import load_sweep
from lockstep.sweeps import problems, recorders, trial_run
from lockstep.sweeps.recorders import RecordersActor, TrialRecorder
from lockstep.sweeps.search import optuna_search
from lockstep.sweeps.trial_run import TrialRun
from tests.raised import raises


def test_a_search_without_its_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    document = {
        "spec": {"job": {"use": "jobs.digits.job:Digits"}, "record": {"uri": "off"}},
        "space": {"optimizer.lr": {"choice": [0.1, 0.2]}},
        "trials": 2,
    }
    monkeypatch.setitem(sys.modules, "optuna", None)
    with raises(problems.NO_OPTUNA):
        optuna_search(load_sweep(document))


def test_a_checkpoint_of_a_trial_that_nobody_saves_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_run, "SAVE_S", 0.1)
    run = TrialRun(None, "0", {}, lambda row: None)
    with raises(problems.UNSAVED, step=7, got="no result of the save after 0 s"):
        run.wait_for_checkpoint(7)
    run._save_errors[8] = "no room"
    with raises(problems.UNSAVED, step=8, got="no room"):
        run.wait_for_checkpoint(8)
    run._save_errors[9] = None
    run.wait_for_checkpoint(9)


def test_a_trial_that_ended_before_its_run_existed_is_told() -> None:
    recorder: Any = TrialRecorder.__new__(TrialRecorder)
    recorder._recorder = recorder._closed_as = None
    with raises(problems.NO_RUN):
        recorder.run_id()


def test_recorders_that_do_not_write_what_is_left_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control are recorders that have."""
    monkeypatch.setattr(recorders, "CLOSING_S", 0.1)
    actor = RecordersActor(str(tmp_path), [])
    assert actor.close("over") == []
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    actor._closing.append(thread)
    (unwritten,) = actor.close("over")
    over.set()
    assert unwritten.code == problems.UNWRITTEN.code
