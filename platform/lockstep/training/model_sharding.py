"""How the model of a run is shared out by its workers, once its first micro-batch was computed: in rows of each parameter, but of those that stay whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lockstep.communication.group import Group
from lockstep.job.interface import Job
from lockstep.spec.fields import Spec
from lockstep.training.state import TrainState
from lockstep.training.step.fsdp_modules import check_gone, originals_of
from lockstep.training.step.full_sharding import FullSharding
from lockstep.training.step.mirrored_shards import Cut
from lockstep.training.step.phases import sharded_of
from lockstep.training.step.sharding_units import Calls, units_of


def keep_tables_whole(state: TrainState, tables: Sequence[str]) -> None:
    """Have every worker keep the optimizer's state of tables whole where it is shared out."""
    parameters = dict(state.model.named_parameters())
    for optimizer in sharded_of(state.optimizer).values() if tables else ():
        optimizer.keep_whole(parameters[name] for name in tables)


def shard(
    spec: Spec,
    job: Job,
    state: TrainState,
    group: Group,
    calls: Calls,
    fill: Callable[[Sequence[str]], None] = lambda names: None,
    *,
    whole: Sequence[str] = (),
) -> None:
    """Leave this worker its rows of the parameters. All ranks call it, with the same state; `fill` gives parameters memory that have none, and those of `whole` stay so."""
    originals = originals_of(state.model, job)
    uncut, fused = _uncut(job, state, whole), _is_fused(state)
    mirrored = None if state.mirrored_shards is None else state.mirrored_shards.mirrored
    sharding = FullSharding(state.model, group, calls, uncut, fused, fill, spec.sharding, mirrored)
    state.shard(sharding, group)
    if state.mirrored_shards is not None:
        state.mirrored_shards.cut = Cut(tuple(sharding.units), uncut, fused)
    check_gone(originals.of(sharding.shards))


def hold_whole(
    spec: Spec, job: Job, state: TrainState, group: Group, calls: Calls, whole: Sequence[str]
) -> None:
    """Leave a single worker all parameters, and note how they are to be cut when others join it. Parameters of `whole` stay so then."""
    names = {id(module): name for name, module in state.model.named_modules()}
    units = tuple(names[id(unit)] for unit in units_of(state.model, calls, spec.sharding.units))
    assert state.mirrored_shards is not None
    state.mirrored_shards.cut = Cut(units, _uncut(job, state, whole), _is_fused(state))
    state.shard(None, group)


def _uncut(job: Job, state: TrainState, whole: Sequence[str]) -> frozenset[str]:
    return frozenset((*job.conditional_parameters(state.model), *whole))


def _is_fused(state: TrainState) -> bool:
    return any(every.get("fused") for every in state.optimizer.param_groups)
