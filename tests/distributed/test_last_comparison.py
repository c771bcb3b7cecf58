"""What ranks hold at the end of a run is compared once more: after the last save nothing else would notice a bit that flips."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.training import loop
from lockstep.training.integrity import problems
from tests.distributed.flipped_jobs import flip
from tests.distributed.pool import Pool
from tests.distributed.training import Document, Trained, train, train_attempt
from tests.raised import raises


def document(folder: Path, **more: object) -> Document:
    return {
        "job": {"use": "tests.distributed.small_jobs:Plain", "params": {"samples": 16}},
        "batch": {"global": 8, "micro": 2},
        "length": {"steps": 2},
        "checkpoint": {"storage": str(folder), "every": {"steps": 1}},
        "rehearsal": "off",
        **more,
    }


def flipped_at_the_end(given: Document, rank: int | None, what: str) -> Trained:
    """A run of which one bit flips on one rank between its last save and its summary."""
    summarise = loop.summarise

    def flipped(run: loop.Run, *args: object, **more: object) -> object:
        if run.group.rank == rank:
            average = run.state.average
            weights = run.state.model.state_dict() if what == "weights" else average and average.weights
            flip(next(iter(weights.values())))  # type: ignore[union-attr]
        return summarise(run, *args, **more)  # type: ignore[arg-type]

    loop.summarise = flipped  # type: ignore[assignment]
    try:
        return train_attempt(given, "run", AttemptOrigin())
    finally:
        loop.summarise = summarise


@pytest.mark.every(2)
@pytest.mark.parametrize("what", ["weights", "averages of the weights"])
def test_a_bit_that_flips_after_the_last_save_is_told(pool: Pool, tmp_path: Path, what: str) -> None:
    """The run has no result: its weights would be those of one rank, and its digest that of another."""
    given = document(tmp_path, **({} if what == "weights" else {"ema": 0.5}))
    with raises(problems.RANKS_DIFFER, ranks=[1], what=what):
        pool.run(2, flipped_at_the_end, given, 1, what)


def test_honest_ranks_come_to_a_result(pool: Pool, tmp_path: Path) -> None:
    given = document(tmp_path, ema=0.5)
    ended = pool.run(2, flipped_at_the_end, given, None, "weights")
    assert {one.weights_digest for one in ended} == {train(given).weights_digest}
