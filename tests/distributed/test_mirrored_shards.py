"""Sharded parameters outlive their workers: another worker has the rows of each, and the others cut everything anew among themselves.

Each run is compared with one plain process, as in `test_survivors`, and no step is repeated but the one under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lockstep
from lockstep.checkpoint.runs.run_folder import AttemptOrigin, RunFolder
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.communication.group import Group
from lockstep.job.loading import load_job
from lockstep.record.events.union import tell_nobody
from lockstep.spec.loading import load_spec
from lockstep.training import problems as training_problems
from lockstep.training.driver_requests import NoRequests
from lockstep.training.elastic import problems as elastic_problems
from lockstep.training.elastic.errors import LeftError
from lockstep.training.elastic.membership import Progress
from lockstep.training.elastic.recovery import Seat
from lockstep.training.loop import fit, report_end
from lockstep.training.run import Run
from lockstep.training.step import problems
from lockstep.training.step.sharding import SCALARS
from tests.distributed.kinds import Kind
from tests.distributed.kinds import document as kind_of_job
from tests.distributed.pool import Pool
from tests.distributed.small_jobs import Plain
from tests.distributed.survivors import Change, Fall, outlive
from tests.distributed.test_full_sharding import held as memory_of
from tests.distributed.test_full_sharding import kinds, small
from tests.distributed.test_gradients import Recommender, RecommenderBySgd
from tests.distributed.test_same_bits import document as same_bits
from tests.distributed.test_sharded_estimate import estimate_of
from tests.distributed.test_survivors import (
    CENTRED,
    DIGITS,
    IN_SECOND_PHASE,
    PHASED,
    check,
    check_losses_at,
    check_one_loss,
    check_saves,
    repeated,
)
from tests.distributed.training import Document, Trained, train, train_attempt
from tests.raised import raises

HERE = "tests.distributed.test_mirrored_shards"
MIRRORED: Document = {"sharding": "full", "faults": {"mirror": True}}
ADAMW: Document = {"optimizer": {"name": "adamw", "lr": 0.01}, "ema": 0.5, "clip_norm": 1.0}
SMALL = CENTRED | ADAMW | MIRRORED
PLACES = ("forward", "send whole", "update", "pass gradients", "send to one", "gather", "note")
OF_DIGESTS = 3
"""Which gathering of a step is one of digests after the update: two are before it, and after it."""


@cache
def plain() -> Trained:
    return train(CENTRED | ADAMW)


@pytest.mark.scenario
@pytest.mark.thinned(8)
@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("place", PLACES)
def test_the_others_go_on_with_the_lost_workers_rows(workers: int, place: str) -> None:
    """In a pass, in the exchange, before the norm, before the gradients go to the mirrors, while they go, after the update, and before it counts."""
    lost = workers - 1 if place == "forward" else 0
    count = {"send to one": 5, "gather": OF_DIGESTS}.get(place, 1)
    check_one_loss(SMALL, workers, Fall(lost, 3, place, count), plain())


@pytest.mark.every(3)
@pytest.mark.parametrize("worker", [0, 1, 2])
def test_one_has_begun_the_next_step_where_no_digest_makes_it_wait(worker: int) -> None:
    """It has its update, and the rank that mirrors the lost worker's rows has not: it takes it back."""
    unwatched = SMALL | {"record": {"uri": "off", "digest_every": None}}
    outlived = outlive(unwatched, 3, [Fall(worker, 3, "pass gradients")])
    check(outlived, train(unwatched), [rank for rank in range(3) if rank != worker])
    assert (outlived.attempts, repeated(outlived)) == (2, [3, 4])


