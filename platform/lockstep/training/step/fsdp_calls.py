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
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

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
        self._strides: list[tuple[int, ...]] = []
        self._keep_strides()
        # An instance may refuse to be copied as torch's class does: a copy would share the hooks, and the shards.
        vars(module)["__deepcopy__"] = partial(_refuse_copy, type(module).__name__)

    def _keep_strides(self) -> None:
        """Have the module's forward get its inputs as they were given. FSDP passes those that learn through a function that returns them, of which torch makes views.

        A view has the stride of new memory in a dimension of one element, and a convolution chooses its kernel by that.
        """
        module = self.module
        hooks: Any = module._forward_pre_hooks
        of_fsdp = next(iter(hooks))  # it goes before those of the job
        module.register_forward_pre_hook(self._restore_strides, prepend=True, with_kwargs=True)
        hooks.move_to_end(of_fsdp, last=False)
        module.register_forward_pre_hook(self._note_strides, prepend=True, with_kwargs=True)

    def _note_strides(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._strides = [t.stride() for t in tree_leaves((args, kwargs)) if _learns(t)]

    def _restore_strides(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        given, self._strides = iter(self._strides), []
        return tree_unflatten([_kept(t, next(given)) if _learns(t) else t for t in leaves], structure)

    def gather_for_all(self) -> None:
        """Have the module gathered before a backward begins at any tensor that its forward left; FSDP does so for what it returns.

        A mixture of experts leaves its losses in attributes: their backward would read parameters that have no memory, and the process would crash. And an
        in-place sum on a view that was returned, as of a residual, would drop FSDP's hook.
        """
        self.module.register_forward_hook(self._note_tensors)

    def _note_tensors(self, module: nn.Module, _arguments: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for tensor in _with_graph([output]):
            base = tensor._base
            if base is not None and base.grad_fn is not None:
                # A write to the view leaves this node in the graph.
                base.grad_fn.register_prehook(self._gather)
        for part in module.modules():
            for tensor in _with_graph(vars(part).values()):
                # Anew after each forward: what is written into a tensor has another node, which has no hook.
                tensor.register_hook(self._gather)  # type: ignore[no-untyped-call]

    def _gather(self, _gradients: Any) -> None:
        self._state._pre_backward(None)

    def _get_fsdp_state(self) -> Any:
        return self._state


def _learns(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and value.layout == torch.strided


def _kept(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The tensor with these strides, where it has others in dimensions of one element."""
    sizes = [
        size
        for size, step, wanted in zip(tensor.shape, tensor.stride(), strides, strict=True)
        if step != wanted
    ]
    kept: Any = _Kept.apply  # which has no types
    return kept(tensor, strides) if sizes and max(sizes) == 1 else tensor


class _Kept(torch.autograd.Function):
    """A tensor with other strides; its gradient is passed on as it is."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
        return tensor.as_strided(tensor.shape, strides)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


_MANY = 1024
"""Entries of a list or dict that is no collection of losses but data, such as a vocabulary: to look through it takes time in each forward."""


def _with_graph(values: Iterable[Any], depth: int = 2) -> Iterator[Tensor]:
    """Those tensors among the values, or in lists and dicts of them, that a backward could begin at."""
    for value in values:
        if isinstance(value, Tensor):
            if value.grad_fn is not None:
                yield value
        elif isinstance(value, list | tuple | dict) and depth and len(value) <= _MANY:
            yield from _with_graph(value.values() if isinstance(value, dict) else value, depth - 1)


def restore_class(module: nn.Module) -> None:
    """Give a module the class back that it had before `fully_shard`."""
    module.__class__ = type(module).__mro__[2]  # of FSDP's subclass: itself, FSDPModule, the original


def _refuse_copy(name: str, memo: Any) -> NoReturn:
    raise problems.UNIT_COPIED(got=name)
