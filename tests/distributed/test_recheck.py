"""Micro-batches that are computed a second time: who computes wrong bits is named, and nothing of it stays in the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

import lockstep.training.step.fsdp_collectives as fsdp_collectives
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.plan import Position
from lockstep.randomness import digest64
from lockstep.training.integrity import problems
from lockstep.training.integrity.recheck import assigned_again, is_chosen, odd_ones
from lockstep.training.step.accumulation import Accumulation
from lockstep.training.step.forward_backward import ForwardBackward
from tests.distributed import test_same_bits
from tests.distributed.flipped_jobs import flip
from tests.distributed.pool import Pool
from tests.distributed.test_drift import Attempted, attempted, check_settled, document
from tests.distributed.training import Document, train


def rechecked(share: float, given: Document) -> Document:
    return {**given, "determinism": {"mode": "strict", "recheck": share}}


# --- nothing stays ------------------------------------------------------------------------------------------------


def drawing(job: str, micro_batches: int = 6) -> Document:
    """Jobs that draw numbers in data and model, and one whose bits depend on the buffers that a micro-batch starts from."""
    return test_same_bits.centred() if job == "centred" else test_same_bits.document(job, micro_batches)


@pytest.mark.scenario
@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("job", "workers"),
    [("digits", 1), ("gpt", 2), ("centred", 3), pytest.param("digits", 4, marks=pytest.mark.exact)],
)
def test_no_bit_of_a_run_is_another_where_all_is_computed_twice(pool: Pool, job: str, workers: int) -> None:
    """G1: every row, every digest, the identity; on W workers with it and on one without."""
    assert pool.run(workers, train, rechecked(1.0, drawing(job)))[0] == train(drawing(job))


# --- when ---------------------------------------------------------------------------------------------------------


class Work(NamedTuple):
    """A micro-batch that a worker computes: of its own, or again."""

    step: int
    micro_batch: int
    again: bool


def worked(document: Document) -> list[Work]:
    """What this worker computes in a run, in order."""
    done: list[Work] = []
    own, again = ForwardBackward.backward, Accumulation.recomputed

    def computed(
        self: ForwardBackward, phase: Any, position: Position, m: int, *where: Any, **how: Any
    ) -> None:
        done.append(Work(position.step, m, again=False))
        own(self, phase, position, m, *where, **how)

    def recomputed(self: Accumulation, phase: Any, position: Position, m: int, batch: Any) -> Any:
        done.append(Work(position.step, m, again=True))
        return again(self, phase, position, m, batch)

    with (
        mock.patch.object(ForwardBackward, "backward", computed),
        mock.patch.object(Accumulation, "recomputed", recomputed),
    ):
        train(document)
    return done


def test_the_worker_that_would_wait_computes_it_before_its_own(pool: Pool) -> None:
    """Of eight micro-batches on three workers the first has two, so no step is longer for one of the others' that it computes again."""
    done = pool.run(3, worked, rechecked(0.1, drawing("gpt", 8)))
    hidden = 0
    for step in {one.step for one in done[0]}:
        taken = [[one for one in own if one.step == step] for own in done]
        assert all(own == sorted(own, key=lambda one: not one.again) for own in taken)
        counts = [sum(not one.again for one in own) for own in taken]
        owners = {one.micro_batch: rank for rank, own in enumerate(taken) for one in own if not one.again}
        chosen = {m: rank for m, rank in owners.items() if is_chosen(3, 0.1, step, m)}
        again = {one.micro_batch: rank for rank, own in enumerate(taken) for one in own if one.again}
        assert again == assigned_again(counts, chosen)
        if counts == [2, 3, 3] and list(chosen.values()) in ([1], [2]):
            hidden += 1
            assert [len(own) for own in taken] == [3, 3, 3]
    assert hidden


# --- who is named -------------------------------------------------------------------------------------------------


