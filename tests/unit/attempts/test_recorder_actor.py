"""The recorder on Ray, as an object in this process."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lockstep.attempts import recorder_actor
from lockstep.attempts.recorder_actor import RecorderActor
from lockstep.spec.loading import load_spec

ROOT = Path(__file__).parents[3]


def test_a_store_is_opened_when_its_imports_are_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that import each other break where two threads import them at once."""
    order = []

    def slow(_uri: str | None) -> None:
        time.sleep(0.5)
        order.append("imported")

    monkeypatch.setattr(recorder_actor, "warm_up", slow)
    spec = load_spec(
        ROOT / "jobs" / "digits" / "train.yaml", ["record.uri=off", f"checkpoint.storage={tmp_path}/runs"]
    )
    actor = RecorderActor(spec, None, None, str(tmp_path), [])
    actor._start()
    actor._recorder.run_id()
    order.append("opened")
    actor._recorder.close()
    assert order == ["imported", "opened"]
