"""The recorder on Ray, as an object in this process."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.attempts import recorder_actor
from lockstep.attempts.mailbox import Fetched
from lockstep.attempts.recorder_actor import RecorderActor
from lockstep.record.events.union import Event, Started
from lockstep.spec.loading import load_spec
from tests.unit.record.rows import step_row

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


def test_the_mailbox_is_looked_into_often_from_the_last_step_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows takes about as long as to draw the run's figures. The control: the step before."""
    monkeypatch.setattr(recorder_actor, "answer_of", lambda answer, *_: answer)
    monkeypatch.setattr(recorder_actor, "warm_up", lambda _: None)
    told: list[list[Event]] = [[Started({"plan": {"total_steps": 3}})], [step_row(2)], [step_row(3)]]
    fetched = (Fetched(events, last, closed=False) for last, events in enumerate(told, 1))
    mailbox = SimpleNamespace(fetch=SimpleNamespace(remote=lambda *_: next(fetched)))
    spec = load_spec(
        ROOT / "jobs" / "digits" / "train.yaml", ["record.uri=off", f"checkpoint.storage={tmp_path}/runs"]
    )
    actor = RecorderActor(spec, None, mailbox, str(tmp_path), [])
    often = []
    for _ in told:
        actor._fetch()
        often.append(actor._ends)
    actor._recorder.close()
    assert often == [False, False, True]


def test_a_recorder_that_is_called_looks_at_once_and_else_after_its_pause(tmp_path: Path) -> None:
    spec = load_spec(
        ROOT / "jobs" / "digits" / "train.yaml", ["record.uri=off", f"checkpoint.storage={tmp_path}/runs"]
    )
    actor = RecorderActor(spec, None, None, str(tmp_path), [])
    actor._ends = True  # a pause of LOOK_S
    paused = []
    for call in (actor.look, lambda: None):
        call()
        began = time.monotonic()
        actor._pause()
        paused.append(time.monotonic() - began >= recorder_actor.LOOK_S)
    assert paused == [False, True]
