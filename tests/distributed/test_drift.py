"""Ranks whose bits part during a run: nothing of it is published, who is wrong is named, and the steps are taken again."""

from __future__ import annotations

import re
from contextlib import ExitStack
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
from lockstep.plan import Position
from lockstep.record.events.union import Corrupted, Event
from lockstep.record.ledger.rows import StepRow
from lockstep.spec.loading import load_spec
from lockstep.training import loop
from lockstep.training.integrity import problems
from lockstep.training.integrity.agreement import Agreement
from lockstep.training.integrity.quantities import Quantity
from lockstep.training.loop import fit
from lockstep.training.run import Run
from lockstep.training.step import forward_backward
from lockstep.training.step.accumulation import Accumulation
from lockstep.training.step.mirrored_optimizer import MirroredOptimizer
from lockstep.training.step.mirrored_shards import MirroredShards
from lockstep.training.step.optimizer_step import Stepper
from tests.distributed.flipped_jobs import flip
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


def check_settled(
    pool: Pool, folder: Path, given: Document, doubt: Corrupted, *, wrong: int, workers: int
) -> None:
    """The next attempt, on so many workers, tells which rank was wrong, and comes to the bits of a run left alone."""
    again = pool.run(workers, attempted, given, replace(second(folder), doubts=(doubt,)))[0]
    assert [(told.wrong, told.how) for told in again.corrupted] == [((wrong,), "recomputation")]
    assert again.weights == train(given).weights_digest


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
    check_settled(pool, tmp_path, given, doubt, wrong=rank, workers=2)


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


def attempted_with_flip_in(
    document: Document, origin: AttemptOrigin, method: str, rank: int, step: int
) -> Attempted:
    """An attempt in which a bit of a weight that a rank has flips as one of the methods of a step begins: of the whole model, or of its rows."""
    owner, name = {
        "step": (Stepper, "__call__"),
        "second evaluation": (Accumulation, "__call__"),
        "update": (Stepper, "_update"),
    }[method]
    begun = getattr(owner, name)

    def begin(self: Any, *arguments: Any, **more: Any) -> Any:
        compute = self.compute
        position = next(each for each in arguments if isinstance(each, Position))
        is_due = method != "second evaluation" or compute.evaluates_again
        if (position.number, origin.attempt) == (step, 1) and compute.group.rank == rank and is_due:
            sharding = compute.state.sharding
            parameters = compute.state.model.parameters()
            flip(next(parameters) if sharding is None else next(iter(sharding.shards.values())).local, bit=20)
        return begun(self, *arguments, **more)

    with mock.patch.object(owner, name, begin):
        return attempted(document, origin)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("method", ["step", "second evaluation"])
def test_weights_are_compared_in_each_evaluation_of_an_update(
    pool: Pool, tmp_path: Path, method: str
) -> None:
    given = {
        "job": {"use": "tests.distributed.elementwise_jobs:LooksAhead"},
        "length": {"steps": 6},
        "batch": {"global": 12, "micro": 4},
        "sharding": "optimizer",
        "checkpoint": {"storage": str(tmp_path), "every": None},
        "record": {"uri": "off", "digest_every": 1},
    }
    found = pool.run(3, attempted_with_flip_in, given, AttemptOrigin(), method, 2, 5)
    assert {one.code for one in found} == {problems.OTHER_BITS.code}
    assert [told.wrong for told in found[0].corrupted] == [(2,)]


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("rank", "mode"), [(1, "optimizer"), pytest.param(0, "full", marks=pytest.mark.scenario)]
)
def test_a_step_has_the_same_digests_before_its_evaluation_and_after(
    pool: Pool, tmp_path: Path, rank: int, mode: str
) -> None:
    """The difference is found after the evaluation of step 3, and settled before it: nobody but the one that was wrong is named."""
    given = sharded(tmp_path, what="nothing", evaluated=True) | {
        "sharding": mode,
        "evaluate": {"every": {"steps": 3}},
        "checkpoint": {"storage": str(tmp_path), "every": {"steps": 2}},
    }
    found = pool.run(2, attempted_with_flip_in, given, AttemptOrigin(), "step", rank, 4)
    (doubt,) = found[0].corrupted
    assert (doubt.wrong, doubt.step) == ((), 3)
    check_settled(pool, tmp_path, given, doubt, wrong=rank, workers=2)


