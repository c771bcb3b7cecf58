"""The state of an optimizer as a checkpoint has it: put together from its shards, and loaded bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lockstep.training import problems
from lockstep.training.step.joined_optimizer import hyperparameters
from lockstep.training.step.phases import Optimizers, PhaseOptimizers, optimizers_of, sharded_of
from lockstep.training.step.sharding import SCALARS, ShardedOptimizer, counts_on_device


def assembled_optimizer(
    optimizer: Optimizers, saved: Mapping[str, Any], writers: Mapping[int, int]
) -> dict[str, Any]:
    """The `state_dict` of sharded optimizers, with the tensors that this rank writes, as `ShardedOptimizer.assembled` gives them. All ranks call it."""
    assembled = {
        phase: member.assembled(saved[phase] if phase else saved, writers)
        for phase, member in sharded_of(optimizer).items()
    }
    return assembled.get("", assembled)


def restore_optimizer(optimizer: Optimizers, saved: Mapping[str, Any], *, fork: bool) -> None:
    """Load an optimizer's `state_dict` bit for bit: torch itself casts the state to its parameter's type, and takes text for a list.

    A fork keeps what the optimizer was made with (learning rates, decay, …) and takes the rest of its groups.
    """
    if isinstance(optimizer, PhaseOptimizers) or "param_groups" not in saved:
        phases = set(optimizers_of(optimizer)) - {""}
        of_saved = set() if "param_groups" in saved else set(saved)
        if phases != of_saved:
            raise problems.FORK_PHASES(wanted=sorted(of_saved), got=sorted(phases))
        for name, member in optimizers_of(optimizer).items():
            restore_optimizer(member, saved[name], fork=fork)
        return
    group_defaults = hyperparameters(optimizer)
    if fork:
        saved_names = {name for group in saved["param_groups"] for name in group}
        if foreign := sorted(set(optimizer.defaults) - saved_names):
            raise problems.FORK_OPTIMIZER(got=f"without {foreign[0]!r}")
    every = [*_with_wrapped(optimizer)]
    with _same_objects(every):
        optimizer.load_state_dict(dict(saved))
    if not isinstance(optimizer, ShardedOptimizer):  # which loads its part without a cast
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        places: dict[Any, Any] = dict(zip(numbers, parameters, strict=True))
        pairs = [
            (
                next((member.state for member in every if owner in member.state), optimizer.state)[owner],
                of_one,
            )
            for key, of_one in saved["state"].items()
            if (owner := places.get(key, key)) in optimizer.state or key in places
        ]
        as_saved = _AsSaved((value, state[name]) for state, of_one in pairs for name, value in of_one.items())
        for state, of_one in pairs:
            for name, value in of_one.items():
                state[name] = as_saved(value, state[name])
    if fork:
        for group, made_with in zip(optimizer.param_groups, group_defaults, strict=True):
            group.update(made_with)
        for member in every:
            counts_where_they_are_read(member)


def counts_where_they_are_read(optimizer: torch.optim.Optimizer) -> None:
    """Move the numbers of updates to where the kernels of their groups read them.

    torch's `load_state_dict` looks at the groups as they were saved: those of another device, in a fork.
    """
    for group in optimizer.param_groups:
        on_device = counts_on_device(group)
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name in SCALARS & state.keys():
                if isinstance(state[name], Tensor):
                    state[name] = state[name].to(parameter.device if on_device else "cpu")


def _with_wrapped(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """An optimizer, and those that it wraps."""
    yield optimizer
    for value in vars(optimizer).values():
        if isinstance(value, torch.optim.Optimizer):
            yield from _with_wrapped(value)


@contextmanager
def _same_objects(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Leave optimizers the groups and the state that they hold, with what is loaded in the block in them.

    torch puts new objects in their place, and an optimizer that wraps another one, or a hook, holds on to the old ones.
    """
    originals = [
        (vars(optimizer), [*optimizer.param_groups], optimizer.param_groups, optimizer.state)
        for optimizer in optimizers
    ]
    yield
    for attributes, members, groups, state in originals:
        loaded = attributes.get("param_groups", groups)
        if loaded is not groups and len(loaded) == len(members):
            for group, new in zip(members, loaded, strict=True):
                if new is not group:
                    _refilled(group, dict(new))
            attributes["param_groups"] = groups
        if attributes.get("state", state) is not state:
            _refilled(state, attributes["state"])
            attributes["state"] = state


