"""What a run looks at while it trains is in its record once: journal, table, figure and points."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.record.events.codec import from_line, to_line
from lockstep.record.events.metrics import points_of
from lockstep.record.events.union import Finished, Restored
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.rows import Observation
from lockstep.record.ledger.tables import read_observations
from lockstep.record.mirror.folder import FolderStore
from lockstep.record.recorder import Recorder
from lockstep.spec.fields import Spec
from tests.unit.record.rows import corrupted, step_row


def observation(step: int, factor: float = 1.0) -> Observation:
    values = {
        f"layers/{group}/{quantity}": factor * (i + 1) / (step + 2)
        for i, (group, quantity) in enumerate(
            (group, quantity)
            for group in ("conv", "head.out")
            for quantity in ("gradient_norm", "update_ratio")
        )
    }
    return Observation(step, values, 1_700_000_000.25 + step)


def test_an_observation_comes_back_bit_for_bit(tmp_path: Path) -> None:
    told = Observation(
        7, {"layers/a/gradient_norm": math.nan, "layers/a/update_ratio": -0.0, "b": math.inf}, 1.5
    )
    again = from_line(to_line(told, tmp_path).rstrip(b"\n"), tmp_path)
    assert repr(again) == repr(told)


def test_each_value_is_a_point_under_its_own_name() -> None:
    points = list(points_of(observation(3), None, scaled=False, started_at=0.0))
    assert {point.key for point in points} == set(observation(3).values)
    assert {(point.step, point.timestamp_ms) for point in points} == {(3, 1_700_000_003_250)}


def test_observations_become_a_table_and_a_figure_and_are_added_once(spec: Callable[..., Spec]) -> None:
    """A step that is taken again is observed again: what is recorded stays."""
    recorder = Recorder(spec(), lambda settings: FolderStore(settings.folder, ""))
    recorder.start()
    recorder.tell(step_row(1), observation(1), step_row(2), observation(2), observation(2, factor=9.0))
    recorder.tell(observation(1, factor=9.0), step_row(3), observation(3), Finished({"step": 3}))
    recorder.close()
    folder = recorder.run_folder()
    assert read_observations(folder / "observations.parquet") == [observation(step) for step in (1, 2, 3)]
    assert (folder / "figures" / "layers.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("restored", [True, False])
def test_an_observation_that_the_journal_lost_is_taken_from_the_checkpoint(
    spec: Callable[..., Spec], restored: bool
) -> None:
    """The record is killed with the run before it has written; without the checkpoint's, the control, there is a hole."""
    recorder = Recorder(spec(), lambda settings: FolderStore(settings.folder, ""))
    recorder.start()
    recorder.tell(step_row(1), observation(1), step_row(2))
    folder = recorder.run_folder()
    recorder.close()
    journal = folder / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(line for line in lines if not line.startswith(b'{"observation":')))
    assert len(journal.read_bytes().splitlines()) == len(lines) - 1
    again = Recorder(spec(), lambda settings: FolderStore(settings.folder, ""), run_id=folder.name)
    again.start()
    kept = (observation(1), observation(2)) if restored else ()
    again.tell(Restored([step_row(1), step_row(2)], (), observations=kept))
    again.tell(step_row(3), observation(3), Finished({"step": 3}))
    again.close()
    found = read_observations(folder / "observations.parquet")
    assert found == [observation(step) for step in ((1, 2, 3) if restored else (3,))]


def test_an_observation_of_wrong_bits_gives_way(spec: Callable[..., Spec], tmp_path: Path) -> None:
    recorder = Recorder(spec(), lambda settings: FolderStore(settings.folder, ""))
    recorder.start()
    recorder.tell(step_row(1), observation(1), step_row(2), observation(2, factor=9.0), corrupted(2, since=1))
    recorder.tell(observation(1, factor=9.0), observation(2))
    recorder.close()
    journal = Journal(recorder.run_folder(), read_only=True)
    assert journal.observations() == [observation(1), observation(2)]
    journal.close()
