"""Ranks whose bits part during a run: nothing of it is published, who is wrong is named, and the steps are taken again."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from lockstep.checkpoint.reader import checkpoints
from lockstep.checkpoint.runs.run_checkpoints import claim
from lockstep.checkpoint.runs.run_folder import AttemptOrigin, RunFolder
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.communication.group import Group
from lockstep.errors import CorruptionError
from lockstep.job.loading import load_job
from lockstep.record.events.union import Corrupted, Event
from lockstep.spec.loading import load_spec
from lockstep.training.integrity import problems
from lockstep.training.loop import fit
from lockstep.training.step import forward_backward
from tests.distributed.pool import Pool
from tests.distributed.training import Document, Kept, train, train_attempt
from tests.raised import raises

RUN = "run"


def document(folder: Path, **params: Any) -> Document:
    """Eight steps of twelve micro-batches, saved after each of them, whatever the plan says of digests."""
    return {
        "job": {"use": "tests.distributed.flipped_jobs:Flipped", "params": params},
        "length": {"steps": 8},
        "batch": {"global": 24, "micro": 2},
        "checkpoint": {"storage": str(folder), "every": {"seconds": 1e-6}, "keep_last": 20},
        "record": {"uri": "off", "digest_every": None},
    }


def saved(folder: Path) -> list[int]:
    return [found.step for found in checkpoints(RunFolder.open(open_storage(str(folder)), RUN))]


def second(folder: Path) -> AttemptOrigin:
    """The attempt that follows the first."""
    return claim(str(folder), RUN, None, at_least=2)


class Attempted(NamedTuple):
    """What an attempt came to: its error, the digest of its weights, and what it told of wrong bits."""

    error: str
    code: str
    weights: str
    corrupted: list[Corrupted]


def attempted(document: Document, origin: AttemptOrigin) -> Attempted:
    """One attempt as a worker of the pool, whose end by wrong bits is an answer."""
    spec, told = load_spec(document), list[Event]()
    group = Group.join(torch.device("cpu"))
    error, code, weights = "", "", ""
    try:
        summary = fit(
            spec, load_job(spec.job.use, spec.job.params), group, told.append, Kept([], None, RUN), origin
        )
        weights = (summary or {})["weights_digest"]
    except CorruptionError as wrong:
        error, code = str(wrong), wrong.code
    return Attempted(error, code, weights, [event for event in told if isinstance(event, Corrupted)])


@pytest.mark.thinned(2)
@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("what", "workers"),
    [
        ("weight", 2),
        ("moment", 3),
        ("buffer", 2),
        *(
            pytest.param(what, workers, marks=pytest.mark.exact)
            for what, workers in (("weight", 3), ("moment", 2), ("buffer", 3))
        ),
    ],
)
def test_a_mixture_is_never_published(pool: Pool, tmp_path: Path, what: str, workers: int) -> None:
    """One flipped bit after step 3 on one rank: the newest checkpoint is that of step 2, which all ranks agreed on."""
    with pytest.raises(CorruptionError):
        pool.run(workers, train_attempt, document(tmp_path, what=what), RUN, AttemptOrigin())
    assert max(saved(tmp_path)) == 2


@pytest.mark.scenario
def test_the_majority_names_the_one_that_is_wrong_and_the_steps_are_taken_again(
    pool: Pool, tmp_path: Path
) -> None:
    """G1: of three workers one is named with its first tensor; the next attempt ends with an uninterrupted run's bits."""
    found = pool.run(
        3, attempted, document(tmp_path, rank=2, until=str(tmp_path / "mended")), AttemptOrigin()
    )
    assert len({one.error for one in found}) == 1
    assert "rank 2 (host " in found[0].error
    assert "had other weights than the majority of the workers, first in '0.weight'" in found[0].error
    (told,) = found[0].corrupted
    assert (told.wrong, told.how, told.step, told.since) == ((2,), "majority", 3, 2)
    (tmp_path / "mended").touch()
    again = document(tmp_path, rank=2, until=str(tmp_path / "mended"))
    taken = pool.run(2, attempted, again, second(tmp_path))
    assert {one.weights for one in taken} == {train(again).weights_digest}
    assert not any(one.corrupted for one in taken)


@pytest.mark.scenario
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.exact), 2])
def test_of_two_workers_the_steps_that_are_taken_again_tell_which_was_wrong(
    pool: Pool, tmp_path: Path, workers: int
) -> None:
    """Two that differ name nobody; the next attempt, of any number of workers, does, and trains on."""
    given = document(tmp_path, what="moment", rank=1, until=str(tmp_path / "mended"))
    (doubt,) = pool.run(2, attempted, given, AttemptOrigin())[0].corrupted
    assert (doubt.wrong, doubt.how, doubt.quantity) == ((), "undecided", "optimizer state")
    assert doubt.tensor == "exp_avg of 0.weight"
    (tmp_path / "mended").touch()
    again = pool.run(workers, attempted, given, replace(second(tmp_path), doubts=(doubt,)))[0]
    (told,) = again.corrupted
    assert (told.wrong, told.how, told.step) == ((1,), "recomputation", 3)
    assert str(told.workers[1]) in str(told)
    assert str(told.workers[0]) not in str(told)
    assert again.weights == train(given).weights_digest


