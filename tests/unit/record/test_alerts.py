"""Alerts fire once, after the same step in every execution of a run; a resumed run goes on counting."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lockstep import train
from lockstep.errors import SpecError
from lockstep.record import alerts
from lockstep.record.events.union import Alerted, Diagnosed, Event, Finished, Restored, Started, Violated
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.journal_file import NAME
from lockstep.record.recorder import Recorder
from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec
from tests.unit.record.failed_at_every_call import quick
from tests.unit.record.rows import evaluation_row, step_row

Specs = Callable[..., Spec]


@pytest.fixture(autouse=True)
def short() -> Iterator[None]:
    with quick():
        yield


def fired(folder: Path) -> list[tuple[str, int]]:
    """The alerts in a run's journal, each with its step."""
    journal = Journal(folder, read_only=True)
    try:
        return [(event.rule, event.step) for event in journal.events if isinstance(event, Alerted)]
    finally:
        journal.close()


def record(spec: Spec, events: list[Event], run_id: str | None = None) -> Recorder:
    recorder = Recorder(spec, run_id=run_id)
    recorder.start()
    for event in events:
        recorder.tell(event)
    return recorder


def losses(first: int, last: int, high: Callable[[int], bool]) -> list[Event]:
    return [step_row(step, loss=9.0 if high(step) else 1.0) for step in range(first, last + 1)]


RULE = {"loss": {"above": 8, "for": 4}}


@pytest.mark.parametrize("stopped_after", range(1, 15))
def test_a_rule_fires_once_after_the_same_step_however_a_run_is_interrupted(
    spec: Specs, stopped_after: int
) -> None:
    """Three high losses, a low one, then high ones: the fourth in a row is step 8, whichever process records it."""
    chosen = spec(alert=RULE)
    high = lambda step: step != 4  # noqa: E731
    first = record(chosen, [Started({}), *losses(1, stopped_after, high)])
    first.close()
    again = record(
        chosen,
        [Started({}), *losses(max(1, stopped_after - 2), 16, high), Finished({"step": 16})],
        first.run_id(),
    )
    again.close()
    assert fired(again.run_folder()) == [("loss above 8 for 4", 8)]
    assert len([*first.state.alerted, *again.state.alerted]) == 1
    told = json.loads((again.run_folder() / "run.json").read_text())["tags"]
    assert told["lockstep.alerts"] == "step 8: loss above 8 for 4"
    assert (
        "alert: loss above 8 for 4: loss is 9 for 4 steps, above 8 (step 8)"
        in (again.run_folder() / "log.txt").read_text()
    )


def test_without_its_rule_nothing_fires(spec: Specs) -> None:
    """The control; nor does one whose rows never last."""
    for alert in ({}, {"loss": {"above": 8, "for": 5}}):
        recorder = record(
            spec(alert=alert),
            [Started({}), *losses(1, 20, lambda step: step % 5 > 0), Finished({"step": 20})],
        )
        recorder.close()
        assert fired(recorder.run_folder()) == []


def test_what_a_lost_folder_had_told_is_not_told_again(spec: Specs) -> None:
    """The rows of the checkpoint have fired; those behind it count."""
    chosen = spec(alert={**RULE, "eval/loss": {"below": 0.1}})
    first = record(chosen, [Started({}), *losses(1, 6, lambda _: True)])
    first.close()
    (first.run_folder() / NAME).unlink()
    rows = [step_row(step, loss=9.0) for step in range(1, 7)]
    again = record(
        chosen,
        [Started({}), Restored(rows, []), *losses(7, 9, lambda _: True), evaluation_row(9, loss=0.05)],
        first.run_id(),
    )
    again.close()
    assert fired(again.run_folder()) == [("eval/loss below 0.1", 9)]


def test_drift_is_an_alert_where_it_is_asked_for(spec: Specs) -> None:
    for drift in (True, False):
        recorder = record(
            spec(alert={"drift": drift}), [Started({}), step_row(1), Violated("step 1: loss is another")]
        )
        recorder.close()
        assert fired(recorder.run_folder()) == [("drift", 1)] * drift