@pytest.mark.exact
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("worker", [0, 1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_wherever_a_worker_with_rows_is_lost(precision: str, worker: int, place: str) -> None:
    """Dropout, clipping, an average, and the best weights of an early stop."""
    document = same_bits("digits", 8, precision, ema=0.5)
    check_losses_at(document | MIRRORED, worker, place, 12, train(document))


@pytest.mark.thinned(3)
@pytest.mark.scenario
@pytest.mark.parametrize("name", ["adamw", "sgd", "recomputed"])
def test_parameters_of_every_kind_are_cut_anew(name: str) -> None:
    """Tied ones, scalars, transposed ones, conditional ones, `after_step`, and an evaluation that decides what is best: 3 → 2 → 3."""
    falls = [Fall(1, 3, "update")]
    outlived = outlive(kinds(name) | MIRRORED, 3, falls, [Change(4, joining=1)])
    check(outlived, train(kinds(name)), [0, 2, 3])


@pytest.mark.scenario
@pytest.mark.parametrize("count", [5, 6, 7, 8])
def test_an_evaluation_that_is_left_is_judged_once(count: int) -> None:
    """Some have the best weights of it by then, and return to those of the evaluation before."""
    document = DIGITS | ADAMW | {"early_stop": {"metric": "eval/loss", "mode": "max", "patience": 2}}
    outlived = outlive(document | MIRRORED, 3, [Fall(2, 6, "gather", count)])
    whole = train(document)
    check(outlived, whole, [0, 1])
    for summary in outlived.summaries.values():
        best = summary["best_step"], summary["best_digest"]
        assert (*best, summary["step"]) == (*whole.best, len(whole.rows))


@pytest.mark.scenario
@pytest.mark.parametrize("fall", [Fall(2, 4, "update"), Fall(1, 5, "gather", 5), Fall(0, 5, "note")])
def test_an_evaluation_that_decides_later_outlives_a_worker(fall: Fall) -> None:
    """The weights after step 3 are cut anew until it decides after step 5; a joining worker gets its rows of them."""
    more = {"evaluate": {"delay": 2}, "early_stop": {"metric": "eval/loss", "mode": "min", "patience": 9}}
    document = DIGITS | ADAMW | more
    outlived = outlive(document | MIRRORED, 3, [fall], [Change(4, joining=1)])
    whole = train(document)
    check(outlived, whole, [n for n in range(4) if n != fall.worker])
    for summary in outlived.summaries.values():
        assert (summary["best_step"], summary["best_digest"]) == whole.best


@pytest.mark.thinned(2)
@pytest.mark.scenario
@pytest.mark.parametrize("kind", [RecommenderBySgd, Recommender])
def test_tables_stay_whole_and_are_outlived(kind: type[Kind]) -> None:
    """Beside what is cut, also with several optimizers."""
    document = kind_of_job(kind, rehearsal="off")
    outlived = outlive(document | MIRRORED, 3, [Fall(1, 2, "gather", OF_DIGESTS)], [Change(1, joining=1)])
    check(outlived, train(document), [0, 2, 3])


@pytest.mark.scenario
def test_phases_are_taken_again_as_a_whole() -> None:
    """A worker is lost when the others have updated what the first phase learns."""
    check(outlive(PHASED | MIRRORED, 3, [IN_SECOND_PHASE]), train(PHASED), [0, 2])


@pytest.mark.scenario
def test_workers_are_lost_one_after_another_and_replaced() -> None:
    """4 → 3 → 2 → 4 → 1: each group cuts the state anew."""
    falls = [
        Fall(3, 2, "gather"),
        Fall(0, 3, "send whole"),
        Fall(1, 6, "update"),
        Fall(2, 7, "update"),
        Fall(4, 8, "update"),
    ]
    outlived = outlive(DIGITS | ADAMW | MIRRORED, 4, falls, [Change(4, joining=2)])
    check(outlived, train(DIGITS | ADAMW), [5])


@pytest.mark.scenario
def test_a_run_grows_from_one_worker_and_is_handed_on() -> None:
    """1 → 3 → 2: a worker alone has all whole; then joining workers have rows, and the first leaves."""
    changes = [Change(2, joining=2), Change(3, leaving=(0,))]
    outlived = outlive(SMALL, 1, [], changes)
    check(outlived, plain(), [1, 2])
    assert repeated(outlived) == []


@pytest.mark.thinned(3)
@pytest.mark.scenario
@pytest.mark.parametrize("worker", [0, 1, 2])
@pytest.mark.parametrize("place", ["cut anew", "exchange"])
def test_a_worker_is_lost_while_the_state_is_cut_anew(place: str, worker: int) -> None:
    """Some have their new rows by then, others not: each still has its rows of the group before. Where a worker is lost with its mirror, that is said."""
    falls = [Fall(3, 2, "send whole"), Fall(worker, 2, place, 1 if place == "cut anew" else 3)]
    if worker != 1:  # rank 0 mirrors rank 3, which mirrors rank 2
        with raises(problems.OPTIMIZER_MIRROR_LOST):
            outlive(SMALL, 4, falls)
        return
    check(outlive(SMALL, 4, falls), plain(), [n for n in range(3) if n != worker])


@pytest.mark.scenario
def test_a_worker_that_is_lost_with_its_mirror_ends_the_attempt() -> None:
    """The next one reads a checkpoint, and the error says why."""
    falls = [Fall(0, 3, "send whole"), Fall(1, 3, "send whole")]
    with raises(problems.OPTIMIZER_MIRROR_LOST):
        outlive(SMALL, 4, falls)


@pytest.mark.scenario
@pytest.mark.parametrize("worker", [0, 1])
def test_a_save_under_way_with_rows_is_whole_or_made_again(tmp_path: Path, worker: int) -> None:
    document = SMALL | {"checkpoint": {"storage": str(tmp_path), "every": {"steps": 2}, "keep_last": 9}}
    outlived = outlive(document, 3, [Fall(worker, 2, "write")], run_id="run")
    check(outlived, plain(), [n for n in range(3) if n != worker])
    check_saves(document, str(tmp_path), plain())


@pytest.mark.scenario
@pytest.mark.parametrize("mode", ["full", "optimizer"])
def test_an_evaluation_that_nobody_has_whole_is_not_gone_on_with(mode: str) -> None:
    """The best weights are back at those of the evaluation before, which the one worker that is lost had whole: the others must not go on with theirs."""
    run = DIGITS | {
        "job": {**DIGITS["job"], "use": "tests.distributed.lost_in_evaluation:Digits"},
        "optimizer": {"name": "adamw", "lr": 0.01},
        "length": {"epochs": 2},
        "early_stop": {"metric": "eval/loss", "mode": "min", "patience": 9},
        "sharding": mode,
        "faults": {"mirror": True},
    }
    with raises(elastic_problems.OTHER_STATES):
        outlive(run, 4)


@pytest.mark.scenario
def test_rows_of_another_step_give_other_bits() -> None:
    """The control: rows that are left after an update that others have not made."""
    fall = Fall(1, 3, "gather", OF_DIGESTS)
    check(outlive(SMALL, 3, [fall]), plain(), [0, 2])
    outlived = outlive(SMALL, 3, [fall], broken="rows before")
    assert {one["weights_digest"] for one in outlived.summaries.values()} != {plain().weights_digest}


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize("broken", ["mirrored rows", "exchanged rows"])
def test_rows_that_are_not_those_of_the_lost_worker_are_found(broken: str) -> None:
    """The control: of a mirror that is one update behind, and of one element that changes on its way, the digests do not agree."""
    with raises(elastic_problems.OTHER_STATES, step=2):
        outlive(SMALL, 3, [Fall(1, 3, "forward")], broken=broken)


def rows_and_mirrors(
    document: Document, origin: AttemptOrigin | None = None
) -> tuple[list[Any], list[Any], int]:
    """This worker's rows at the end of a run, or of an attempt, those that it mirrors, and whose these are."""
    ended: list[Run] = []

    def note(run: Run, *arguments: Any, **more: Any) -> Any:
        ended.append(run)
        return report_end(run, *arguments, **more)

    with mock.patch("lockstep.training.loop.report_end", note):
        if origin is None:
            train(document)
        else:
            train_attempt(document, "run", origin)
    state = ended[0].state
    assert state.mirrored_shards is not None and state.mirrored_shards.mirrored is not None
    rows, mirrors = [], []
    for key, value in state.mirrored_shards._values():
        if getattr(value, "mirror", None) is not None and key[-1] not in SCALARS:
            rows.append((key, value.local.numpy().tobytes()))
            mirrors.append((key, value.mirror.local.numpy().tobytes()))
    return rows, mirrors, state.mirrored_shards.mirrored


@pytest.mark.scenario
def test_a_mirror_has_the_rows_of_its_owner(pool: Pool) -> None:
    """Parameters, the optimizer's state, the average and the best weights, of parameters of every kind."""
    check_mirrors(pool.run(3, rows_and_mirrors, kinds("adamw") | MIRRORED))


@pytest.mark.scenario
def test_a_resume_reads_the_rows_that_are_mirrored_too(pool: Pool, tmp_path: Path) -> None:
    """A checkpoint of two workers is gone on from by three, each of which reads its rows and those of another."""
    save = {"checkpoint": {"storage": str(tmp_path), "every": {"steps": 1}, "keep_every": 1}}
    document = kinds("adamw") | MIRRORED | save
    pool.run(2, train_attempt, document, "run", AttemptOrigin())
    folder = RunFolder.open(open_storage(str(tmp_path)), "run")
    taken_up = AttemptOrigin("run", folder.claim().number, 2)
    check_mirrors(pool.run(3, rows_and_mirrors, document, taken_up))


def check_mirrors(by_rank: list[tuple[list[Any], list[Any], int]]) -> None:
    for rows, mirrors, mirrored in by_rank:
        assert mirrors == by_rank[mirrored][0]
        assert mirrors != rows
        assert {key[0] for key, _ in rows} == {"parameter", "optimizer", "average", "best"}


@pytest.mark.scenario
def test_a_worker_holds_its_share_and_that_of_another(pool: Pool) -> None:
    """As estimated: two of four shares of each parameter, and of the optimizer's state as much again from before the step."""
    document = small("tests.distributed.test_full_sharding:Deep")
    whole, estimated = memory_of(document), estimate_of(document | MIRRORED, 4)
    for share in pool.run(4, memory_of, document | MIRRORED):
        for name, copies in (("parameters_bytes", 2), ("optimizer_bytes", 2)):
            # A size, not a value of training: rows are not divided. No attempt outlives this one, so it keeps no start.
            assert share[name] == pytest.approx(copies * whole[name] / 4, rel=0.05)
        assert estimated["parameters_bytes"] == pytest.approx(share["parameters_bytes"], rel=0.05)
        assert estimated["optimizer_bytes"] == pytest.approx(2 * share["optimizer_bytes"], rel=0.05)


class Meeting(NoRequests):
    """Where the workers of a run meet after each step: a worker goes on in one group after another, and leaves when it has no more. The job knows when it is alone."""

    def __init__(self, job: Any, groups: Sequence[Group]) -> None:
        self._job, self._groups = job, iter(groups)

    def regroup(self) -> bool:
        return True

    def next_seat(self, seat: Seat, progress: Progress | None) -> Seat:
        group = next(self._groups, None)
        if group is None:
            raise LeftError("it leaves")
        self._job.alone = group.size == 1
        return seat._replace(group=group)


def regrouping(document: Document) -> dict[str, Any] | None:
    """The summary of a run whose first two workers go on together, each alone, and together again. A third one leaves."""
    spec = load_spec(document)
    job, group = load_job(spec.job.use, spec.job.params), Group.join(torch.device("cpu"))
    pair, again = (Group(group.rank, 2, group.device, dist.new_group([0, 1])) for _ in range(2))
    groups = [pair, Group(0, 1, group.device), again] if group.rank < 2 else []
    meeting = Meeting(job, groups)
    recovery: Any = SimpleNamespace(ready=lambda seat: None, regroup=meeting.next_seat)
    return fit(spec, job, group, tell_nobody, meeting, None, recovery)


def test_rows_are_cut_for_fewer_workers_for_one_and_for_more(pool: Pool) -> None:
    *stayed, left = pool.run(3, regrouping, SMALL | {"rehearsal": "off"})
    assert left is None
    for summary in stayed:
        assert (summary["weights_digest"], summary["workers"]) == (plain().weights_digest, 2)


class HoldingAlone(Plain):
    """Keeps a parameter outside of its module once its worker is alone."""

    alone = False

    def loss(self, model: Any, batch: Any) -> lockstep.Loss:
        if self.alone:
            self.kept = model[0].weight
        return super().loss(model, batch)


def test_a_parameter_that_a_job_holds_is_found_once_it_is_cut(pool: Pool) -> None:
    document = SMALL | {"job": {"use": f"{HERE}:HoldingAlone"}, "rehearsal": "off"}
    with raises(training_problems.HELD_OUTSIDE, name="0.weight"):
        pool.run(2, regrouping, document)


_HELD: list[Tensor] = []


class Holding(Plain):
    """Keeps a parameter outside of its module."""

    def model(self) -> nn.Module:
        model = super().model()
        _HELD[:] = [model[0].weight]  # type: ignore[index]
        return model


@pytest.mark.scenario
def test_a_parameter_that_a_job_holds_is_found_where_a_run_grows() -> None:
    """On one worker it is the model's; cut, it would be one that nobody updates."""
    document = SMALL | {"job": {"use": f"{HERE}:Holding"}}
    with raises(training_problems.HELD_OUTSIDE, name="0.weight"):
        outlive(document, 1, [], [Change(2, joining=1)])


def test_an_optimizer_that_evaluates_the_loss_again_is_not_mirrored() -> None:
    document = {
        "job": {"use": "tests.distributed.elementwise_jobs:LooksAhead"},
        "batch": {"global": 8, "micro": 2},
        "length": {"steps": 1},
    }
    with raises(problems.MIRROR):
        train(document | MIRRORED)
