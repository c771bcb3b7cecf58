"""G1 where the workers' messages are kernels, as on GPUs: a worker is lost, the kernels that wait for it are aborted, and the others go on in their processes.

Shown with a backend that waits, aborts and misleads as NCCL does (`kernels`). The streams of a device are not shown.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from lockstep.communication import communicator_abort
from lockstep.communication.communicator_abort import KernelWaits, errors_left_alone
from lockstep.communication.group import Group
from lockstep.spec.loading import load_spec
from lockstep.training.elastic.recovery import can_recover
from lockstep.training.step.optimizer_step import Stepper
from tests.distributed.survivors import Change, Fall, outlive
from tests.distributed.test_mirrored_shards import SMALL as FULL
from tests.distributed.test_mirrors import SMALL as MIRRORED
from tests.distributed.test_survivors import CENTRED, DIGITS, check, repeated, undisturbed
from tests.distributed.training import train

CPU = torch.device("cpu")
PLACES = ("forward", "send whole", "send buffers", "gather", "update", "note")


def test_a_worker_that_is_lost_is_outlived() -> None:
    outlived = outlive(DIGITS, 3, [Fall(2, 4, "send whole")], kernels=True)
    check(outlived, undisturbed(), [0, 1])
    assert outlived.attempts == 2
    assert len(repeated(outlived)) <= 1


@pytest.mark.scenario
@pytest.mark.thinned(3)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("worker", [0, 2])
def test_a_worker_is_lost_anywhere_in_a_step(worker: int, place: str) -> None:
    """Also in the step of an evaluation, and where it falls silent."""
    for fall in (Fall(worker, 4, place), Fall(worker, 3, place, silent=True)):
        outlived = outlive(DIGITS, 3, [fall], kernels=True)
        check(outlived, undisturbed(), [n for n in range(3) if n != worker])
        assert len(repeated(outlived)) <= 1


@pytest.mark.scenario
def test_two_are_lost_and_the_last_one_goes_on_alone() -> None:
    outlived = outlive(DIGITS, 3, [Fall(1, 2, "gather"), Fall(0, 5, "send whole")], kernels=True)
    check(outlived, undisturbed(), [2])
    assert outlived.attempts == 3


@pytest.mark.scenario
def test_workers_join_and_leave() -> None:
    """One alone lets two in; one of three leaves."""
    changes = [Change(2, joining=2), Change(4, leaving=(1,))]
    outlived = outlive(DIGITS, 1, [], changes, kernels=True)
    assert outlived.rows == undisturbed().rows
    assert {summary["weights_digest"] for summary in outlived.summaries.values()} == {
        undisturbed().weights_digest
    }


@pytest.mark.scenario
@pytest.mark.parametrize(
    ("document", "place"),
    [(MIRRORED, "take weights"), (MIRRORED, "send whole"), (FULL, "pass gradients")],
    ids=["optimizer-update", "optimizer", "full"],
)
def test_shards_are_outlived(document: Any, place: str) -> None:
    whole = train({**document, "sharding": "none", "faults": {}})
    outlived = outlive(document, 3, [Fall(1, 3, place)], kernels=True)
    assert {summary["weights_digest"] for summary in outlived.summaries.values()} == {whole.weights_digest}
    assert outlived.rows == whole.rows
    assert outlived.attempts == 2


@pytest.mark.scenario
def test_without_a_look_at_the_note_what_an_aborted_kernel_gave_is_used() -> None:
    """The negative control: a group that is broken off gives anything, and nothing fails by it at once."""
    try:
        outlived = outlive(CENTRED, 3, [Fall(2, 2, "send whole")], broken="note of kernels", kernels=True)
    except Exception:  # noqa: BLE001 - whatever the numbers led to
        return
    assert outlived.rows != train(CENTRED).rows


class _Channel:
    """A communicator that takes its time to be aborted, and is asked once."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.aborted = seconds, 0

    def abort(self) -> None:
        self.aborted += 1
        time.sleep(self.seconds)


def test_a_communicator_is_aborted_once_by_whoever_comes_first() -> None:
    """And has let go of its kernels when any of them goes on."""
    channel = _Channel(0.2)
    waits = KernelWaits(channel, CPU)
    waits.look()
    began = time.monotonic()
    threads = [threading.Thread(target=waits.end) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began >= 0.2
    assert channel.aborted == 1 and waits.is_ended
    waits.drain()


def test_a_communicator_that_does_not_let_go_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicator_abort, "ABORT_S", 0.05)
    stuck: list[bool] = []
    KernelWaits(_Channel(60.0), CPU, lambda: stuck.append(True)).end()
    assert stuck == [True]


def _fails() -> None:
    raise KeyError("made of what was received")


@pytest.mark.parametrize("use", [lambda waits: waits.for_call(lambda: 1), lambda waits: waits.settle(), lambda waits: waits.for_collective(_Done()), lambda waits: waits.for_call(_fails)])  # fmt: skip
def test_nothing_is_used_of_a_group_that_is_broken_off(use: Callable[[KernelWaits], object]) -> None:
    """Also what fails by it is the loss of a peer."""
    waits = KernelWaits(_Channel(0.0), CPU)
    with suppress(KeyError):  # an error of its own, as long as the group is whole
        use(waits)
    waits.end()
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        use(waits)


def test_only_a_group_that_has_kernels_gives_anything_once_it_is_broken_off() -> None:
    """On a worker that is alone an error is its own, whatever the rendezvous has called for."""
    alone = Group(0, 1, CPU, outlives=True)
    alone.break_off()
    assert alone.waits.is_ended and not alone.gives_anything
    several = Group(0, 2, CPU, outlives=True, waits=KernelWaits(_Channel(0.0), CPU))
    assert not several.gives_anything
    several.break_off()
    assert several.gives_anything


class _Done:
    def wait(self) -> None: ...


def test_an_update_begins_once_all_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device may be told to update while it still waits for the sums."""
    seen: list[str] = []
    update, settle = Stepper._update, Group.settle

    def updated(self: Stepper, *arguments: Any) -> Any:
        seen.append("update")
        return update(self, *arguments)

    def settled(self: Group) -> None:
        seen.append("settle")
        settle(self)

    monkeypatch.setattr(Stepper, "_update", updated)
    monkeypatch.setattr(Group, "settle", settled)
    train(CENTRED)
    at = [i for i, name in enumerate(seen) if name == "update"]
    assert len(at) == 4
    assert all(seen[i - 2 : i] == ["settle", "settle"] for i in at)  # for what is read, and for the sums


def test_torch_leaves_errors_alone_while_a_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    for before in (None, "3"):
        if before is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, before)
        with errors_left_alone():
            assert os.environ[name] == "0"
        assert os.environ.get(name) == before


@pytest.mark.parametrize("outlives", [True, False])
def test_a_group_of_kernels_is_outlived_where_it_was_made_for_that(outlives: bool) -> None:
    """Elsewhere torch's watchdog ends its processes."""
    spec = load_spec({"job": {"use": "jobs.digits.job:Digits"}})
    group = Group(0, 2, torch.device("cuda", 0), outlives=outlives)
    assert can_recover(spec, group, None) == outlives
