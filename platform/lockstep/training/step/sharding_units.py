"""Which modules of a model are gathered, computed and let go one at a time where its parameters are sharded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lockstep.errors import closest
from lockstep.training import problems

_LISTS = (nn.ModuleList, nn.Sequential)


class Calls:
    """How often each module was called in the forward passes of a loss; what a backward computes again does not count."""

    def __init__(self, loss: type[nn.Module]) -> None:
        """`loss` is the class of the modules that compute a loss."""
        self._loss = loss
        self._counts: dict[str, list[Counter[int]]] = {}
        """How often each loss of a phase has called each module, by phase name."""
        self._computing: Any = None
        self._of_whole_batch: set[int] = set()
        """What a loss over the whole batch calls: a step computes it once, and no micro-batch does."""

    @classmethod
    def of_units(cls, units: Iterable[nn.Module]) -> Calls:
        """The calls of a loss that is known to call these modules once."""
        calls = cls(nn.Module)
        calls._counts[""] = [Counter(map(id, units))]
        return calls

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the calls in the block."""
        hooks = (register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, _arguments: Any) -> None:
        if isinstance(module, self._loss):
            self._computing = module
            self._counts.setdefault(self._computing.phase.name, []).append(Counter())
        elif self._computing is not None:
            self._counts[self._computing.phase.name][-1][id(module)] += 1
            if self._computing.of_whole_batch:
                self._of_whole_batch.add(id(module))

    def _leave(self, module: nn.Module, _arguments: Any, _output: Any) -> None:
        if isinstance(module, self._loss):
            self._computing = None

    def once(self, module: nn.Module) -> bool:
        """Whether every loss of a micro-batch has called the module exactly once; of several phases some may never call it."""
        by_phase = [{counts[id(module)] for counts in losses} for losses in self._counts.values()]
        return (
            id(module) not in self._of_whole_batch
            and all(times in ({0}, {1}) for times in by_phase)
            and {1} in by_phase
        )


def units_of(model: nn.Module, calls: Calls, patterns: Sequence[str] | None = None) -> list[nn.Module]:
    """The units, in the model's order: those of `members_of` that have parameters, and that every loss calls once.

    The gradients of one that some loss calls several times would be summed in another order than those of a model in one place.
    """
    seen, units = set[int](), []
    for member in members_of(model, patterns):
        if id(member) not in seen and calls.once(member) and any(True for _ in member.parameters()):
            units.append(member)
        seen.add(id(member))
    return units


def members_of(
    model: nn.Module, patterns: Sequence[str] | None = None, field: str = "sharding.units"
) -> list[nn.Module]:
    """The modules that are units where every loss calls them once, of nested ones the outermost; `field` of the spec has the patterns.

    They are those whose name or class is one of the `patterns`, with `*` for any part. Without patterns they are those of the classes that the model does
    not want split, as Hugging Face's name theirs (`_no_split_modules`), else the members of its lists and sequences of modules. SpecError for a pattern
    that fits no module.
    """
    if patterns is not None:
        return _of_patterns(model, patterns, field)
    unsplit = {
        name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()
    }
    return _of_classes(model, unsplit) or _of_lists(model)


def _of_patterns(model: nn.Module, patterns: Sequence[str], field: str) -> list[nn.Module]:
    named = [(name, module) for name, module in model.named_modules() if name]
    fits = {
        pattern: {
            name
            for name, module in named
            if fnmatchcase(name, pattern) or fnmatchcase(type(module).__name__, pattern)
        }
        for pattern in patterns
    }
    for pattern, names in fits.items():
        if not names:
            near = closest(pattern, [name for name, _ in named])
            raise problems.NO_UNIT(
                field=field, got=pattern, near="" if near is None else f" (did you mean {near!r}?)"
            )
    chosen = set[str]().union(*fits.values())
    return [
        module
        for name, module in named
        if name in chosen and not any(name.startswith(f"{outer}.") for outer in chosen)
    ]


def _of_classes(module: nn.Module, names: set[str]) -> list[nn.Module]:
    members = []
    for child in module.children():
        members += [child] if type(child).__name__ in names else _of_classes(child, names)
    return members


def _of_lists(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, _LISTS):
        return list(module.children())
    return [member for child in module.children() for member in _of_lists(child)]
