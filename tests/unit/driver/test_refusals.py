"""What a driver finds wrong with a run is told as the problem that it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import interruption
from lockstep.driver import guardian, problems
from lockstep.driver.finished_run import refuse_doubtful
from lockstep.driver.result import check_saved
from lockstep.errors import Problem
from lockstep.record.mirror.run_store import StoredRun
from tests.raised import raises


def test_a_run_whose_last_state_no_checkpoint_has_is_told() -> None:
    """One that was stopped says so among its warnings: the control."""
    check_saved({"unsaved": "no room", "stopped": True}, "f00", "/runs/f00")
    with raises(problems.UNSAVED, got="no room", folder="/runs/f00", run="f00"):
        check_saved({"unsaved": "no room"}, "f00", "/runs/f00")


def test_a_record_that_does_not_bear_out_its_end_is_told(tmp_path: Path) -> None:
    with raises(problems.DOUBTFUL, run="f" * 32):
        refuse_doubtful(StoredRun("f" * 32, "FINISHED", {}, {}, ""), "off", tmp_path)


@pytest.mark.parametrize(
    ("begun", "problem"), [(True, problems.NO_PROGRESS), (False, problems.NO_FIRST_STEP)]
)
def test_a_process_that_hangs_is_told(begun: bool, problem: Problem[Any]) -> None:
    with raises(problem, seconds=60):
        raise guardian._hung(begun, 60.0)


def test_an_error_that_ends_a_command_from_another_thread_has_its_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The object that `--json` prints is that of any other failure."""
    told: list[Any] = []
    monkeypatch.setattr(interruption, "_end", lambda *facts, **named: told.append((*facts, named)))
    error = problems.NO_FIRST_STEP(seconds=60)
    interruption.fail(error)
    assert told == [("FAILED", str(error), 1, {"code": "run.no_first_step"})]