def test_an_evaluation_is_not_told_of_bits_that_ranks_do_not_share(pool: Pool, tmp_path: Path) -> None:
    """With neither saves nor digests in the plan, the end of an evaluation is where they compare."""
    given = document(tmp_path, what="moment", rank=0)
    given |= {"checkpoint": {"storage": str(tmp_path), "every": None}, "evaluate": {"every": {"steps": 4}}}
    given["job"]["params"]["evaluated"] = True
    with raises(
        problems.OTHER_BITS, got=re.compile(r"^after step 4 .* different weights, first in '0\.weight'")
    ):
        pool.run(2, train_attempt, given, RUN, AttemptOrigin())


@pytest.mark.scenario
def test_honest_ranks_tell_of_nothing(pool: Pool, tmp_path: Path) -> None:
    for found in pool.run(3, attempted, document(tmp_path, what="nothing"), AttemptOrigin()):
        assert not found.error
        assert not found.corrupted


def sharded(folder: Path, *, mirror: bool = True, **params: Any) -> Document:
    """With neither saves nor digests in the plan, and an optimizer that the workers share out."""
    given = document(folder, own_optimizer=False, **params)
    return given | {
        "sharding": "optimizer",
        "faults": {"mirror": mirror},
        "checkpoint": {"storage": str(folder), "every": None},
    }


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("rank", "mirror"),
    [(0, True), (2, True), *(pytest.param(*case, marks=pytest.mark.exact) for case in ((0, False), (1, True), (2, False)))],
)  # fmt: skip
def test_weights_are_compared_before_sharded_updates_overwrite_them(
    pool: Pool, tmp_path: Path, rank: int, mirror: bool
) -> None:
    """The part that a rank updates would go to all from there, and the same update would hide what the rank computed with others' parts."""
    given = sharded(tmp_path, rank=rank, mirror=mirror)
    found = pool.run(3, attempted, given, AttemptOrigin())
    assert {one.code for one in found} == {problems.OTHER_BITS.code}
    assert f"rank {rank} (host " in found[0].error
    assert "first in '0.weight'" in found[0].error
    assert all((told.wrong, told.step) == ((rank,), 3) for one in found for told in one.corrupted)


@pytest.mark.scenario
@pytest.mark.parametrize("rank", [0, 1])
def test_of_two_with_a_sharded_optimizer_the_repeated_steps_tell_which_was_wrong(
    pool: Pool, tmp_path: Path, rank: int
) -> None:
    until = tmp_path / "mended"
    given = sharded(tmp_path, rank=rank, until=str(until)) | {
        "checkpoint": {"storage": str(tmp_path), "every": {"steps": 2}}
    }
    found = pool.run(2, attempted, given, AttemptOrigin())
    (doubt,) = found[0].corrupted
    assert (doubt.wrong, doubt.how, doubt.step) == ((), "undecided", 3)
    until.touch()
    again = pool.run(2, attempted, given, replace(second(tmp_path), doubts=(doubt,)))[0]
    assert [(told.wrong, told.how) for told in again.corrupted] == [((rank,), "recomputation")]
    assert again.weights == train(given).weights_digest


def attempted_unseeing(document: Document) -> Attempted:
    with mock.patch.object(forward_backward, "checksum", lambda parameters: torch.tensor(1)):
        return attempted(document, AttemptOrigin())


@pytest.mark.scenario
@pytest.mark.parametrize("rank", [0, 2])
def test_without_the_comparison_other_bits_are_the_run_s(pool: Pool, tmp_path: Path, rank: int) -> None:
    """The control: whichever rank it is, nobody finds it later."""
    given = sharded(
        tmp_path, rank=rank, mirror=False, step=5
    )  # in the steps 2, 4, 8 … a second opinion would find it
    alone = train({**given, "job": {**given["job"], "params": {**given["job"]["params"], "what": "nothing"}}})
    found = pool.run(3, attempted_unseeing, given)
    assert {one.error for one in found} == {""}
    assert len({one.weights for one in found}) == 1
    assert found[0].weights != alone.weights_digest


@pytest.mark.scenario
def test_honest_ranks_of_a_sharded_optimizer_tell_of_nothing(pool: Pool, tmp_path: Path) -> None:
    given = sharded(tmp_path, what="nothing")
    alone = train(given).weights_digest
    for found in pool.run(3, attempted, given, AttemptOrigin()):
        assert (found.error, found.corrupted, found.weights) == ("", [], alone)


def test_sharded_weights_that_part_are_found(pool: Pool, tmp_path: Path) -> None:
    """What every rank has is compared. A part that a rank alone updates goes to all from there, and is the same on all."""
    given = document(tmp_path, what="buffer", rank=2)
    given |= {"sharding": "optimizer"}
    given["job"]["params"]["own_optimizer"] = False
    with raises(problems.OTHER_BITS, got=re.compile(r"rank 2 \(.* first in '1.running_mean'")):
        pool.run(3, train_attempt, given, RUN, AttemptOrigin())
