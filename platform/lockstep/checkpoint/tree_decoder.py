"""Rebuilds a tree from its skeleton and its tensors, which `tree.pack` took apart.

It needs no torch where there are no tensors: the recorder reads manifests.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint import problems
from lockstep.checkpoint.errors import BadCheckpointError
from lockstep.parsing import one_line
from lockstep.paths import shown

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.checkpoint.tree import Tree

_WORDS = frozenset(
    {"$tensor", "$view", "$same", "$tuple", "$map", "$ordered", "$float", "$int", "$number", "$array"}
)
NUMBERS = frozenset(
    {"|b1", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16"}
)
"""The types of NumPy's numbers in a skeleton, as NumPy writes them."""
_DEEPEST = 200
"""No tree that `pack` writes is nested as deep. Python's own limit depends on what else the process has imported."""


def unpack(skeleton: Any, tensors: Mapping[str, Tensor]) -> Tree:
    """The tree that `pack` took apart. BadCheckpointError where skeleton and tensors do not match."""
    unused = set(tensors)

    def tensor(name: str) -> Tensor:
        if name not in tensors:
            raise _no_skeleton(f"tensor {shown(name)} is missing")
        unused.discard(name)
        return tensors[name]

    tree = _Decoding(tensor).decode(skeleton)
    if unused:
        raise _no_skeleton(f"tensor {shown(min(unused))} has no place in it")
    return tree


def _no_skeleton(got: str) -> BadCheckpointError:
    return problems.UNREADABLE(wanted="skeleton of its tensors", got=got)


def seen_otherwise(skeleton: Any) -> set[str]:
    """The names of the tensors that a tree has in another order of dimensions, or views of: their memory is needed as a whole."""
    if isinstance(skeleton, list):
        return set().union(*map(seen_otherwise, skeleton))
    if not isinstance(skeleton, dict):
        return set()
    if isinstance(name := skeleton.get("$view", skeleton.get("$tensor")), str):
        return {name} if len(skeleton) > 1 else set()
    return set().union(*map(seen_otherwise, skeleton.values()))


class _Decoding:
    """Decodes one skeleton."""

    def __init__(self, tensor: Callable[[str], Tensor]) -> None:
        self._tensor = tensor
        self._ended: list[Any] = []
        """The lists and mappings so far, in the order in which they end."""

    def decode(self, value: Any, depth: int = 0) -> Any:
        """`depth` is the number of lists and mappings around `value`."""
        if depth > _DEEPEST:
            raise _no_skeleton("it is nested too deep")
        if isinstance(value, list):
            return self._end([self.decode(item, depth + 1) for item in value])
        if not isinstance(value, dict):
            return value
        word = next(iter(value), "")
        if not word.startswith("$"):
            if any(key.startswith("$") for key in value):
                raise _no_skeleton("it mixes words and keys")
            return self._end({key: self.decode(item, depth + 1) for key, item in value.items()})
        if word not in _WORDS:
            raise _no_skeleton(f"it holds the unknown word {shown(word)}")
        try:
            return self._word(word, value, depth)
        except (ValueError, TypeError, KeyError, IndexError, struct.error, RuntimeError) as error:
            raise _no_skeleton(f"its {word} cannot be read: {one_line(error)}") from error

    def _end(self, container: Any) -> Any:
        self._ended.append(container)
        return container

    def _word(self, word: str, value: dict[str, Any], depth: int) -> Any:
        content = value[word]
        if word == "$tensor":
            return _reordered(self._tensor(content), value.get("order"))
        if word == "$view":
            return _viewed(self._tensor(content), value)
        if word == "$number":
            return _number(value)
        if len(value) > 1:
            raise ValueError("it stands beside other keys")
        if word == "$array":
            return _array(self.decode(content, depth + 1))
        if word == "$same":
            if type(content) is not int or content < 0:
                raise ValueError(f"{content} is no number of a list or mapping")
            return self._ended[content]
        if word == "$tuple":
            return tuple([self.decode(item, depth + 1) for item in content])
        if word in ("$map", "$ordered"):
            mapping = {self.decode(key, depth + 1): self.decode(item, depth + 1) for key, item in content}
            return self._end(mapping if word == "$map" else OrderedDict(mapping))
        if word == "$float":
            return struct.unpack(">d", bytes.fromhex(content))[0]
        return int(content, 16)


def _number(word: dict[str, Any]) -> Any:
    """The number of NumPy's that a word describes."""
    import numpy as np

    dtype = word["$number"]
    if word.keys() != {"$number", "bytes"} or dtype not in NUMBERS:
        raise ValueError("it is no number of a known type")
    (number,) = np.frombuffer(bytearray.fromhex(word["bytes"]), dtype)
    return number


def _array(tensor: Any) -> Any:
    """An array of NumPy's in the memory of a tensor, in host memory."""
    from torch import Tensor

    if not isinstance(tensor, Tensor):
        raise TypeError("it is no tensor")
    return tensor.cpu().numpy()


def _reordered(tensor: Tensor, order: list[int] | None) -> Tensor:
    """The inverse of `_in_order_of_memory`."""
    if order is None:
        return tensor
    if sorted(order) != list(range(tensor.dim())):
        raise ValueError(f"{order} is no order of its dimensions")
    return tensor.permute([order.index(dimension) for dimension in range(len(order))])


def _viewed(base: Tensor, word: dict[str, Any]) -> Tensor:
    """The view of a contiguous tensor's memory that a word describes. It lies within that memory."""
    import torch

    from lockstep.checkpoint.tree import DTYPES

    dtype, at, shape, strides = DTYPES[word["dtype"]], word["at"], word["shape"], word["strides"]
    if not all(type(number) is int and number >= 0 for number in (at, *shape, *strides)):
        raise ValueError("it has no place")
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    stop = at + (last + 1) * dtype.itemsize
    if stop > base.nbytes or 0 in shape:
        raise ValueError(f"it ends at byte {stop} of {base.nbytes}")
    row = base.view(-1).view(torch.uint8)[at:stop].view(dtype)
    view = row.as_strided(shape, strides, row.storage_offset())
    view = view.conj() if word.get("conj") else view
    return torch._neg_view(view) if word.get("neg") else view