@pytest.mark.parametrize("workers", [2, pytest.param(1, marks=pytest.mark.scenario)])
def test_the_state_of_a_checkpoint_tells_who_was_wrong_after_it(
    pool: Pool, tmp_path: Path, workers: int
) -> None:
    """No step is taken again whose digests could."""
    given = sharded(tmp_path, what="nothing") | {
        "checkpoint": {"storage": str(tmp_path), "every": {"steps": 1}, "keep_last": 20}
    }
    found = pool.run(2, attempted_with_flip_in, given, AttemptOrigin(), "step", 1, 4)
    (doubt,) = found[0].corrupted
    assert (doubt.wrong, doubt.step) == ((), 3)
    check_settled(pool, tmp_path, given, doubt, wrong=1, workers=workers)


@pytest.mark.scenario
def test_without_mirrors_a_worker_alone_tells_by_the_weights(pool: Pool, tmp_path: Path) -> None:
    """It has the whole optimizer's state, and the two that differed had parts of it, which were alike: what differed were weights, and those it has too."""
    given = sharded(tmp_path, what="nothing", mirror=False) | {
        "checkpoint": {"storage": str(tmp_path), "every": {"steps": 2}}
    }
    (doubt,) = pool.run(2, attempted_with_flip_in, given, AttemptOrigin(), "step", 1, 4)[0].corrupted
    again = pool.run(1, attempted, given, replace(second(tmp_path), doubts=(doubt,)))[0]
    assert [told.wrong for told in again.corrupted] == [(1,)]
    assert again.weights == train(given).weights_digest


@pytest.mark.scenario
def test_honest_ranks_of_a_sharded_optimizer_tell_of_nothing(pool: Pool, tmp_path: Path) -> None:
    given = sharded(tmp_path, what="nothing")
    alone = train(given).weights_digest
    for found in pool.run(3, attempted, given, AttemptOrigin()):
        assert (found.error, found.corrupted, found.weights) == ("", [], alone)


# --- a sharded optimizer whose parts have a mirror ----------------------------------------------------------------


@pytest.mark.thinned(2)
@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.scenario)])
@pytest.mark.parametrize("what", ["moment", "mirrored moment"])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_an_owner_sends_is_compared_with_what_its_mirror_has_computed(
    pool: Pool, tmp_path: Path, workers: int, what: str, rank: int
) -> None:
    """The weights that the flipped moment has made are not used: the next step ends before its update, and the steps that are taken again tell which was wrong."""
    given = sharded(tmp_path, what="nothing") | {
        "checkpoint": {"storage": str(tmp_path), "every": {"steps": 4}}
    }
    found = pool.run(workers, attempted_with_flip, given, AttemptOrigin(), what, rank)
    assert {one.code for one in found} == {problems.OTHER_BITS.code}
    (doubt,) = found[0].corrupted
    assert (doubt.wrong, doubt.how, doubt.step, doubt.quantity) == ((), "undecided", 6, "optimizer state")
    assert doubt.tensor.startswith("exp_avg of ")
    assert rank in {worker.rank for worker in doubt.workers}
    assert len(doubt.workers) == 2
    check_settled(pool, tmp_path, given, doubt, wrong=rank, workers=3)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("what", ["moment", pytest.param("mirrored moment", marks=pytest.mark.scenario)])
def test_no_moment_is_saved_that_differs_from_its_mirror(pool: Pool, tmp_path: Path, what: str) -> None:
    given = sharded(tmp_path, what="nothing") | {
        "checkpoint": {"storage": str(tmp_path), "every": {"steps": 1}, "keep_last": 20}
    }
    found = pool.run(2, attempted_with_flip, given, AttemptOrigin(), what, 1)
    (doubt,) = found[0].corrupted
    assert (doubt.wrong, doubt.step, doubt.quantity) == ((), 5, "optimizer state")
    assert max(saved(tmp_path)) == 4
    check_settled(pool, tmp_path, given, doubt, wrong=1, workers=1)


