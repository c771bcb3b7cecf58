"""A run that goes on in memory in another group, because a worker was lost or because some join and others leave.

After each update all ranks hold the same state, and the plan runs on any number of them. So when one is lost, each of
the others leaves its step, breaks the group off, and meets the rest (`Recovery.regroup`). They go on from the least that any
of them has done: a rank that is ahead, by one step or one evaluation, takes the state of one that is not. Then all
compare what they hold, and take new ranges from the plan. Nothing is restarted or read from a disk.

Where workers join or leave, the whole group meets after a step that it has agreed on (`RegroupError`), and breaks nothing off.
A joining worker has built the run as at its start (`let_in`). It holds no state of the run, and takes it like a rank that is ahead.

Invariants:

- Nothing of the step under way is kept. An update waits for no other rank, so it is either finished or not begun. Where a step
  has several phases, or its update evaluates the loss again, ranks do wait between its changes: its start is kept until it is done, and taken back to.
- A state that went on or was handed over is compared, bit for bit, before the next step.
- Each rendezvous begins a new attempt: the previous one can publish no checkpoint once this one has saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.checkpoint.tree import pack
from lockstep.checkpoint.tree_decoder import unpack
from lockstep.communication.group import Group
from lockstep.errors import DriftError
from lockstep.failure_kinds import kind_of
from lockstep.record.events.union import Started, Tell
from lockstep.record.ledger.history import History
from lockstep.spec.fields import Spec
from lockstep.tensor_bytes import row_of
from lockstep.training.driver_requests import Requests
from lockstep.training.elastic import problems
from lockstep.training.elastic.errors import LeftError, RegroupError
from lockstep.training.elastic.membership import Progress
from lockstep.training.identity_inputs import completed, differing
from lockstep.training.run import Run
from lockstep.training.start import check_same_state
from lockstep.training.state import TrainState
from lockstep.training.step.fsdp_modules import can_be_undone


class Seat(NamedTuple):
    """A worker's place in a run: its group, the channels for events and requests, and which attempt this is."""

    group: Group
    tell: Tell
    requests: Requests
    origin: AttemptOrigin | None


class Recovery(Protocol):
    """Where the workers of a run meet to form another group. It lives outside all of them."""

    def ready(self, seat: Seat) -> None:
        """Report that this worker trains, and will come to `regroup` if another is lost or it is asked to."""

    def enter(self, seat: Seat) -> Seat | None:
        """Report that this joining worker is ready, and wait to be let in. Returns the seat in the new group; None where nobody lets it in.

        Raises torch's RuntimeError where another worker is lost meanwhile.
        """

    def regroup(self, seat: Seat, progress: Progress | None) -> Seat | None:
        """Wait for the others of the group. Returns the seat in the new one; None where the attempt must end. LeftError where this worker leaves.

        Where a worker is lost, the group of `seat` is already broken off. A joining worker that has no state yet passes no `progress`.
        Raises torch's RuntimeError where another worker is lost meanwhile.
        """


def progress_of(state: TrainState) -> Progress:
    """How far a worker with this state is."""
    return Progress(state.counters.step, state.counters.evaluated, state.evaluation_begun)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error says that another worker, or the connection to it, is lost. An error of this rank's own does not."""
    return kind_of(error).kind == "peer"


def can_recover(spec: Spec, group: Group, origin: AttemptOrigin | None) -> bool:
    """Whether this group survives the loss of a member, and can let others in.

    It cannot if the others lack a part of the state (sharding, unless it is mirrored), if fewer workers would be another run
    (`reduction: native`), if the backend cannot abort, in a replay of another run's steps, or if this torch's FSDP2 cannot be taken off a model.
    """
    whole = spec.sharding.mode == "none" or spec.faults.mirror
    if spec.sharding.mode == "full":
        whole &= can_be_undone()
    replays = origin is not None and origin.replay is not None
    return group.can_abort and spec.reduction == "exact" and whole and not replays


