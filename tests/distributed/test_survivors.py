"""G1 and G4 where workers are lost, join or leave: the others go on in their processes, and nothing shows but how long it took.

Workers are killed by SIGKILL, at the places that `survivors` names. What they had not told is lost with them. Each run is compared
with one plain process: weights, ledger with its digests, evaluations.
"""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lockstep.checkpoint.reader import checkpoints, verify
from lockstep.checkpoint.runs.run_folder import AttemptOrigin, RunFolder
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.communication.group import Group
from lockstep.errors import ClusterError, DriftError, JobError, LockstepError
from lockstep.failure_kinds import kind_of
from tests.distributed.pool import Pool
from tests.distributed.survivors import Change, Fall, Outlived, outlive
from tests.distributed.training import Document, Trained, train, train_attempt

DIGITS: Document = {
    "job": {
        "use": "tests.distributed.real_jobs:FewDigits",
        "params": {"width": 2, "train_samples": 40, "eval_samples": 9},
    },
    "batch": {"global": 12, "micro": 2},
    "length": {"epochs": 3},
}
CENTRED: Document = {
    "job": {"use": "tests.distributed.small_jobs:Centred", "params": {"writes": "data"}},
    "batch": {"global": 12, "micro": 2},
    "length": {"steps": 4},
}
LARGE: Document = {
    "job": {
        "use": "tests.distributed.small_jobs:Plain",
        "params": {"norm": "none", "width": 500_000},
    },
    "batch": {"global": 16, "micro": 2},
    "length": {"steps": 4},
}
"""Its buckets are larger than what the system keeps of a connection."""
PLACES = ("forward", "send whole", "send buffers", "send to one", "gather", "update", "note")
LAST_MESSAGE = Fall(0, 4, "send to one", 4)
"""Before the last message of a step: two ranks are sent a bucket each, then buffers."""


@cache
def undisturbed(precision: str = "fp32") -> Trained:
    return train(DIGITS | {"precision": precision})


def check(outlived: Outlived, whole: Trained, left: list[int]) -> None:
    assert sorted(outlived.summaries) == left
    for summary in outlived.summaries.values():
        assert summary["weights_digest"] == whole.weights_digest
        assert summary["identity"] == whole.identity
        assert summary["workers"] == len(left)
    assert outlived.rows == whole.rows
    assert outlived.evaluations == whole.evaluations


@pytest.mark.scenario
@pytest.mark.parametrize("count", [pytest.param(1, id="all behind"), 5, 6])
def test_a_second_worker_is_lost_when_it_has_taken_on_the_state_of_a_step_before(count: int) -> None:
    """Some had done the step; the rows that they noted of it are taken back with it."""
    falls = [Fall(0, 4, "send to one", count), Fall(3, 4, "compare states")]
    outlived = outlive(DIGITS, 4, falls)
    check(outlived, train(DIGITS), [1, 2])
    assert outlived.attempts == 3


def check_saves(document: Document, storage: str, whole: Trained) -> None:
    """Of the saves of steps 2 and 4 the first may have been lost with a worker; each that is there is whole, and leads to the same bits."""
    folder = RunFolder.open(open_storage(storage), "run")
    saves = {checkpoint.step: checkpoint for checkpoint in checkpoints(folder)}
    assert {4} <= saves.keys() <= {2, 4}
    for checkpoint in saves.values():
        verify(checkpoint)
    taken_up = train_attempt(document, "run", AttemptOrigin("run", folder.claim().number, min(saves)))
    assert (taken_up.weights_digest, taken_up.rows) == (whole.weights_digest, whole.rows)


def repeated(outlived: Outlived) -> list[int]:
    """The steps that a worker began again, each as often as any worker did."""
    most: dict[int, int] = {}
    for begun in outlived.begun.values():
        for step in begun:
            most[step] = max(most.get(step, 0), begun.count(step) - 1)
    return [step for step, times in sorted(most.items()) for _ in range(times)]


def check_one_loss(document: Document, workers: int, fall: Fall, whole: Trained) -> None:
    """The others go on in memory, and no step is taken again but the one under way."""
    outlived = outlive(document, workers, [fall])
    check(outlived, whole, [n for n in range(workers) if n != fall.worker])
    assert outlived.attempts == 2
    assert len(repeated(outlived)) <= 1


def check_losses_at(document: Document, worker: int, place: str, most: int, whole: Trained) -> None:
    """One of three workers is lost in step 4 at the first time that it is at a place, at the second, and so on."""
    for count in range(1, most + 1):
        outlived = outlive(document, 3, [Fall(worker, 4, place, count)])
        if worker in outlived.summaries:  # it is not there so often
            return
        check(outlived, whole, [n for n in range(3) if n != worker])
        assert len(repeated(outlived)) <= 1


