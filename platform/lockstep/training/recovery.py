"""The loss of a worker, outlived by the others in their processes.

After each update all ranks hold the same state, and the plan runs on any number of them. So when one is lost, each of
the others leaves its step, breaks the group off, and meets the rest of them (`Recovery.regroup`). They go on from the least of
what they have done: a rank that had done more, which is one step or one evaluation, takes the state of one that had not. Then all
compare what they hold, and take new ranges from the plan. Nothing is restarted or read from a disk.

Invariants:
- Nothing of the step under way is kept: an update waits for no other rank, so it is done whole or not begun.
- What went on is compared, bit for bit, before the next step.
- Whoever meets is a new attempt: the one before can publish no checkpoint once this one has saved.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoint.run_folder import AttemptOrigin
from lockstep.checkpoint.skeleton import unpack
from lockstep.checkpoint.tree import pack
from lockstep.errors import ClusterError, DriftError
from lockstep.failure_kinds import kind_of
from lockstep.record.events import Started, Tell
from lockstep.spec.fields import Spec
from lockstep.training.checkpoints import check_same_state
from lockstep.training.group import Group
from lockstep.training.job_phases import PhaseOptimizers
from lockstep.training.requests import Requests
from lockstep.training.roll_call import Progress
from lockstep.training.setup import Run
from lockstep.training.sharding import ShardedOptimizer
from lockstep.training.state import TrainState


class Seat(NamedTuple):
    """A worker's place in a run: its group, whom it tells and hears, and which attempt this is."""

    group: Group
    tell: Tell
    requests: Requests
    origin: AttemptOrigin | None


class Recovery(Protocol):
    """Where the workers of a run meet when one of them is lost. It does not live in any of them."""

    def ready(self, seat: Seat) -> None:
        """Say that this worker trains, and comes to `regroup` where another is lost."""

    def regroup(self, seat: Seat, progress: Progress) -> Seat | None:
        """Wait for the others of the group; the place in the new one. None where the attempt must end.

        The group of `seat` is broken off already. Raises torch's RuntimeError where another worker is lost meanwhile.
        """


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error tells that another worker, or the way to it, is lost. An error of this rank's own is not."""
    return kind_of(error).kind == "peer"


def can_recover(spec: Spec, group: Group, state: TrainState, origin: AttemptOrigin | None) -> bool:
    """Whether this group outlives the loss of a member.

    It does not where the others lack a part of the state (a sharded optimizer), where fewer workers would be another run
    (`reduction: native`), where a step changes the state before it is done (phases), where the backend cannot abort, and where
    steps of another run are taken again.
    """
    sharded = isinstance(state.optimizer, ShardedOptimizer)
    phased = isinstance(state.optimizer, PhaseOptimizers)
    replays = origin is not None and origin.replay is not None
    return group.can_abort and spec.reduction == "exact" and not sharded and not phased and not replays


def outlived(run: Run, seat: Seat, recovery: Recovery, lost: Exception) -> tuple[Run, Seat]:
    """The run without the worker whose loss `lost` tells, and the place in its new group.

    Raises `lost` where the attempt must end. A further loss meanwhile is outlived as well.
    """
    before = seat
    for _ in range(seat.group.size):  # each further time another worker is lost
        run.step.abandon()
        seat.group.abort()
        seat = seat._replace(group=replace(seat.group, channel=None))
        counters = run.state.counters
        if (
            run.history.reached != counters.step
        ):  # the row of the newest update is lost: a checkpoint is needed
            break
        try:
            met = recovery.regroup(seat, Progress(counters.step, counters.evaluated))
            if met is None:
                break
            seat = met
            return taken_on(run, seat, before), seat
        except Exception as error:
            if not is_lost_peer(error):
                raise
    raise lost


def taken_on(run: Run, seat: Seat, before: Seat) -> Run:
    """The run in its new group, which goes on from the least that a member has done."""
    group = seat.group
    agree_on_state(group, run.state)
    counters = run.state.counters
    run.history.take_back(counters.step, counters.evaluated)
    run = run.in_group(group, seat.tell, seat.origin)
    seat.tell(Started(run.facts))
    # Another rank 0 may have told what never arrived; this one may have left the newest row before it told it.
    seat.tell(run.history.retold() if before.group.rank else run.history.newest())
    return run


def agree_on_state(group: Group, state: TrainState) -> None:
    """Have every rank hold the state of one that has done the least. ClusterError where they then differ."""
    counters, own_memory = state.counters, bool(state.job.state_dict())
    every = group.gather((Progress(counters.step, counters.evaluated), own_memory))
    source = min(range(group.size), key=lambda rank: (every[rank][0], rank))
    # A job's own state may have changed in the step that was left.
    if any(one != (every[source][0], False) for one in every):
        hand_over(group, state, source)
    try:
        check_same_state(group, state)
    except DriftError as error:
        raise ClusterError(  # a checkpoint may still be right: another attempt
            f"the workers that are left after a loss hold different states after step {state.counters.step}, and cannot go on"
        ) from error


def hand_over(group: Group, state: TrainState, source: int) -> None:
    """Give every rank the state of rank `source`, over the network. Nothing is changed before all of it is there."""
    packed = pack(state.sections())
    if any(not isinstance(tensor, Tensor) for tensor in packed.tensors.values()):
        raise RuntimeError("a state of which parts are elsewhere cannot be handed over")
    held = {name: tensor for name, tensor in packed.tensors.items() if isinstance(tensor, Tensor)}
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in held.items()}
    own = group.rank == source
    skeleton, wanted = group.gather((packed.skeleton, shapes) if own else None)[source]
    taken: dict[str, Tensor] = {}
    for name, (dtype, shape) in wanted.items():
        tensor = held[name].detach() if own else torch.empty(shape, dtype=dtype)
        if group.size > 1 and tensor.numel():
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), group_src=source, group=group.channel)
        taken[name] = tensor
    if not own:
        state.restore(unpack(skeleton, taken))


def next_attempt(origin: AttemptOrigin | None, number: int) -> AttemptOrigin | None:
    """What an attempt is that goes on in memory: rank 0 claims it with its first save."""
    return None if origin is None else replace(origin, run_id=None, attempt=number, in_memory=True)
