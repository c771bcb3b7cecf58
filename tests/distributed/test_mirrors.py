"""A sharded optimizer's state outlives its worker: another one has it too, and the others share it out anew.

Each run is compared with one plain process, as in `test_survivors`, and no step is repeated but the one under way.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from lockstep.errors import LockstepError
from lockstep.training.step import problems
from lockstep.training.step.mirror_layout import mirrors
from tests.distributed.gradient_kinds import OnlyTables, RareTable, Recommender, RecommenderBySgd
from tests.distributed.kinds import Kind, document
from tests.distributed.survivors import Change, Fall, outlive
from tests.distributed.test_survivors import (
    CENTRED,
    DIGITS,
    check,
    check_losses_at,
    check_one_loss,
    check_saves,
    repeated,
)
from tests.distributed.training import Document, Trained, train
from tests.raised import raises

MIRRORED: Document = {"sharding": "optimizer", "faults": {"mirror": True}}
ADAMW: Document = {"optimizer": {"name": "adamw", "lr": 0.01}}
SMALL = CENTRED | ADAMW | MIRRORED
PLACES = ("forward", "send whole", "update", "gather weights", "take weights", "note")


@cache
def plain() -> Trained:
    return train(CENTRED | ADAMW)


@pytest.mark.every(9)
@pytest.mark.thinned(4)
@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("place", PLACES)
def test_the_others_go_on_with_the_lost_workers_part(workers: int, place: str) -> None:
    """In forward and backward, in the exchange, before the update, at both ends of the gathering of the weights, and after it."""
    lost = workers - 1 if place == "forward" else 0
    check_one_loss(SMALL, workers, Fall(lost, 3, place), plain())


@pytest.mark.exact
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("worker", [0, 1, 2])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_wherever_a_worker_with_a_part_is_lost(precision: str, worker: int, place: str) -> None:
    document = DIGITS | {"precision": precision, "workers": {"bucket_mb": 0.001}}
    check_losses_at(document | MIRRORED, worker, place, 8, train(document))


@pytest.mark.scenario
def test_workers_are_lost_one_after_another_and_replaced() -> None:
    """4 → 3 → 2 → 4 → 1: each group shares the state out anew."""
    falls = [
        Fall(3, 2, "take weights"),
        Fall(0, 3, "send whole"),
        Fall(1, 6, "update"),
        Fall(2, 7, "update"),
        Fall(4, 8, "update"),
    ]
    outlived = outlive(DIGITS | MIRRORED, 4, falls, [Change(4, joining=2)])
    check(outlived, train(DIGITS), [5])


@pytest.mark.scenario
def test_a_run_grows_from_one_worker_and_is_handed_on() -> None:
    """1 → 3 → 2: a worker alone has all parts; then joining workers have them, and the first leaves."""
    changes = [Change(2, joining=2), Change(4, leaving=(0,))]
    outlived = outlive(DIGITS | MIRRORED, 1, [], changes)
    check(outlived, train(DIGITS), [1, 2])
    assert repeated(outlived) == []


@pytest.mark.thinned(2)
@pytest.mark.every(3)
@pytest.mark.parametrize("worker", [0, 1, 2])
def test_a_worker_is_lost_while_the_state_is_shared_out(worker: int) -> None:
    """Some have their new parts by then, others not: each still has its parts of the group before."""
    falls = [Fall(3, 2, "send whole"), Fall(worker, 2, "share out")]
    lost_both = worker == 0  # rank 0 mirrors rank 3
    if lost_both:
        with pytest.raises(LockstepError):
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
def test_a_worker_is_lost_after_an_update_that_its_mirror_has_made_otherwise() -> None:
    """Nobody knows whose part is right, so none is gone on with; without the fault the others go on."""
    run = SMALL | {"record": {"uri": "off", "digest_every": None}}
    outlived = outlive(run, 3, [Fall(2, 4, "forward")])
    assert {one["weights_digest"] for one in outlived.summaries.values()} == {plain().weights_digest}
    with raises(problems.MIRROR_DIFFERS):
        outlive(run, 3, [Fall(2, 4, "forward")], broken="update")


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize("worker", [0, 1])
def test_a_save_under_way_with_parts_is_whole_or_made_again(tmp_path: Path, worker: int) -> None:
    document = SMALL | {"checkpoint": {"storage": str(tmp_path), "every": {"steps": 2}, "keep_last": 9}}
    outlived = outlive(document, 3, [Fall(worker, 2, "write")], run_id="run")
    check(outlived, plain(), [n for n in range(3) if n != worker])
    check_saves(document, str(tmp_path), plain())


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("broken", "fall"), [("mirror", Fall(1, 3, "forward")), ("spans before", Fall(1, 3, "take weights"))]
)
def test_a_mirror_of_another_step_gives_other_bits(broken: str, fall: Fall) -> None:
    """The control: a mirror that is one update behind, and spans that are left in the middle of an update."""
    check(outlive(SMALL, 3, [fall]), plain(), [0, 2])
    outlived = outlive(SMALL, 3, [fall], broken=broken)
    assert {one["weights_digest"] for one in outlived.summaries.values()} != {plain().weights_digest}


# --- tables: whole on every worker --------------------------------------------------------------------------------


def of_tables(kind: type[Kind]) -> Document:
    """Two steps an epoch, three or more micro-batches each."""
    return document(kind, rehearsal="off", batch={"global": 16, "micro": 4}, length={"steps": 5})


@cache
def plain_tables(kind: type[Kind]) -> Trained:
    return train(of_tables(kind))


@pytest.mark.scenario
@pytest.mark.thinned(7)
@pytest.mark.parametrize(
    ("kind", "lost", "place"),
    [
        *((Recommender, 0, place) for place in PLACES),
        *((RecommenderBySgd, 2, place) for place in ("update", "take weights")),
        *((OnlyTables, 1, place) for place in ("forward", "send whole", "update", "note")),
        *((RareTable, 0, place) for place in ("update", "gather weights")),
    ],
)
def test_tables_are_outlived_without_a_mirror(kind: type[Kind], lost: int, place: str) -> None:
    """Every worker has them, and what an optimizer keeps of them; an update that is left halfway through is taken back in them too."""
    outlived = outlive(of_tables(kind) | MIRRORED, 3, [Fall(lost, 3, place)])
    check(outlived, plain_tables(kind), [n for n in range(3) if n != lost])
    assert outlived.attempts == 2
    assert len(repeated(outlived)) <= 1


GROWING = [Change(2, joining=2), Change(4, leaving=(0,))]


@pytest.mark.scenario
def test_workers_that_join_receive_the_state_of_tables() -> None:
    """1 → 3 → 2, the one that had it all along leaves."""
    outlived = outlive(of_tables(Recommender) | MIRRORED, 1, [], GROWING)
    check(outlived, plain_tables(Recommender), [1, 2])
    assert repeated(outlived) == []


@pytest.mark.scenario
def test_workers_with_tables_are_lost_and_replaced() -> None:
    falls = [Fall(0, 2, "take weights"), Fall(1, 3, "update"), Fall(2, 5, "gather weights")]
    outlived = outlive(of_tables(Recommender) | MIRRORED, 3, falls, [Change(3, joining=1)])
    check(outlived, plain_tables(Recommender), [3])


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("workers", "falls", "changes", "broken"),
    [(1, [], GROWING, "state on all"), (3, [Fall(1, 3, "take weights")], [], "spans before")],
)
def test_tables_of_another_step_give_other_bits(
    workers: int, falls: list[Fall], changes: list[Change], broken: str
) -> None:
    """The control: no state of tables in the new group, and tables that are left halfway through an update."""
    outlived = outlive(of_tables(Recommender) | MIRRORED, workers, falls, changes, broken=broken)
    digests = {summary["weights_digest"] for summary in outlived.summaries.values()}
    assert digests != {plain_tables(Recommender).weights_digest}


def test_mirrors_are_on_other_nodes_where_there_are_any() -> None:
    """One mirror each, and none on a rank's own node if that can be."""
    assert mirrors(["a"]) == (0,)
    assert mirrors(["a"] * 3) == (1, 2, 0)
    assert mirrors(["a", "a", "b", "b"]) == (2, 3, 0, 1)
    assert mirrors(["a", "b", "a", "b"]) == (1, 2, 3, 0)
    for nodes in (["a", "a", "a", "b"], ["a", "b", "b", "c", "c"]):
        assert sorted(mirrors(nodes)) == list(range(len(nodes)))