@pytest.mark.scenario
def test_three_of_four_are_lost_one_after_another() -> None:
    """In a backward, after an update that is not told yet (rank 0), and in an evaluation, whose epoch ends there."""
    falls = [Fall(3, 2, "send whole"), Fall(0, 5, "note"), Fall(1, 6, "gather", 3)]
    outlived = outlive(DIGITS, 4, falls)
    check(outlived, undisturbed(), [2])
    assert outlived.attempts == 4
    assert repeated(outlived) == [2]


@pytest.mark.scenario
def test_a_rank_that_is_one_step_ahead_takes_the_state_of_one_that_is_not() -> None:
    """The one that sends the buffers, the last message of a step, is lost when the first of the others has them and the second has not."""
    outlived = outlive(DIGITS, 3, [LAST_MESSAGE])
    check(outlived, undisturbed(), [1, 2])
    assert repeated(outlived) == [4]


@pytest.mark.scenario
def test_an_evaluation_that_is_left_is_judged_once() -> None:
    """Its last message is the comparison of the ranks' bits; early stopping counts evaluations after it."""
    stop = {"early_stop": {"metric": "eval/loss", "mode": "max", "patience": 2}}
    outlived = outlive(DIGITS | stop, 3, [Fall(2, 6, "gather", 4)])
    whole = train(DIGITS | stop)
    check(outlived, whole, [0, 1])
    for summary in outlived.summaries.values():
        assert (summary["best_step"], summary["best_digest"], summary["step"]) == (
            *whole.best,
            len(whole.rows),
        )


@pytest.mark.scenario
def test_loader_processes_do_not_keep_the_connections_of_a_worker_that_is_lost() -> None:
    """They live on for some seconds; the others are not told of the rendezvous, and find out by their connections alone."""
    document = CENTRED | {"data": {"loader_processes": 1}}
    outlived = outlive(document, 3, [Fall(1, 3, "send whole")], broken="listening")
    check(outlived, train(CENTRED), [0, 2])


@pytest.mark.scenario
def test_a_worker_that_falls_silent_is_outlived_when_that_is_known() -> None:
    """No connection ends: those that wait for it are told of a rendezvous, and break their group off by themselves."""
    outlived = outlive(CENTRED, 3, [Fall(1, 3, "send whole", silent=True)])
    check(outlived, train(CENTRED), [0, 2])
    assert repeated(outlived) == [3]


@pytest.mark.thinned(2)
@pytest.mark.scenario
@pytest.mark.parametrize("silent", [True, False])
def test_a_worker_that_is_lost_while_much_is_on_its_way_to_it(silent: bool) -> None:
    """gloo tells nobody of what was half sent when a connection ended: who waits for that, waits in vain."""
    outlived = outlive(LARGE, 4, [Fall(1, 3, "take on", 2, silent=silent)])
    check(outlived, train(LARGE), [0, 2, 3])
    assert repeated(outlived) == [3]


PHASED: Document = {
    "job": {"use": "tests.distributed.phase_kinds:Gan"},
    "batch": {"global": 12, "micro": 2},
    "length": {"steps": 4},
    "schedule": {"name": "cosine"},
}
IN_SECOND_PHASE = Fall(1, 3, "forward", 3)
"""All others have updated the first phase's parameters, and their optimizer's state."""


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("fall", "precision"),
    [
        (IN_SECOND_PHASE, "fp32"),
        (Fall(0, 2, "forward", 3), "fp16"),  # two micro-batches a phase
        *[
            pytest.param(Fall(worker, step, place, count), precision, marks=pytest.mark.exact)
            for worker in (0, 2)
            for step in (1, 3)
            for place in ("forward", "send whole", "send buffers", "update", "note")
            for count in ((1,) if place == "note" else (1, 2, 3))
            for precision in ("fp32", "fp16")
            if not (place == "update" and count == 3)
        ],
    ],
)
def test_a_step_of_several_phases_is_taken_again_as_a_whole(fall: Fall, precision: str) -> None:
    document = PHASED | {"precision": precision}
    outlived = outlive(document, 3, [fall])
    passed = (
        fall.worker not in outlived.summaries
    )  # it may have no such place: the other checks hold all the same
    left = [n for n in range(3) if n != fall.worker] if passed else [0, 1, 2]
    check(outlived, train(document), left)


@pytest.mark.scenario
@pytest.mark.parametrize("kind", ["Lbfgs", pytest.param("PublishedSam", marks=pytest.mark.exact)])
def test_an_update_that_evaluates_the_loss_again_is_taken_again_as_a_whole(kind: str) -> None:
    """One of its evaluations waits for a worker that is lost: the parameters are on their way by then."""
    document = PHASED | {"job": {"use": f"tests.distributed.closure_kinds:{kind}"}}
    outlived = outlive(document, 3, [Fall(1, 2, "forward", 4)])
    check(outlived, train(document), [0, 2])
    assert repeated(outlived) == [2]


