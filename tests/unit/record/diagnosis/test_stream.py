"""What rows show to be wrong is in the record behind them, once in a run, however often it is taken up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import RecordError
from lockstep.record.diagnosis.rules import GRAPH_KEPT
from lockstep.record.events.union import Diagnosed, Event, Finished, Restored
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.tables import read_parquet
from lockstep.record.mirror.folder import FolderStore
from lockstep.record.recorder import Recorder
from lockstep.spec.fields import Spec
from tests.unit.record.diagnosis.test_rules import FAULTS, steps

Specs = Callable[..., Spec]
FAULT = "loss does not move"


def recorded(spec: Spec, events: list[Event], run_id: str | None = None) -> Recorder:
    recorder = Recorder(spec, lambda settings: FolderStore(settings.folder, ""), run_id)
    recorder.start()
    recorder.tell(*events)
    recorder.close()
    return recorder


def kept(folder: Path) -> list[Diagnosed]:
    journal = Journal(folder, read_only=True)
    found = [event for event in journal.events if isinstance(event, Diagnosed)]
    journal.close()
    return found


def test_a_fault_is_in_journal_log_tags_and_a_document_and_is_told(spec: Specs) -> None:
    recorder = recorded(spec(), [*FAULTS[FAULT], Finished({"step": 600})])
    folder = recorder.run_folder()
    (found,) = kept(folder)
    assert found.rule == FAULT
    assert recorder.state.diagnosed == (str(found),)
    assert json.loads((folder / "diagnosis.json").read_text())[0]["evidence"] == found.evidence
    assert json.loads((folder / "run.json").read_text())["tags"]["lockstep.diagnosed"] == FAULT
    assert str(found) in (folder / "log.txt").read_text()


def test_a_sound_run_has_none(spec: Specs) -> None:
    recorder = recorded(spec(), [*steps(400), Finished({"step": 400})])
    assert recorder.state.diagnosed == ()
    assert not (recorder.run_folder() / "diagnosis.json").exists()


@pytest.mark.parametrize("at", [120, *(pytest.param(each, marks=pytest.mark.exact) for each in (320, 599))])
def test_a_run_that_is_taken_up_tells_it_once(spec: Specs, at: int) -> None:
    """Steps that are taken again among them, and a worker that names its own fault in each attempt."""
    own = Diagnosed(GRAPH_KEPT, 50, "rank 0 held more", "let go")
    rows = FAULTS[FAULT]
    first = recorded(spec(), [own, *(row for row in rows if row.step <= at)])
    again = recorded(spec(), [own, *(row for row in rows if row.step > at - 30)], first.run_id())
    assert [found.rule for found in kept(first.run_folder())] == [GRAPH_KEPT, FAULT]
    assert len(first.state.diagnosed) + len(again.state.diagnosed) == 2
    assert {*first.state.diagnosed, *again.state.diagnosed} == set(map(str, kept(first.run_folder())))


def test_where_the_folder_is_gone_restored_rows_say_what_was_told(spec: Specs) -> None:
    rows = steps(600, loss=lambda step: 2.3)
    late = steps(650, loss=lambda step: 2.3)[600:]
    assert recorded(spec(), [Restored(rows, ()), *late]).state.diagnosed == ()
    early = steps(250, loss=lambda step: 2.3)
    assert len(recorded(spec(), [Restored(early, ()), *rows[250:]]).state.diagnosed) == 1


def test_rows_that_cannot_be_judged_are_recorded_and_taken_up(spec: Specs) -> None:
    """The mean or the spread of losses that diverge overflows long before a loss is not finite."""
    rows = steps(400, loss=lambda step: (1e200 if step % 2 else 1.7e308) if step > 60 else 2.3)
    first = recorded(spec(), [*rows[:300]])
    again = recorded(spec(), [*rows[280:], Finished({"step": 400})], first.run_id())
    assert read_parquet(again.run_folder() / "ledger.parquet") == rows
    assert json.loads((again.run_folder() / "run.json").read_text())["status"] == "FINISHED"


@pytest.mark.scenario
def test_a_disk_that_refuses_for_a_while_costs_no_diagnosis(
    spec: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = 3
    add = Journal.add

    def refuses(self: Journal, events: list[Event]) -> None:
        nonlocal refused
        if refused and len(events) > 100:
            refused -= 1
            raise RecordError("record.folder: no space left")
        add(self, events)  # type: ignore[arg-type]

    monkeypatch.setattr(Journal, "add", refuses)
    recorder = recorded(spec(), [*FAULTS[FAULT], Finished({"step": 600})])
    assert refused == 0
    assert [found.rule for found in kept(recorder.run_folder())] == [FAULT]


def test_a_disk_that_cannot_be_read_costs_what_was_judged_and_nothing_else(
    spec: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was told stays told."""
    rows = FAULTS[FAULT]
    first = recorded(spec(), rows[:400])

    read, failures = Journal.observations, [OSError(5, "Input/output error")]

    def unreadable(self: Journal) -> Any:
        if failures:
            raise failures.pop()
        return read(self)

    monkeypatch.setattr(Journal, "observations", unreadable)
    again = recorded(spec(), rows[400:], first.run_id())
    assert failures == []
    assert again.state.diagnosed == ()
    assert [found.rule for found in kept(first.run_folder())] == [FAULT]