def regrouped(run: Run, seat: Seat, recovery: Recovery, cause: Exception) -> tuple[Run, Seat]:
    """The run and the seat in the next group: without the worker whose loss `cause` reports, or after a `RegroupError`.

    Raises `cause` where the attempt must end, LeftError where this worker leaves. It also survives another loss meanwhile.
    """
    previous_seat = seat
    planned = isinstance(cause, RegroupError)
    # The rendezvous ends this loop: if nobody else is lost, it refuses the same step a second time.
    while True:
        if not planned:  # abort before freeing the memory that its messages are read into
            seat.group.abort()
            seat = seat._replace(group=replace(seat.group, channel=None))
        run.step.abandon(run.history.reached)
        counters = run.state.counters
        # The row of the newest update is lost, so only a checkpoint can go on.
        if run.history.reached < counters.step:
            break
        if run.history.reached > counters.step:  # another worker has handed over the state of a step before
            run.history.take_back(counters.step, counters.evaluated)
        try:
            met = recovery.regroup(seat, progress_of(run.state))
            if met is None:
                break
            if planned:  # all have come, so nobody waits in the old group any more
                seat.group.close()
            seat, planned = met, False
            return taken_on(run, seat, previous_seat), seat
        except Exception as error:
            if not is_lost_peer(error):
                raise
            planned = False
    raise cause


def let_in(run: Run, seat: Seat, recovery: Recovery) -> tuple[Run, Seat] | None:
    """A joining worker's run, with the state that another worker hands over, and its seat; None where nobody lets it in.

    It survives a loss meanwhile: the joining worker then comes to the rendezvous without a state, as before.
    """
    alone, come = seat, recovery.enter
    while True:
        try:
            met = come(seat)
            if met is None:
                return None
            seat = met
            return taken_on(run, seat, alone, holds=False), seat
        except LeftError:
            return None
        except Exception as error:
            if not is_lost_peer(error):
                raise
        seat.group.abort()
        seat = seat._replace(group=replace(seat.group, channel=None))
        come = partial(recovery.regroup, progress=None)


def taken_on(run: Run, seat: Seat, before: Seat, *, holds: bool = True) -> Run:
    """The run in its new group, from the least that any member has done. A joining worker `holds` no state of it."""
    group = seat.group
    source, have_joined = agree_on_state(group, run.state, partial(return_to, run), holds=holds)
    if have_joined:
        run = with_past(run, group, source, holds=holds)
    counters = run.state.counters
    run.history.take_back(counters.step, counters.evaluated)
    run = run.in_group(group, seat.tell, seat.origin)
    seat.tell(Started(run.facts))
    # The last rank 0's events may never have arrived; or this rank 0 may have left the step before it reported the newest row.
    seat.tell(run.history.retold() if before.group.rank else run.history.newest())
    return run


def return_to(run: Run, progress: Progress) -> None:
    """Return to an earlier state, where this rank has done another step or evaluation with mirrors: to all of it, without a word to other ranks.

    If it took what is mirrored back alone, and the rest from another rank, a loss between the two would leave it with halves of two states. Of an evaluation that
    is so with the shards that it has left: the rest of it is handed over.
    """
    state = run.state
    if state.mirrored is not None:
        state.mirrored.take_back(progress.step)
        if state.counters.step > progress.step:
            run.step.take_back()
            run.history.take_back(state.counters.step, state.counters.evaluated)
        elif progress_of(state) > progress and not state.lacks_evaluation:
            run.step.take_back_evaluation()
            state.lacks_evaluation = True


