"""The calls of torch's FSDP2 on a module that keeps its own class.

`fully_shard` gives a module a class that adds its calls. A job that asks for the class or its name (`type(module) is nn.Linear`) would compute otherwise
than with a whole model. FSDP itself finds its state by the module, so the class can go, and the calls are made on an object beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import count
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

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
        self._number = 0
        """In the order of the forwards."""
        self._begun: list[FSDPCalls] = []
        self._inputs: tuple[Any, Any] = (), {}
        self._of_leaves: list[Any] = []
        """Hooks of the newest inputs that no module has made, which last as long as these do."""
        self._first_node = 0
        """The number that torch gave the first node of the newest forward."""
        self._again = False
        """Whether the newest backward can be differentiated: the unit stays gathered to its end."""
        # An instance may refuse to be copied as torch's class does: a copy would share the hooks, and the shards.
        vars(module)["__deepcopy__"] = partial(_refuse_copy, type(module).__name__)

    def follow(self, begun: list[FSDPCalls]) -> None:
        """Have a unit compute with its inputs as they are given, be gathered whenever a backward needs it, and let go after it. `begun` is one list for all units.

        FSDP passes the inputs that learn through a function that returns them, in whose backward it lets go. Where an input is also used elsewhere, as
        what all blocks of a decoder attend to, that function's backward adds up what the unit alone gives for it: a sum in other brackets, with other
        bits. And torch makes views of what the function returns, whose strides may differ in a dimension of one element.
        """
        module, state = self.module, self._state
        self._begun = begun
        hooks: Any = module._forward_pre_hooks
        of_fsdp = next(iter(hooks))  # it goes before those of the job
        module.register_forward_pre_hook(self._return_inputs, prepend=True, with_kwargs=True)
        hooks.move_to_end(of_fsdp, last=False)
        module.register_forward_pre_hook(self._keep_inputs, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._follow_outputs, prepend=True)
        # FSDP would begin the unit's backward also at an input that the unit returns as it is, long after its end.
        follow_transformed = state._register_pre_backward_hook
        state._register_pre_backward_hook = lambda output: (
            follow_transformed(output) if torch._C._are_functorch_transforms_active() else output
        )

    def release(self) -> None:
        """Let go of the newest inputs. Call it when FSDP is taken off the module."""
        self._take_off_leaves()
        self._inputs = (), {}

    def _take_off_leaves(self) -> None:
        for handle in self._of_leaves:
            handle.remove()
        self._of_leaves = []

    def _keep_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._inputs = args, kwargs
        return (), {}

    def _return_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        (args, kwargs), self._inputs = self._inputs, ((), {})
        if not _in_backward():  # what is recomputed keeps its place in the order
            self._number = next(_NUMBERS)
        if self._is_followed():
            self._take_off_leaves()
            self._again = False
            nodes = set[Any]()
            for tensor in _tensors((args, kwargs)):
                if tensor.requires_grad:
                    hook: Any = tensor.register_hook(self._gather_for_another)  # type: ignore[no-untyped-call]
                    self._of_leaves += [hook] if tensor.is_leaf else []
                    nodes |= {tensor.grad_fn} - {None}
            if nodes:
                # Before the newest node that made an input, all that the unit made are done.
                max(nodes, key=_number_of_node).register_prehook(self._finish)
        self._first_node = _next_node()
        return args, kwargs

    def _is_followed(self) -> bool:
        """Whether a forward is one that a backward follows, and no recomputation within the unit's backward."""
        return torch.is_grad_enabled() and self._state._training_state.name != _IN_BACKWARD

    def _gather_for_another(self, gradient: Tensor) -> None:
        """Have the unit gathered again before another backward goes through the one that gives this gradient (`create_graph`): it reads the parameters."""
        if gradient.grad_fn is not None:
            self._again = True
            gradient.register_hook(self._gather)  # type: ignore[no-untyped-call]

    def _follow_outputs(self, module: nn.Module, _arguments: Any, output: Any) -> None:
        """Have the unit's backward begin at any tensor that its forward made and left, in what it returns or in attributes.

        A mixture of experts leaves its losses in attributes: their backward would read parameters that have no memory, and the process would crash. And an
        in-place sum on a view that was returned, as of a residual, would drop a tensor's hook.
        """
        if not self._is_followed():
            return
        for tensor in _tensors(output):
            if self._has_made(tensor):
                tensor.register_hook(self._begin)  # type: ignore[no-untyped-call]
            base = tensor._base
            if base is not None and self._has_made(base):
                # A write to the view leaves this node in the graph.
                base.grad_fn.register_prehook(self._begin)  # type: ignore[union-attr]
        for part in module.modules():
            for tensor in _with_graph(vars(part).values()):
                if self._has_made(tensor):
                    # Anew after each forward: what is written into a tensor has another node, which has no hook.
                    tensor.register_hook(self._begin)  # type: ignore[no-untyped-call]

    def _has_made(self, tensor: Tensor) -> bool:
        """Whether a tensor comes from the newest forward, and is not one that the unit was given."""
        node = tensor.grad_fn
        return node is not None and _number_of_node(node) >= self._first_node

    def _begin(self, _gradients: Any) -> None:
        """Begin the unit's backward: let go of the units that were computed after it, and gather it.

        A backward takes what a forward made from the newest to the oldest: those units are done.
        """
        self._end_from(self._number + 1)
        if not self._begun or self._begun[-1] is not self:
            self._begun.append(self)
        self._gather(None)

    def _finish(self, _gradients: Any) -> None:
        self._end_from(self._number)

    def _end_from(self, number: int) -> None:
        """Let go of the units of this number and above whose backward has begun. Of what is left FSDP lets go at the end of a backward."""
        while self._begun and self._begun[-1]._number >= number:
            self._begun.pop()._end()

    def _gather(self, _gradients: Any) -> None:
        self._state._pre_backward(None)

    def _end(self) -> None:
        group = self._state._fsdp_param_group
        # Nodes of another backward may be numbered by another thread than those of the forward.
        if not self._again and group is not None and group._training_state.name == _IN_BACKWARD:
            group.post_backward()

    def _get_fsdp_state(self) -> Any:
        return self._state


_NUMBERS = count(1)

_IN_BACKWARD = "PRE_BACKWARD"
"""What FSDP calls the state of a module from the beginning of its backward to the end."""


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _next_node() -> int:
    """The number that torch gives the next node of a graph that this thread makes."""
    return int(torch._C._autograd._get_sequence_nr())


def _number_of_node(node: Any) -> int:
    return int(node._sequence_nr())


def _tensors(values: Any, depth: int = 4) -> Iterator[Tensor]:
    """The tensors among the inputs or outputs of a module, those in dataclasses too."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type) and depth:
            of_fields = {entry.name: getattr(leaf, entry.name, None) for entry in fields(leaf)}
            yield from _tensors(of_fields | getattr(leaf, "__dict__", {}), depth - 1)


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
