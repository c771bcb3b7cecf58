"""Modes of torch's functions over a sharded model: what a loss must not do with shards, and what it may read although it lies in shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from lockstep.training.step import problems

_READS = frozenset(
    {
        "__get__",
        "__set__",
        "numel",
        "nelement",
        "size",
        "dim",
        "ndimension",
        "stride",
        "element_size",
        "__len__",
    }
)
"""What a forward may ask of shards: their attributes, which FSDP itself looks at, and what is the whole tensor's."""

_TENSOR: Any = Tensor
_GRADIENT = _TENSOR.grad.__get__


class ShardsMode(TorchFunctionMode):
    """A mode of Lockstep's own over a sharded model, and none of the job's."""


class NoShards(ShardsMode):
    """Refuses to compute with shards in a forward: torch would add the workers' parts up in an order of its own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in _READS:
            for value in args:
                parts = value if isinstance(value, list | tuple) else (value,)
                if any(hasattr(part, "to_local") for part in parts):
                    raise problems.NOT_GATHERED(got=func.__name__)
        return func(*args, **(kwargs or {}))


class WholeGradients(ShardsMode):
    """Gives a gathered parameter its whole gradient where it is asked for it; all ranks ask for the same ones, in the same order."""

    def __init__(self, names: Mapping[int, str], whole: Callable[[str], Tensor | None]) -> None:
        """`names` are those of the sharded parameters by their ids, and `whole` gathers the gradient of one."""
        super().__init__()
        self._names, self._whole = names, whole

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _GRADIENT and id(args[0]) in self._names:
            return self._whole(self._names[id(args[0])])
        return func(*args, **(kwargs or {}))
