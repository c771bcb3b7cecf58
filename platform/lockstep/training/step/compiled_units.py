"""The modules of a model that are compiled by themselves, wherever their parameters are: the blocks that it repeats.

A unit's `forward` is replaced, not the module: its hooks run outside of the program, so FSDP gathers what it computes with before it, and lets go of that
after it. A unit runs compiled while a loss of training is computed, and where a backward computes it again; in an evaluation it runs eager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from lockstep.training.step import problems
from lockstep.training.step.activations import of_forward
from lockstep.training.step.sharded_modes import ShardsMode
from lockstep.training.step.sharding_units import members_of

_Program = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Computes a unit's forward of arguments by place and by name."""

_program: _Program | None = None
"""What computes the units now; None: they run eager. Not by thread: backward may compute a unit again in a thread of its own."""


def compile_units(model: nn.Module, patterns: Sequence[str] | None) -> list[str]:
    """Have the units of a model compute by the program of `computing_units`; their names. SpecError where it has none.

    They follow from the model and the `patterns` alone. One whose activations are recomputed is compiled inside of that.
    """
    members = {id(member): member for member in members_of(model, patterns, "compile.units")}
    units = {
        name: module
        for name, module in model.named_modules()
        if id(module) in members and type(module).forward is not nn.Module.forward
    }
    if not units:
        raise problems.NO_UNITS_TO_COMPILE()
    for unit in units.values():
        of_forward(unit, lambda forward: partial(_in_program, forward))
    return list(units)


def check_units_apart(model: nn.Module, compiled: Sequence[str], patterns: Sequence[str] | None) -> None:
    """SpecError where the units that are gathered (of `sharding.units`) are inside of one that is `compiled`."""
    gathered = {id(member) for member in members_of(model, patterns)}
    for name in compiled:
        for part, module in model.get_submodule(name).named_modules():
            if part and id(module) in gathered:
                raise problems.UNIT_INSIDE(got=f"{name}.{part}", name=name)


@contextmanager
def computing_units(program: _Program | None) -> Iterator[None]:
    """Compute units by the program in the block, or eager."""
    global _program  # a unit has no other way to know: its module may be copied, and saved
    previous, _program = _program, program
    try:
        yield
    finally:
        _program = previous


def _in_program(forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    if _program is None:
        return forward(*arguments, **keywords)
    return _program(forward, arguments, keywords)


@contextmanager
def only_of_job() -> Iterator[None]:
    """The block without what Lockstep has torch call for every function or module, as over a sharded model: traced into a program, it would make it another one."""
    modes: list[TorchFunctionMode] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    of_job = [mode for mode in modes if not isinstance(mode, ShardsMode)]
    registered = (_global_forward_pre_hooks, _global_forward_hooks)
    hooks = [dict(each) for each in registered]
    _change_modes(modes, of_job)
    for each in registered:
        for number, hook in [*each.items()]:
            if hook.__module__.startswith("lockstep."):
                del each[number]
    try:
        yield
    finally:
        for each, previous in zip(registered, hooks, strict=True):
            each.clear()
            each.update(previous)
        _change_modes(of_job, modes)


def _change_modes(current: Sequence[TorchFunctionMode], modes: Sequence[TorchFunctionMode]) -> None:
    if len(current) != len(modes):
        for _ in current:
            _pop_mode()  # type: ignore[no-untyped-call]
        for mode in modes:
            _push_mode(mode)  # type: ignore[no-untyped-call]