@pytest.mark.scenario
def test_a_worker_joins_and_leaves_a_run_with_phases() -> None:
    changes = [Change(2, joining=1), Change(3, leaving=(0,))]
    check(outlive(PHASED, 2, [Fall(1, 1, "update", 2)], changes), train(PHASED), [2])


@pytest.mark.scenario
def test_without_the_start_of_the_step_phases_are_updated_twice() -> None:
    outlived = outlive(PHASED, 3, [IN_SECOND_PHASE], broken="start of the step")
    assert repeated(outlived) == [3]
    assert outlived.summaries[0]["weights_digest"] != train(PHASED).weights_digest


@pytest.mark.scenario
def test_a_lost_worker_is_replaced_by_one_that_is_handed_the_state() -> None:
    """3 → 2 → 3. The joining worker reads no checkpoint: there is none. Of what is planned no step is taken again."""
    outlived = outlive(CENTRED, 3, [Fall(0, 2, "send whole")], [Change(3, joining=1)])
    check(outlived, train(CENTRED), [1, 2, 3])
    assert outlived.attempts == 3
    assert repeated(outlived) == [2]
    assert outlived.begun[3] == [4]


@pytest.mark.scenario
def test_a_run_grows_from_one_worker_and_shrinks_without_a_step_taken_again() -> None:
    """1 → 3 → 2 → 2. The first worker leaves, so that joining workers alone go on: rank 0 then tells of rows that it was handed."""
    changes = [Change(2, joining=2), Change(4, leaving=(0,)), Change(5, joining=1, leaving=(1,))]
    outlived = outlive(DIGITS, 1, [], changes)
    check(outlived, undisturbed(), [2, 3])
    assert outlived.attempts == 4
    assert repeated(outlived) == []
    assert (outlived.begun[0], outlived.begun[1]) == ([1, 2, 3, 4], [3, 4, 5])


@pytest.mark.scenario
@pytest.mark.parametrize("broken", ["byte", pytest.param("section", marks=pytest.mark.exact)])
def test_what_is_handed_over_is_compared_and_all_of_it_is_needed(broken: str) -> None:
    """A byte that changes on the way is found by all. Without the optimizer's state, and the comparison, the joining worker's weights part."""
    document = CENTRED | {"optimizer": {"name": "adamw", "lr": 0.01}}
    change = [Change(2, joining=1)]
    check(outlive(document, 2, [], change), train(document), [0, 1, 2])
    error, told = {
        "byte": (ClusterError, "hold different states after step 2"),
        "section": (DriftError, "ranks .2. hold other weights than rank 0"),
    }[broken]
    with pytest.raises(error, match=told):
        outlive(document, 2, [], change, broken=broken)


@pytest.mark.exact
@pytest.mark.parametrize("fall", [Fall(2, 0, "agree"), Fall(0, 3, "agree"), Fall(1, 3, "gather", 3)])
def test_a_worker_that_is_lost_while_another_joins(fall: Fall) -> None:
    """The joining worker itself, the one that hands over, and one more in the midst of it: the others meet again."""
    outlived = outlive(CENTRED, 2, [fall], [Change(3, joining=1)])
    check(outlived, train(CENTRED), [n for n in range(3) if n != fall.worker])


@pytest.mark.exact
@pytest.mark.parametrize("step", [2, 6])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("extra", ["", "ema", "early_stop", "schedule", "loaders"])
def test_whatever_the_run_has_is_handed_over(extra: str, precision: str, step: int, tmp_path: Path) -> None:
    """Average, best weights, a schedule, the loss scale; between evaluations and behind one, with a checkpoint after that."""
    extras: dict[str, Document] = {
        "": {},
        "ema": {"ema": 0.9},
        "early_stop": {"early_stop": {"metric": "eval/loss", "mode": "min", "patience": 3}},
        "schedule": {"schedule": {"name": "cosine", "warmup_steps": 2}},
        "loaders": {"data": {"loader_processes": 1}},
    }
    document = DIGITS | {"precision": precision} | extras[extra]
    saved = document | {"checkpoint": {"storage": str(tmp_path), "every": {"steps": 3}, "keep_last": 9}}
    whole = train(document)
    outlived = outlive(saved, 2, [], [Change(step, joining=2), Change(step + 1, leaving=(0,))], run_id="run")
    check(outlived, whole, [1, 2, 3])
    folder = RunFolder.open(open_storage(str(tmp_path)), "run")
    for checkpoint in checkpoints(folder):
        verify(checkpoint)
    newest = max(one.step for one in checkpoints(folder) if one.step < len(whole.rows))
    taken_up = train_attempt(saved, "run", AttemptOrigin("run", folder.claim().number, newest))
    assert (taken_up.weights_digest, taken_up.rows) == (whole.weights_digest, whole.rows)


