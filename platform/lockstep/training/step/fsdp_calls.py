"""The calls of torch's FSDP2 on a module that keeps its own class.

`fully_shard` gives a module a class that adds its calls. A job that asks for the class or its name (`type(module) is nn.Linear`) would compute otherwise
than with a whole model. FSDP itself finds its state by the module, so the class can go, and the calls are made on an object beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lockstep.training.step import problems


class FSDPCalls(FSDPModule):
    """The calls of `FSDPModule` on one module, but of those that walk through its children."""

    def __new__(cls, module: nn.Module) -> FSDPCalls:
        return object.__new__(cls)  # FSDPModule makes an object of the class behind its own

    def __init__(self, module: nn.Module) -> None:
        """Of a module that `fully_shard` has returned, and that gets its own class back."""
        self.module = module
        self._state: Any = module._get_fsdp_state()  # type: ignore[operator]
        restore_class(module)
        # An instance may refuse to be copied as torch's class does: a copy would share the hooks, and the shards.
        vars(module)["__deepcopy__"] = partial(_refuse_copy, type(module).__name__)
        module.register_forward_hook(self._gather_for_attributes)

    def _gather_for_attributes(self, module: nn.Module, _arguments: Any, _output: Any) -> None:
        """Have the module gathered before a backward begins at a tensor that its forward left in an attribute, as FSDP does for what it returns.

        Otherwise the backward of a loss that a mixture of experts leaves so would read parameters that have no memory, and the process would crash.
        """
        if torch.is_grad_enabled():
            for part in module.modules():
                for tensor in _with_graph(vars(part).values()):
                    tensor.register_hook(self._state._pre_backward)  # type: ignore[no-untyped-call]

    def _get_fsdp_state(self) -> Any:
        return self._state


def _with_graph(values: Iterable[Any]) -> Iterator[Tensor]:
    """Those tensors among the values, or in lists and dicts of them, that a backward could begin at."""
    for value in values:
        if isinstance(value, Tensor):
            if value.grad_fn is not None:
                yield value
        elif isinstance(value, list | tuple):
            yield from _with_graph(value)
        elif isinstance(value, dict):
            yield from _with_graph(value.values())


def restore_class(module: nn.Module) -> None:
    """Give a module the class back that it had before `fully_shard`."""
    module.__class__ = type(module).__mro__[2]  # of FSDP's subclass: itself, FSDPModule, the original


def _refuse_copy(name: str, memo: Any) -> NoReturn:
    raise problems.UNIT_COPIED(got=name)