def test_a_run_that_stands_still_and_a_disk_that_fills_are_told_once(
    spec: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage(NamedTuple):
        free: float

    monkeypatch.setattr(alerts, "DISK_EVERY_S", 0.0)
    monkeypatch.setattr(alerts.shutil, "disk_usage", lambda _: Usage(4e9))
    chosen = spec(alert={"no_progress_s": 0.2, "disk_below_gb": 5})
    recorder = record(chosen, [Started({}), step_row(1)])
    until = time.monotonic() + 20
    while len(recorder.state.alerted) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    time.sleep(0.5)
    recorder.close()
    assert sorted(fired(recorder.run_folder())) == [("disk", 1), ("no progress", 1)]
    again = record(chosen, [Started({}), step_row(2)], recorder.run_id())
    time.sleep(0.5)
    again.close()
    assert len(fired(recorder.run_folder())) == 2 and again.state.alerted == ()


@pytest.mark.scenario
def test_a_run_that_moves_is_not_told_to_stand_still(spec: Specs) -> None:
    recorder = record(spec(alert={"no_progress_s": 3.0}), [Started({})])
    for step in range(1, 13):
        recorder.tell(step_row(step))
        time.sleep(0.3)
    recorder.close()
    assert fired(recorder.run_folder()) == []


def test_a_metric_that_no_step_has_is_told(spec: Specs) -> None:
    recorder = record(
        spec(alert={"los": {"above": 8}, "entropy": {"above": 1e9}}), [Started({}), step_row(1), step_row(2)]
    )
    recorder.close()
    journal = Journal(recorder.run_folder(), read_only=True)
    (told,) = [event for event in journal.events if isinstance(event, Diagnosed)]
    journal.close()
    assert told.rule == alerts.UNKNOWN and "alert.los: a step has no train/los" in told.evidence
    assert "train/entropy" in told.remedy and fired(recorder.run_folder()) == []


@pytest.mark.parametrize(
    ("alert", "message"),
    [
        ({"no_progres_s": 5}, "alert.no_progres_s: unknown key; did you mean 'no_progress_s'"),
        ({"loss": {"above": 8, "below": 1}}, "wanted exactly one of above and below"),
        ({"loss": {}}, "wanted exactly one of above and below"),
        ({"loss": {"above": "8"}}, "alert.loss.above: got '8'"),
        ({"loss": {"above": 8, "for": 0}}, "alert.loss.for: got 0"),
        ({"perf/step_s": {"above": 8}}, "wanted a metric of a step or of an evaluation"),
        ({"disk_below_gb": -1}, "alert.disk_below_gb: got -1"),
    ],
)
def test_a_wrong_rule_is_one_line(spec: Specs, alert: Any, message: str) -> None:
    with pytest.raises(SpecError) as refused:
        spec(alert=alert)
    assert message in str(refused.value) and "\n" not in str(refused.value)
    assert refused.value.exit_code == 2


def test_rules_are_read_back_as_they_were_and_decide_no_bits(spec: Specs) -> None:
    from lockstep.job.identity import deciding

    chosen = spec(alert={**RULE, "waiting_s": 5})
    assert load_spec(chosen.document()) == chosen
    assert deciding(chosen) == deciding(spec())


def test_a_run_tells_its_driver(tmp_path: Path) -> None:
    """The whole way: a rule of the spec, a row, the journal, the driver, the command."""
    document = {
        "job": {"use": "tests.unit.proof.verified_jobs:Small"},
        "length": {"steps": 6},
        "batch": {"global": 8, "micro": 4},
        "checkpoint": {"storage": str(tmp_path / "runs")},
        "record": {"uri": "off"},
        "rehearsal": "off",
        "alert": {"loss": {"above": 0, "for": 3}},
    }
    result = train(document, local=True, notify=f"cat >> '{tmp_path}/told'; echo >> '{tmp_path}/told'")
    told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert [(one["event"], one["alert"], one["step"]) for one in told if one["event"] == "alert"] == [
        ("alert", "loss above 0 for 3", 3)
    ]
    assert {one["event"] for one in told} == {"start", "alert", "end"}
    assert fired(Path(result.folder)) == [("loss above 0 for 3", 3)]
