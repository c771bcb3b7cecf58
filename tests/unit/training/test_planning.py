"""What a schedule of the job's own is told of a run's length."""

from __future__ import annotations

from lockstep.job.interface import Updates
from lockstep.plan import BatchSize, Plan
from lockstep.training.planning import updates_of


def test_an_epoch_of_batches_that_change_has_no_one_number_of_updates() -> None:
    same = Plan.of(64, 8, 4, drop_last=True, epochs=2)
    assert updates_of(same) == Updates(16, 8, 2)
    changing = Plan.of(64, [BatchSize(8, until_steps=4), BatchSize(16)], 4, drop_last=True, epochs=2)
    assert updates_of(changing) == Updates(changing.total_steps, None, 2)
