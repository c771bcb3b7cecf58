"""`lockstep status`: how far a run is, from its record alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.record.mirror.run_store import RunInfo
from lockstep.views import status
from lockstep.views.status import RunStatus, as_text, duration, status_of
from tests.in_process import here
from tests.unit.record.rows import step_row
from tests.unit.views.recorded import RUN, record

BEGAN = 1_000.0


def known(**more: Any) -> RunInfo:
    fields = {
        "run_id": RUN, "name": "n", "experiment": "", "status": "RUNNING", "started": BEGAN, "ended": None, "step": 0,
        "metrics": {}, "params": {"plan.total_steps": "100"}, "tags": {"lockstep.workers": "2"}, "url": "",
    }  # fmt: skip
    return RunInfo(**{**fields, **more})


def test_a_run_that_trains_has_a_pace_of_its_newest_attempt(tmp_path: Path) -> None:
    """Two attempts with an hour between them; a step of 0.5 s each second."""
    rows = [step_row(n, wall_clock=BEGAN + n, step_s=0.5, attempt=1) for n in range(1, 11)]
    rows += [step_row(n, wall_clock=BEGAN + 3600 + n, step_s=0.5, attempt=2) for n in range(11, 21)]
    folder = record(tmp_path, rows, checkpoint={"storage": str(tmp_path)})
    found = status_of(known(), "off", folder, BEGAN + 4000)
    assert found == RunStatus(RUN, "RUNNING", 20, 100, 80.0, 10 / 4000, None, 2)
    ended = status_of(known(status="KILLED", ended=BEGAN + 100.0), "off", folder, BEGAN + 4000)
    assert (ended.eta_s, ended.effective) == (None, 0.1)
    assert as_text(ended, "lockstep resume X").splitlines()[-1] == "resume it with    lockstep resume X"
    assert "resume it with" not in as_text(found, "lockstep resume X")
    assert "time left         1:20" in as_text(found, "")


def test_a_run_without_a_step_is_known_by_its_facts(tmp_path: Path) -> None:
    found = status_of(known(tags={}, params={}), "off", tmp_path / RUN, BEGAN)
    assert found == RunStatus(RUN, "RUNNING", 0, None, None, None, None, None)
    assert as_text(found, "").splitlines()[1:3] == ["state             RUNNING", "step              0"]


def test_the_newest_checkpoint_is_that_of_its_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    def steps_of(storage: str, run_id: str) -> list[int]:
        asked.append((storage, run_id))
        return [8, 4]

    monkeypatch.setattr(status, "steps_of", steps_of)
    folder = record(tmp_path, [step_row(9)], checkpoint={"storage": "elsewhere"})
    assert status_of(known(), "off", folder, BEGAN).last_checkpoint == 8
    assert [(Path(storage).name, run_id) for storage, run_id in asked] == [("elsewhere", RUN)]


def test_a_duration_is_short() -> None:
    assert [duration(seconds) for seconds in (0, 61.4, 3723)] == ["0:00", "1:01", "1:02:03"]


def test_the_command_answers_with_one_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = record(tmp_path / "runs", [step_row(3)], checkpoint={"storage": str(tmp_path / "runs")})
    told = {
        "run_id": RUN, "name": "n", "status": "FINISHED", "started": BEGAN, "ended": BEGAN + 9, "params": {"plan.total_steps": "3"},
        "tags": {},
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(told))
    code, out, err = here(monkeypatch, capfd, tmp_path, "status", RUN, "--uri", "off", "--json")
    assert code == 0, err
    answer = json.loads(out)
    assert list(answer) == [
        "run_id", "state", "step", "steps", "eta_s", "effective", "last_checkpoint", "workers"
    ]  # fmt: skip
    assert (answer["state"], answer["step"], answer["steps"]) == ("FINISHED", 3, 3)
    code, _, err = here(monkeypatch, capfd, tmp_path, "status", "f" * 32, "--uri", "off")
    assert code == 1
    assert "`lockstep runs` lists those that it has" in err