def lying(document: Document, rank: int, seed: int, share: float) -> Attempted:
    """An attempt on whose worker `rank` some of all gradients that it computes have one bit flipped, as a broken core would have it."""
    here = dist.get_rank() if dist.is_initialized() else 0
    take, calls = Accumulation._take_gradients, [0]

    def lie(gradients: list[Tensor]) -> list[Tensor]:
        calls[0] += 1
        if here == rank and digest64((seed, "lie", calls[0])) < share * 2.0**64:
            flip(gradients[0], bit=calls[0] % 23)
        return gradients

    def taken(self: Accumulation, *where: Any) -> list[Tensor]:
        return lie(take(self, *where))

    with mock.patch.object(Accumulation, "_take_gradients", taken):
        return attempted(document, AttemptOrigin())


def seeded(folder: Path, seed: int) -> Document:
    """Eight steps of twelve micro-batches, of which a third is computed again."""
    given = document(folder / str(seed), what="nothing", own_optimizer=False)
    return rechecked(0.3, {**given, "seed": seed, "checkpoint": {"storage": str(folder), "every": None}})


SEEDS = [*range(2), *(pytest.param(seed, marks=pytest.mark.exact) for seed in range(2, 20))]


@pytest.mark.every(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_of_three_the_one_that_lies_is_named(pool: Pool, tmp_path: Path, seed: int) -> None:
    rank = seed % 3
    found = pool.run(3, lying, seeded(tmp_path, seed), rank, seed, 0.5)
    assert len({one.error for one in found}) == 1
    (told,) = found[0].corrupted
    assert (told.wrong, told.how) == ((rank,), "majority")
    assert f"rank {rank} (host " in str(told)
    assert found[0].code == problems.OTHER_GRADIENTS.code
    assert f"step {told.step}, micro-batch {told.micro_batch}, " in found[0].error


@pytest.mark.every(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_of_honest_ones_nobody_is_named(pool: Pool, tmp_path: Path, seed: int) -> None:
    for found in pool.run(3, lying, seeded(tmp_path, seed), -1, seed, 0.5):
        assert not found.error
        assert not found.corrupted


def test_of_two_the_one_that_contradicts_itself_is_named(pool: Pool, tmp_path: Path) -> None:
    (told,) = pool.run(2, lying, seeded(tmp_path, 3), 1, 3, 0.5)[0].corrupted
    assert (told.wrong, told.how) == ((1,), "repetition")


def test_other_weights_are_told_as_such(pool: Pool, tmp_path: Path) -> None:
    """They flip where nothing compares them, and give other gradients; the steps that are taken again tell whose they were."""
    until = tmp_path / "flipped"
    given = rechecked(1.0, document(tmp_path, step=5, norm="none", own_optimizer=False, until=str(until)))
    given |= {"schedule": {"name": "cosine"}}
    given["checkpoint"] |= {"every": {"steps": 4}}
    first = pool.run(2, attempted, given, AttemptOrigin())[0]
    (told,) = first.corrupted
    assert (first.code, told.quantity, told.how) == (problems.OTHER_BITS.code, "weights", "undecided")
    until.touch()
    check_settled(pool, tmp_path, given, told, wrong=1, workers=2)


def test_of_two_that_both_repeat_themselves_both_are_named(pool: Pool, tmp_path: Path) -> None:
    """A worker whose every gradient is wrong in the same way says the same twice."""
    (told,) = pool.run(2, always_wrong, seeded(tmp_path, 3), 1)[0].corrupted
    assert (told.wrong, told.how) == ((), "undecided")
    assert len(told.untrusted_workers) == 2


def always_wrong(document: Document, rank: int) -> Attempted:
    take = Accumulation._take_gradients

    def taken(self: Accumulation, *where: Any) -> list[Tensor]:
        gradients = take(self, *where)
        if self.group.rank == rank:
            flip(gradients[0])
        return gradients

    with mock.patch.object(Accumulation, "_take_gradients", taken):
        return attempted(document, AttemptOrigin())


def test_one_alone_is_held_against_itself(tmp_path: Path) -> None:
    found = lying(seeded(tmp_path, 3), 0, 3, 0.2)
    (told,) = found.corrupted
    assert (told.wrong, told.how) == ((0,), "repetition")
    assert "than when it was computed again" in found.error


# --- where the parameters are sharded -------------------------------------------------------------------------------


def sharded(given: Document) -> Document:
    return {**given, "sharding": "full"}


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("job", "workers"),
    [
        ("gpt", 2),
        ("centred", 3),
        *(pytest.param(job, w, marks=pytest.mark.exact) for job in ("digits", "gpt") for w in (3, 4)),
    ],
)
def test_no_bit_of_a_sharded_run_is_another_where_all_is_computed_twice(
    pool: Pool, job: str, workers: int
) -> None:
    """The second computations are passes of their own, of which nothing is added up."""
    assert pool.run(workers, train, sharded(rechecked(1.0, drawing(job))))[0] == train(drawing(job))


def lying_with_rows(document: Document, rank: int, seed: int, share: float) -> Attempted:
    """As `lying`, in a unit's gradient before its rows go to their workers."""
    here, scatter, calls = dist.get_rank(), fsdp_collectives.Scatter.__call__, [0]

    def lie(self: Any, **given: Any) -> None:
        calls[0] += 1
        if here == rank and digest64((seed, "lie", calls[0])) < share * 2.0**64:
            flip(given["input_tensor"], bit=calls[0] % 23)
        scatter(self, **given)

    with mock.patch.object(fsdp_collectives.Scatter, "__call__", lie):
        return attempted(document, AttemptOrigin())


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize("seed", SEEDS[:2])
def test_of_three_with_rows_the_one_that_lies_is_named(pool: Pool, tmp_path: Path, seed: int) -> None:
    """The control: of honest ones nobody is."""
    for liar in (seed % 3, -1):
        given = sharded(seeded(tmp_path / str(liar), seed))
        found = pool.run(3, lying_with_rows, given, liar, seed, 0.5)
        assert len({one.error for one in found}) == 1
        told = [(one.wrong, one.how) for one in found[0].corrupted]
        assert told == ([((liar,), "majority")] if liar >= 0 else [])


# --- which, and the verdict: pure -----------------------------------------------------------------------------------


def test_the_share_that_is_chosen_is_the_one_asked_for() -> None:
    chosen = [is_chosen(7, 0.01, step, m) for step in range(1000) for m in range(32)]
    assert 250 < sum(chosen) < 390
    assert chosen == [is_chosen(7, 0.01, step, m) for step in range(1000) for m in range(32)]
    assert not any(is_chosen(7, 0.0, step, 0) for step in range(100))
    assert all(is_chosen(7, 1.0, step, 0) for step in range(100))


@pytest.mark.parametrize(
    ("counts", "owners", "again"),
    [
        ((8,), {3: 0}, {3: 0}),
        ((4, 4), {0: 0, 5: 1}, {0: 1, 5: 0}),
        ((4, 4, 4), {0: 0, 5: 1, 9: 2}, {0: 1, 5: 2, 9: 0}),
        # One has fewer, and computes what others own until it has as many as they.
        ((2, 3, 3), {4: 1}, {4: 0}),
        ((2, 3, 3), {7: 2}, {7: 0}),
        ((2, 3, 3), {1: 0}, {1: 1}),
        ((2, 4, 4), {3: 1, 4: 1, 8: 2}, {3: 0, 4: 0, 8: 0}),
        # A ragged step leaves one with none.
        ((2, 2, 1, 0), {0: 0, 1: 0, 4: 2}, {0: 3, 1: 2, 4: 3}),
    ],
)
def test_who_has_fewest_to_compute_does_it(
    counts: Sequence[int], owners: dict[int, int], again: dict[int, int]
) -> None:
    assert assigned_again(counts, owners) == again


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