def agree_on_state(
    group: Group, state: TrainState, take_back: Callable[[Progress], None], *, holds: bool = True
) -> tuple[int, bool]:
    """Give every rank the state of a rank that has done the least. Returns that rank, and whether others have joined, which held no state.

    `take_back` is called with that one's progress. ClusterError where the ranks then differ, or where a rank that was to hand its state over is lost and no other has one like it.
    """
    own_memory = bool(state.job.state_dict())
    own_progress = progress_of(state) if holds else None
    lacks = holds and state.lacks_evaluation
    every: list[tuple[Progress | None, bool, bool]] = group.gather((own_progress, own_memory, lacks))
    holding = {rank: progress for rank, (progress, *_) in enumerate(every) if progress is not None}
    lacking = [rank for rank in holding if every[rank][2]]
    complete = [rank for rank in holding if rank not in lacking]
    if not complete:
        raise problems.OTHER_STATES(step=state.counters.step)
    source = min(complete, key=lambda rank: (holding[rank], rank))
    # What a lacking rank has put back are the shards of the evaluation before: one that has done less has all of that.
    if any(holding[rank] <= holding[source] for rank in lacking):
        raise problems.OTHER_STATES(step=state.counters.step)
    if holds:
        take_back(holding[source])
    try:
        if state.mirrored is not None:
            state.mirrored.regroup(group, holds=holds)
        # A job's own state may have changed in the step that was left.
        if any(report != (every[source][0], False, False) for report in every):
            hand_over(group, state, source)
        check_same_state(group, state)
    except DriftError as error:
        raise problems.OTHER_STATES(step=state.counters.step) from error
    return source, len(holding) < len(every)


def with_past(run: Run, group: Group, source: int, *, holds: bool) -> Run:
    """A joining worker's run with the facts and the rows so far that rank `source` has. The other ranks keep their own.

    ClusterError on all ranks where a joining worker would compute other bits: on another machine or from other data.
    """
    is_source = group.rank == source
    facts, rows = group.broadcast_object((run.facts, run.history.handed()) if is_source else None, source)
    others = other_fields(run, facts["fields"])
    for rank, names in enumerate(group.gather(others)):
        if names:
            raise problems.OTHER_WORKER(rank=rank, got=names[0])
    return run if holds else replace(run, facts=facts, history=History.of(rows))


def other_fields(run: Run, fields: Mapping[str, Any]) -> list[str]:
    """The names of the identity's values by which this process, which has no checkpoint of the run, would compute otherwise than one with these `fields`."""
    # A fork's origin is known from its checkpoint, which a joining worker does not read.
    mine = {**run.facts["fields"], "fork": fields.get("fork")}
    return [difference.name for difference in differing(fields, completed(mine, fields, run.spec))]


def hand_over(group: Group, state: TrainState, source: int) -> None:
    """Give every rank the state of rank `source`, over the network. Nothing changes before all of it has arrived.

    What is mirrored is shared out by then: of a mirrored optimizer only the parameter groups are handed over, and of shards nothing.
    """
    packed = pack(state.sections_on_all_ranks())
    shards = {name: place for name, place in packed.tensors.items() if not isinstance(place, Tensor)}
    assert not shards or state.mirrored is not None, "a state with parts elsewhere is not recovered in memory"
    tensors = {name: tensor for name, tensor in packed.tensors.items() if isinstance(tensor, Tensor)}
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    is_source = group.rank == source
    skeleton, source_shapes, elsewhere = group.broadcast_object((packed.skeleton, shapes, shards), source)
    received: dict[str, Any] = {**elsewhere}
    for name, (dtype, shape) in source_shapes.items():
        tensor = tensors[name].detach() if is_source else torch.empty(shape, dtype=dtype)
        if tensor.numel():
            row = row_of(tensor).view(torch.uint8)
            sent = row.to(group.device)  # NCCL sends what is on the device, where a state has tensors on both
            group.broadcast(sent, source)
            if not is_source and sent is not row:
                row.copy_(sent)
        received[name] = tensor
    group.settle()
    if not is_source:
        state.restore_on_all_ranks(unpack(skeleton, received))
    state.lacks_evaluation = False


def next_attempt(origin: AttemptOrigin | None, number: int) -> AttemptOrigin | None:
    """The origin of an attempt that goes on in memory: rank 0 claims it with its first save."""
    return None if origin is None else replace(origin, run_id=None, attempt=number, in_memory=True)
