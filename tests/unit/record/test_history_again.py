"""A step that is taken again has one row, and whoever takes over tells all rows that it holds."""

from __future__ import annotations

import pickle

import pytest

from lockstep.record.events.union import Restored
from lockstep.record.ledger import segments
from lockstep.record.ledger.history import MOST_OBSERVATIONS, History
from lockstep.record.ledger.rows import EvaluationRow
from tests.unit.record.rows import step_row
from tests.unit.record.test_observations import observation


def history(steps: int) -> History:
    found = History()
    for step in range(1, steps + 1):
        found.add(step_row(step))
    return found


def test_a_step_that_is_taken_again_has_one_row() -> None:
    found = history(3)
    found.add(step_row(3))
    assert [row.step for row in found.steps] == [1, 2, 3]


def test_what_is_taken_back_is_made_again() -> None:
    found = history(3)
    for step in (2, 3):
        found.add_evaluation(EvaluationRow(step, 0, {}, 0.0, 0.0))
    found.take_back(2, 2)
    assert [row.step for row in found.steps] == [1, 2]
    assert [row.step for row in found.evaluations] == [2]
    found.add(step_row(3))
    found.add_evaluation(EvaluationRow(3, 0, {}, 0.0, 0.0))
    assert [row.step for row in found.steps] == [1, 2, 3]
    assert [row.step for row in found.evaluations] == [2, 3]


def test_every_row_that_is_held_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a full segment too, sealed or not; segments that are written are named."""
    monkeypatch.setattr(segments, "SEGMENT_STEPS", 2)
    found = history(7)
    assert [row.step for row in found.retold().steps] == [1, 2, 3, 4, 5, 6, 7]
    written = found.saving().segments(lambda segment, content: None)
    assert len(written) == 3
    assert found.retold() == Restored((step_row(7),), (), tuple(written))
    assert found.newest() == Restored((step_row(7),), ())


def test_rows_of_a_checkpoint_count_as_held() -> None:
    whole = history(3)
    blocks = {name: block() for name, block in whole.saving().blocks().items()}
    found = History.restored(blocks)
    found.add(step_row(3))
    found.add(step_row(4))
    assert [row.step for row in found.steps] == [1, 2, 3, 4]


def test_the_newest_observations_are_saved_and_told_again() -> None:
    """So many as the record may lack when it is killed with all that trains; a step that is taken back is observed again."""
    whole = history(MOST_OBSERVATIONS + 2)
    for row in whole.steps:
        whole.add_observation(observation(row.step))
    whole.add_observation(observation(3, factor=9.0))
    newest = tuple(observation(step) for step in range(3, MOST_OBSERVATIONS + 3))
    assert whole.retold().observations == newest
    assert whole.newest().observations == newest[-1:]
    blocks = {name: block() for name, block in whole.saving().blocks().items()}
    found = History.restored(blocks)
    assert found.past().observations == newest
    assert History.of(pickle.loads(pickle.dumps(found.handed()))).retold().observations == newest
    found.take_back(MOST_OBSERVATIONS + 1, 0)
    assert found.retold().observations == newest[:-1]
    del blocks["observations"]  # a checkpoint of a run without any
    assert History.restored(blocks).past().observations == ()


def test_the_newest_step_is_known_whatever_holds_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks other than 0 do not read the files of written segments."""
    monkeypatch.setattr(segments, "SEGMENT_STEPS", 2)
    whole = history(4)
    saving = whole.saving()
    written = saving.segments(lambda segment, content: None)
    blocks = {name: block() for name, block in saving.blocks().items()}
    assert History.restored(blocks, written).reached == whole.reached == 4
    assert History(reached=7).reached == 7  # a fork, which did not take those steps


@pytest.mark.parametrize("writes", [False, True])
def test_rows_that_are_handed_to_another_process_go_on_there(
    writes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held, full or in written segments: told and saved alike from then on, and what one adds the other has not."""
    monkeypatch.setattr(segments, "SEGMENT_STEPS", 2)
    found = history(7)
    found.add_evaluation(EvaluationRow(7, 0, {}, 0.0, 0.0))
    if writes:
        found.saving().segments(lambda segment, content: None)
    handed = pickle.dumps(found.handed())
    found.add(step_row(8))
    taken = History.of(pickle.loads(handed))
    assert taken.reached == 7
    taken.add(step_row(8))
    taken.add_evaluation(EvaluationRow(7, 0, {}, 0.0, 0.0))
    assert taken.retold() == found.retold()
    assert taken.saving().segments(lambda segment, content: None) == found.saving().segments(
        lambda segment, content: None
    )