def attempted_with_flip_in_update(document: Document, origin: AttemptOrigin, rank: int) -> Attempted:
    """An attempt in which a bit of the weights of a rank's own spans flips within the update of step 5, when nothing else shows it."""
    updated = MirroredOptimizer._updated

    def flipping(self: MirroredOptimizer, parts: Any, optimizer: Any, *more: Any) -> None:
        updated(self, parts, optimizer, *more)
        if self.group.rank == rank and parts is self._parts:
            count = next(int(state["step"]) for state in optimizer.state.values())
            if count == 5 and origin.attempt == 1:
                flip(next(part.value for part in parts.values()), bit=20)

    with mock.patch.object(MirroredOptimizer, "_updated", flipping):
        return attempted(document, origin)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("workers", "rank"), [(2, 0), pytest.param(3, 2, marks=pytest.mark.scenario)])
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.scenario)])
def test_a_bit_that_flips_within_an_update_is_found_by_the_mirror(
    pool: Pool, tmp_path: Path, workers: int, rank: int, every: int
) -> None:
    """Of the weights that the mirror has made nothing is left but that they were other ones: the owner is wrong as soon as the steps that are taken again say so."""
    given = sharded(tmp_path, what="nothing") | {
        "checkpoint": {"storage": str(tmp_path), "every": {"steps": every}, "keep_last": 20}
    }
    found = pool.run(workers, attempted_with_flip_in_update, given, AttemptOrigin(), rank)
    (doubt,) = found[0].corrupted
    assert (doubt.wrong, doubt.step, doubt.quantity, doubt.tensor) == ((), 5, "weights", "")
    assert max(saved(tmp_path)) == 4
    check_settled(pool, tmp_path, given, doubt, wrong=rank, workers=2)


@pytest.mark.scenario
def test_without_the_comparison_with_mirrors_other_bits_are_the_run_s(pool: Pool, tmp_path: Path) -> None:
    """The control."""
    given = sharded(tmp_path, what="nothing")
    found = pool.run(2, attempted_with_flip, given, AttemptOrigin(), "moment", 1, False)
    assert {one.error for one in found} == {""}
    assert found[0].weights != train(given).weights_digest


# --- fully sharded parameters whose rows have a mirror ------------------------------------------------------------


def fully_sharded(folder: Path, **more: Any) -> Document:
    """With neither saves nor digests in the plan, and a job without `after_step`, which would give a mirror its owner's weights."""
    plain = {"job": {"use": "tests.distributed.small_jobs:Plain"}, "sharding": "full", "ema": 0.9}
    return sharded(folder) | plain | more


def attempted_with_flip(
    document: Document, origin: AttemptOrigin, what: str, rank: int, compares: bool = True
) -> Attempted:
    """An attempt in which a bit of rows that a rank has flips after step 5: of its own, or of those that it mirrors. With `compares` off nobody looks."""
    note_step = loop.note_step

    def noted(run: Run, row: StepRow) -> None:
        note_step(run, row)
        if row.step != 5 or run.group.rank != rank:
            return
        mirrored = run.state.mirrored
        if what == "buffer":
            flip(next(run.state.model.buffers()), bit=20)
        elif mirrored is not None:
            for one in what.split(" and "):
                quantity = Quantity(("weight", "moment", "average").index(one.removeprefix("mirrored ")))
                replica = next(
                    each
                    for each in mirrored.replicas(run.state.names_by_phase())
                    if (each.quantity, each.is_mirror) == (quantity, one.startswith("mirrored "))
                )
                flip(replica.elements.values, bit=20)

    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(loop, "note_step", noted))
        if not compares:
            for kind in (MirroredShards, MirroredOptimizer):
                patched.enter_context(mock.patch.object(kind, "balance", lambda self: 0))
            patched.enter_context(mock.patch.object(Agreement, "_compare_mirrors", lambda self, held: None))
        return attempted(document, origin)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.scenario)])
@pytest.mark.parametrize("what", ["weight", "mirrored weight"])
@pytest.mark.parametrize("rank", [0, 1])
def test_rows_are_compared_with_their_mirror_in_each_step(
    pool: Pool, tmp_path: Path, workers: int, what: str, rank: int
) -> None:
    """Two workers have them: nobody knows which is wrong, until the steps are taken again."""
    given = fully_sharded(tmp_path, checkpoint={"storage": str(tmp_path), "every": {"steps": 4}})
    found = pool.run(workers, attempted_with_flip, given, AttemptOrigin(), what, rank)
    assert {one.code for one in found} == {problems.OTHER_BITS.code}
    (doubt,) = found[0].corrupted
    assert (doubt.wrong, doubt.how, doubt.step, doubt.quantity) == ((), "undecided", 5, "weights")
    assert doubt.tensor == "0.weight"
    assert rank in {worker.rank for worker in doubt.workers}
    assert len(doubt.workers) == 2
    check_settled(pool, tmp_path, given, doubt, wrong=rank, workers=3)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    "job", ["tests.distributed.small_jobs:Plain", "tests.distributed.flipped_jobs:Flipped"]
)
@pytest.mark.parametrize("every", [4, 1])
def test_a_bit_of_rows_that_flips_within_an_update_is_found(
    pool: Pool, tmp_path: Path, job: str, every: int
) -> None:
    """Also where `after_step` then gives the mirror what the owner has, and before that is saved."""
    params = {"what": "nothing"} if job.endswith("Flipped") else {}
    given = fully_sharded(
        tmp_path,
        job={"use": job, "params": params},
        checkpoint={"storage": str(tmp_path), "every": {"steps": every}, "keep_last": 20},
    )
    found = pool.run(2, attempted_with_flip_in, given, AttemptOrigin(), "update", 1, 5)
    (doubt,) = found[0].corrupted
    assert (doubt.step, doubt.quantity) == (5, "weights")
    assert max(saved(tmp_path)) == 4
    check_settled(pool, tmp_path, given, doubt, wrong=1, workers=2)