def _refilled(mapping: dict[Any, Any], content: Mapping[Any, Any]) -> None:
    mapping.clear()
    mapping.update(content)


class _AsSaved:
    """Gives the values of an optimizer's state as they were saved, on the device on which torch has loaded them.

    `pairs` are all of them, each with what has been loaded. Those that were one object, or in one memory, are so again: torch
    moves and copies each by itself.
    """

    def __init__(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        self._again: dict[int, Any] = {}
        """What stands for a saved tensor, list or mapping, by its id."""
        together: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for value, loaded in pairs:
            for saved, restored in _tensor_pairs(value, loaded):
                together.setdefault(saved.untyped_storage().data_ptr(), []).append((saved, restored))
        for members in together.values():
            if len(members) > 1 and not _keeps_together(members):
                self._again.update(_moved_together(members))

    def __call__(self, value: Any, loaded: Any) -> Any:
        """A saved value. It stays as it was loaded where it is of another kind or length: a `load_state_dict` of the job's own has made something else of it."""
        if id(value) in self._again:
            return self._again[id(value)]
        if isinstance(value, Tensor):
            cast = isinstance(loaded, Tensor) and loaded.dtype != value.dtype
            return value.to(loaded.device) if cast else loaded
        if isinstance(value, dict) and isinstance(loaded, dict) and value.keys() == loaded.keys():
            result: Any = {key: self(item, loaded[key]) for key, item in value.items()}
        elif type(value) in (list, tuple) and type(loaded) is type(value) and len(loaded) == len(value):
            result = type(value)(map(self, value, loaded))
        else:
            return value if isinstance(value, str) and isinstance(loaded, str) else loaded
        self._again[id(value)] = result
        return result


def _tensor_pairs(value: Any, loaded: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The tensors within a saved value that have memory, each with the one that has been loaded for it."""
    if isinstance(value, Tensor) and isinstance(loaded, Tensor):
        if value.numel() and value.shape == loaded.shape:
            yield value, loaded
    elif isinstance(value, dict) and isinstance(loaded, dict) and value.keys() == loaded.keys():
        for key, item in value.items():
            yield from _tensor_pairs(item, loaded[key])
    elif type(value) in (list, tuple) and type(loaded) is type(value) and len(loaded) == len(value):
        for item, loaded_item in zip(value, loaded, strict=True):
            yield from _tensor_pairs(item, loaded_item)


def _keeps_together(members: list[tuple[Tensor, Tensor]]) -> bool:
    """Whether what was loaded for tensors in one memory lies in one as they do."""
    alike = all((saved.dtype, saved.stride()) == (loaded.dtype, loaded.stride()) for saved, loaded in members)
    return alike and len({loaded.data_ptr() - saved.data_ptr() for saved, loaded in members}) == 1


def _moved_together(members: list[tuple[Tensor, Tensor]]) -> Iterator[tuple[int, Tensor]]:
    """Tensors in one memory, as views of a copy of it on the device on which they have been loaded, by their ids."""
    devices = [loaded.device for _, loaded in members]
    device = next((one for one in devices if one.type != "cpu"), devices[0])
    memory = members[0][0].untyped_storage()
    row = torch.empty(0, dtype=torch.uint8, device=members[0][0].device).set_(memory).to(device)
    for one, _ in members:
        typed = row[: len(row) // one.element_size() * one.element_size()].view(one.dtype)
        yield id(one), typed.as_strided(one.shape, one.stride(), one.storage_offset())
