"""A sweep is held by one command: a second one is told before it touches the cluster or the sweep."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lockstep.driver.options import RunOptions
from lockstep.errors import SpecError
from lockstep.record.mirror.run_store import SWEEP_FILE
from lockstep.spec.sweep import load_sweep
from lockstep.sweeps import driver
from lockstep.sweeps.sweep_resume import leased_sweep, resume_sweep


def test_a_second_resume_of_a_sweep_learns_who_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"checkpoint.storage={tmp_path}"]
    document = {
        "spec": {"job": {"use": "jobs.digits.job:Digits"}, "record": {"uri": "off"}},
        "space": {"optimizer.lr": {"choice": [0.1, 0.2]}},
        "trials": 2,
    }
    (tmp_path / "sweep-a").mkdir()
    (tmp_path / "sweep-a" / SWEEP_FILE).write_text(yaml.safe_dump(document))
    began: list[str] = []
    monkeypatch.setattr(driver, "run_sweep", lambda options, spec, sweep_id, lease: began.append(sweep_id))
    spec = load_sweep(document, [f"spec.{word}" for word in words])
    with (
        leased_sweep(spec, "sweep-a"),
        pytest.raises(SpecError, match=r"sweep sweep-a is held by process \d+ on host .* --takeover"),
    ):
        resume_sweep(RunOptions(), "sweep-a", words, uri="off")
    assert began == []
    resume_sweep(RunOptions(), "sweep-a", words, uri="off")
    assert began == ["sweep-a"]