@pytest.mark.scenario
def test_a_bit_that_flips_in_both_that_a_worker_has_is_found_before_the_update(
    pool: Pool, tmp_path: Path
) -> None:
    given = fully_sharded(tmp_path)
    found = pool.run(3, attempted_with_flip, given, AttemptOrigin(), "weight and mirrored weight", 1)
    assert {told.step for one in found for told in one.corrupted} == {5}


@pytest.mark.scenario
@pytest.mark.parametrize("what", ["moment", "mirrored moment"])
def test_a_moment_of_rows_shows_in_the_weights_of_the_next_update(
    pool: Pool, tmp_path: Path, what: str
) -> None:
    found = pool.run(2, attempted_with_flip, fully_sharded(tmp_path), AttemptOrigin(), what, 1)
    (doubt,) = found[0].corrupted
    assert (doubt.step, doubt.quantity, doubt.tensor) == (6, "weights", "0.weight")


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("what", "quantity", "tensor"),
    [
        ("moment", "optimizer state", "exp_avg of 0.weight"),
        ("mirrored average", "average of the weights", "average of 0.weight"),
        pytest.param("mirrored moment", "optimizer state", "exp_avg of 0.weight", marks=pytest.mark.exact),
        pytest.param("average", "average of the weights", "average of 0.weight", marks=pytest.mark.exact),
    ],
)
def test_nothing_is_saved_of_rows_that_differ_from_their_mirror(
    pool: Pool, tmp_path: Path, what: str, quantity: str, tensor: str
) -> None:
    """What no step computes with is compared before a save, and of two that differ the steps that are taken again tell which was wrong."""
    given = fully_sharded(
        tmp_path, checkpoint={"storage": str(tmp_path), "every": {"steps": 1}, "keep_last": 20}
    )
    found = pool.run(2, attempted_with_flip, given, AttemptOrigin(), what, 1)
    (doubt,) = found[0].corrupted
    assert (doubt.wrong, doubt.step, doubt.quantity, doubt.tensor) == ((), 5, quantity, tensor)
    assert max(saved(tmp_path)) == 4
    check_settled(pool, tmp_path, given, doubt, wrong=1, workers=1)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("rank", [2, pytest.param(0, marks=pytest.mark.exact)])
def test_what_is_whole_beside_shards_is_compared(pool: Pool, tmp_path: Path, rank: int) -> None:
    """Buffers, which every rank has, and without any mirror."""
    given = fully_sharded(
        tmp_path, checkpoint={"storage": str(tmp_path), "every": {"steps": 1}, "keep_last": 20}
    )
    given |= {"faults": {"mirror": False}, "job": {**given["job"], "params": {"norm": "batch"}}}
    found = pool.run(3, attempted_with_flip, given, AttemptOrigin(), "buffer", rank)
    (told,) = found[0].corrupted
    assert (told.wrong, told.how, told.step) == ((rank,), "majority", 5)
    assert (told.quantity, told.tensor) == ("weights", "1.running_mean")
    assert max(saved(tmp_path)) == 4


@pytest.mark.scenario
def test_without_the_comparison_of_rows_other_bits_are_the_run_s(pool: Pool, tmp_path: Path) -> None:
    """The control."""
    given = fully_sharded(tmp_path)
    given["checkpoint"]["every"] = None
    found = pool.run(2, attempted_with_flip, given, AttemptOrigin(), "weight", 1, False)
    assert {one.error for one in found} == {""}
    assert found[0].weights != train(given).weights_digest


def test_sharded_weights_that_part_are_found(pool: Pool, tmp_path: Path) -> None:
    """What every rank has is compared. A part that a rank alone updates goes to all from there, and is the same on all."""
    given = document(tmp_path, what="buffer", rank=2)
    given |= {"sharding": "optimizer"}
    given["job"]["params"]["own_optimizer"] = False
    with raises(problems.OTHER_BITS, got=re.compile(r"rank 2 \(.* first in '1.running_mean'")):
        pool.run(3, train_attempt, given, RUN, AttemptOrigin())
