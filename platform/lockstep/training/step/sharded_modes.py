"""Modes of torch's functions over a sharded model: what a loss must not do with shards, and what it may read although it lies in shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from lockstep.training.step import problems

_FAST_PATHS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""The modules of torch that ask whether a mode is on: without gradients and without one they compute by one kernel of their own."""

_READS = frozenset({"__get__", "__set__"})
"""What FSDP itself does with shards in a forward: it looks at their attributes."""

_TENSOR: Any = Tensor
_GRADIENT = _TENSOR.grad.__get__


class Unseen(TorchFunctionMode):
    """A mode that a module's kernels do not depend on."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """The mode in the block, but off while a module of `_FAST_PATHS` computes, which would see it and take another kernel, with other bits."""
        left: list[bool] = []

        def enter(module: nn.Module, _arguments: Any) -> None:
            if isinstance(module, _FAST_PATHS):
                left.append(_get_current_function_mode() is self)  # type: ignore[no-untyped-call]
                if left[-1]:
                    self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

        def leave(module: nn.Module, _arguments: Any, _output: Any) -> None:
            if isinstance(module, _FAST_PATHS) and left.pop():
                self.__enter__()  # type: ignore[no-untyped-call]

        hooks = (
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        )
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()


class NoShards(Unseen):
    """Refuses to compute with shards in a forward: torch would add the workers' parts up in an order of its own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in _READS:
            for value in args:
                parts = value if isinstance(value, list | tuple) else (value,)
                if any(hasattr(part, "to_local") for part in parts):
                    raise problems.NOT_GATHERED(got=func.__name__)
        return func(*args, **(kwargs or {}))


class WholeGradients(Unseen):
    """Gives a gathered parameter its whole gradient where it is asked for it; all ranks ask for the same ones, in the same order."""

    def __init__(self, names: Mapping[int, str], whole: Callable[[str], Tensor | None]) -> None:
        """`names` are those of the sharded parameters by their ids, and `whole` gathers the gradient of one."""
        super().__init__()
        self._names, self._whole = names, whole

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _GRADIENT and id(args[0]) in self._names:
            return self._whole(self._names[id(args[0])])
        return func(*args, **(kwargs or {}))