def wait_for_each_other() -> str:
    """Rank 1 waits for rank 0, which breaks off while it waits for rank 2, which waits for nobody."""
    group = Group.join(torch.device("cpu"))
    if group.rank == 2:
        return str(dist.recv(torch.empty(1), src=1))  # of the default group, which is not broken off
    if group.rank == 0:
        threading.Timer(0.2, group.break_off).start()
    try:
        dist.recv(torch.empty(1), src=2 if group.rank == 0 else 0, group=group.channel)
    except RuntimeError as error:
        dist.send(torch.empty(1), dst=2) if group.rank == 1 else None
        return kind_of(error).kind
    return "heard"


def test_a_group_that_is_broken_off_lets_go_of_all_who_wait(pool: Pool) -> None:
    """Of the rank itself, in whichever thread, and of those that wait for it; another group's connections stay."""
    assert pool.run(3, wait_for_each_other) == ["peer", "peer", "1"]


@pytest.mark.scenario
@pytest.mark.parametrize(
    ("broken", "document", "fall"),
    [
        ("buffers", CENTRED, Fall(1, 2, "send whole")),
        pytest.param("history", CENTRED, Fall(0, 2, "note"), marks=pytest.mark.exact),
        pytest.param(
            "agreement", DIGITS, LAST_MESSAGE, marks=pytest.mark.exact
        ),
    ],
)  # fmt: skip
def test_without_one_mechanism_the_run_differs(broken: str, document: Document, fall: Fall) -> None:
    """Each of them is needed: buffers put back, rows told again, the state of the least."""
    whole = train(document)
    check(outlive(document, 3, [fall]), whole, [n for n in range(3) if n != fall.worker])
    try:
        outlived = outlive(document, 3, [fall], broken=broken)
    except (AssertionError, LockstepError):
        return
    assert (outlived.rows, {one["weights_digest"] for one in outlived.summaries.values()}) != (
        whole.rows,
        {whole.weights_digest},
    )


def test_an_error_of_the_jobs_own_is_not_outlived() -> None:
    """One rank meets a sample that breaks: the others see it leave, and the attempt ends with what the job did wrong."""
    document = CENTRED | {"job": {"use": "tests.distributed.survivors:Breaking", "params": {}}}
    with pytest.raises(LockstepError) as told:
        outlive(document, 2)
    assert isinstance(told.value, JobError)


@pytest.mark.scenario
@pytest.mark.parametrize(
    ("worker", "place"),
    [
        (1, "receipt"),
        *(
            pytest.param(*case, marks=pytest.mark.exact)
            for case in ((0, "commit"), (0, "write"), (1, "write"))
        ),
    ],
)
def test_a_save_under_way_is_whole_or_made_again(tmp_path: Path, worker: int, place: str) -> None:
    """G5: the lost rank's span is never taken for written, and each checkpoint that there is leads to the same bits."""
    document = CENTRED | {"checkpoint": {"storage": str(tmp_path), "every": {"steps": 2}, "keep_last": 9}}
    whole = train(document)
    outlived = outlive(document, 3, [Fall(worker, 2, place)], run_id="run")
    check(outlived, whole, [n for n in range(3) if n != worker])
    assert len(repeated(outlived)) <= 1
    check_saves(document, str(tmp_path), whole)


@pytest.mark.scenario
def test_a_rank_that_waits_to_save_again_hears_that_another_is_lost(tmp_path: Path) -> None:
    """The others wait for rank 0, and it for the lost rank's part of the save before: up to the limit of five minutes."""
    document = CENTRED | {"checkpoint": {"storage": str(tmp_path), "every": {"steps": 2}, "keep_last": 9}}
    outlived = outlive(document, 3, [Fall(1, 2, "receipt", after=4)], run_id="run")
    check(outlived, train(document), [0, 2])


@pytest.mark.exact
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("step", [4, 6])
@pytest.mark.parametrize(("precision", "worker"), [("fp32", 0), ("fp32", 1), ("fp32", 2), ("fp16", 0)])
def test_wherever_a_worker_is_lost(precision: str, worker: int, step: int, place: str) -> None:
    """One of three, at each call in which the ranks wait for each other, and before and after the update; step 6 is evaluated."""
    document = DIGITS | {"precision": precision, "workers": {"bucket_mb": 0.001}}
    for count in range(1, 9):
        outlived = outlive(document, 3, [Fall(worker, step, place, count)])
        if worker in outlived.summaries:  # it is not passed so often
            return
        check(outlived, undisturbed(precision), [n for n in range(3) if n != worker])
        assert len(repeated(outlived)) <= 1
