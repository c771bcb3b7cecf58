"""Micro-batches that are computed a second time: who computes wrong bits is named, and nothing of it stays in the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoint.run_folder import AttemptOrigin
from lockstep.randomness import digest64
from lockstep.training.recheck import is_chosen, odd_ones
from lockstep.training.step import Stepper
from tests.distributed import test_same_bits
from tests.distributed.flipped_jobs import flip
from tests.distributed.pool import Pool
from tests.distributed.test_drift import Attempted, attempted, document
from tests.distributed.training import Document, train


def rechecked(share: float, given: Document) -> Document:
    return {**given, "determinism": {"mode": "strict", "recheck": share}}


# --- nothing stays ------------------------------------------------------------------------------------------------


def drawing(job: str) -> Document:
    """Jobs that draw numbers in data and model, and one whose bits depend on the buffers that a micro-batch starts from."""
    return test_same_bits.centred() if job == "centred" else test_same_bits.document(job, 6)


@pytest.mark.parametrize(
    ("job", "workers"),
    [("digits", 1), ("gpt", 2), ("centred", 3), pytest.param("digits", 4, marks=pytest.mark.exact)],
)
def test_no_bit_of_a_run_is_another_where_all_is_computed_twice(pool: Pool, job: str, workers: int) -> None:
    """G1: every row, every digest, the identity; on W workers with it and on one without."""
    assert pool.run(workers, train, rechecked(1.0, drawing(job)))[0] == train(drawing(job))


# --- who is named -------------------------------------------------------------------------------------------------


def lying(document: Document, rank: int, seed: int, share: float) -> Attempted:
    """An attempt on whose worker `rank` some of all gradients that it computes have one bit flipped, as a broken core would have it."""
    here = dist.get_rank() if dist.is_initialized() else 0
    take, calls = Stepper._take_gradients, [0]

    def lie(gradients: list[Tensor]) -> list[Tensor]:
        calls[0] += 1
        if here == rank and digest64((seed, "lie", calls[0])) < share * 2.0**64:
            flip(gradients[0], bit=calls[0] % 23)
        return gradients

    def taken(self: Stepper, *where: Any) -> list[Tensor]:
        return lie(take(self, *where))

    with mock.patch.object(Stepper, "_take_gradients", taken):
        return attempted(document, AttemptOrigin())


def seeded(folder: Path, seed: int) -> Document:
    """Eight steps of twelve micro-batches, of which a third is computed again."""
    given = document(folder / str(seed), what="nothing", own_optimizer=False)
    return rechecked(0.3, {**given, "seed": seed, "checkpoint": {"storage": str(folder), "every": None}})


SEEDS = [*range(2), *(pytest.param(seed, marks=pytest.mark.exact) for seed in range(2, 20))]


@pytest.mark.parametrize("seed", SEEDS)
def test_of_three_the_one_that_lies_is_named(pool: Pool, tmp_path: Path, seed: int) -> None:
    rank = seed % 3
    found = pool.run(3, lying, seeded(tmp_path, seed), rank, seed, 0.5)
    assert len({one.error for one in found}) == 1
    (told,) = found[0].corrupted
    assert (told.wrong, told.how) == ((rank,), "majority")
    assert f"rank {rank} (host " in str(told)
    assert f"step {told.step}, micro-batch {told.micro_batch}, " in found[0].error


@pytest.mark.parametrize("seed", SEEDS)
def test_of_honest_ones_nobody_is_named(pool: Pool, tmp_path: Path, seed: int) -> None:
    for found in pool.run(3, lying, seeded(tmp_path, seed), -1, seed, 0.5):
        assert not found.error
        assert not found.corrupted


def test_of_two_the_one_that_contradicts_itself_is_named(pool: Pool, tmp_path: Path) -> None:
    (told,) = pool.run(2, lying, seeded(tmp_path, 3), 1, 3, 0.5)[0].corrupted
    assert (told.wrong, told.how) == ((1,), "repetition")


def test_of_two_that_both_repeat_themselves_both_are_named(pool: Pool, tmp_path: Path) -> None:
    """A worker whose every gradient is wrong in the same way says the same twice."""
    (told,) = pool.run(2, always_wrong, seeded(tmp_path, 3), 1)[0].corrupted
    assert (told.wrong, told.how) == ((), "undecided")
    assert len(told.suspects) == 2


def always_wrong(document: Document, rank: int) -> Attempted:
    take = Stepper._take_gradients

    def taken(self: Stepper, *where: Any) -> list[Tensor]:
        gradients = take(self, *where)
        if self.group.rank == rank:
            flip(gradients[0])
        return gradients

    with mock.patch.object(Stepper, "_take_gradients", taken):
        return attempted(document, AttemptOrigin())


def test_one_alone_is_held_against_itself(tmp_path: Path) -> None:
    found = lying(seeded(tmp_path, 3), 0, 3, 0.2)
    (told,) = found.corrupted
    assert (told.wrong, told.how) == ((0,), "repetition")
    assert "than when it was computed again" in found.error


# --- which, and the verdict: pure -----------------------------------------------------------------------------------


def test_the_share_that_is_chosen_is_the_one_asked_for() -> None:
    chosen = [is_chosen(7, 0.01, step, m) for step in range(1000) for m in range(32)]
    assert 250 < sum(chosen) < 390
    assert chosen == [is_chosen(7, 0.01, step, m) for step in range(1000) for m in range(32)]
    assert not any(is_chosen(7, 0.0, step, 0) for step in range(100))
    assert all(is_chosen(7, 1.0, step, 0) for step in range(100))


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        ({4: [1], 5: [2], 6: [1]}, (5,)),
        ({4: [1], 5: [2], 6: [2]}, (4,)),
        ({4: [1], 5: [2], 6: [3]}, ()),
        ({0: [1, 1], 1: [2, 1]}, (1,)),
        ({0: [2, 1], 1: [1, 1]}, (0,)),
        ({0: [1, 1], 1: [2, 2]}, ()),
        ({0: [1, 3], 1: [2, 4]}, ()),
        ({0: [1, 2, 2]}, (0,)),
    ],
)
def test_the_odd_one_out(found: dict[int, Sequence[int]], wrong: tuple[int, ...]) -> None:
    assert odd_ones(found) == wrong
