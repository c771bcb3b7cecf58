"""Rebuilds a tree from its skeleton and its tensors, which `tree.pack` took apart.

It needs no torch where there are no tensors: the recorder reads manifests.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint.errors import BadCheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.checkpoint.tree import Tree

_WORDS = frozenset({"$tensor", "$tuple", "$map", "$float", "$int"})


def unpack(skeleton: Any, tensors: Mapping[str, Tensor]) -> Tree:
    """The tree that `pack` took apart. BadCheckpointError where skeleton and tensors do not match."""
    unused = set(tensors)

    def tensor(name: str) -> Tensor:
        if name not in tensors:
            raise BadCheckpointError(f"tensor {name!r} is missing")
        unused.discard(name)
        return tensors[name]

    try:
        tree = _decode(skeleton, tensor)
    except RecursionError:
        raise BadCheckpointError("the skeleton is nested too deep") from None
    if unused:
        raise BadCheckpointError(f"tensor {min(unused)!r} has no place in the skeleton")
    return tree


def _decode(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    word = next(iter(value), "")
    if not word.startswith("$"):
        if any(key.startswith("$") for key in value):
            raise BadCheckpointError("the skeleton mixes words and keys")
        return {key: _decode(item, tensor) for key, item in value.items()}
    if word not in _WORDS:
        raise BadCheckpointError(f"the skeleton holds the unknown word {word!r}")
    try:
        return _decode_word(word, value, tensor)
    except (ValueError, TypeError, KeyError, struct.error, RuntimeError) as error:
        raise BadCheckpointError(f"the skeleton's {word} cannot be read: {error}") from error


def _decode_word(word: str, value: dict[str, Any], tensor: Callable[[str], Tensor]) -> Any:
    content = value[word]
    if word == "$tensor":
        return _reordered(tensor(content), value.get("order"))
    if len(value) > 1:
        raise ValueError("it stands beside other keys")
    if word == "$tuple":
        return tuple([_decode(item, tensor) for item in content])
    if word == "$map":
        return {_decode(key, tensor): _decode(item, tensor) for key, item in content}
    if word == "$float":
        return struct.unpack(">d", bytes.fromhex(content))[0]
    return int(content, 16)


def _reordered(tensor: Tensor, order: list[int] | None) -> Tensor:
    """The inverse of `_in_order_of_memory`."""
    if order is None:
        return tensor
    if sorted(order) != list(range(tensor.dim())):
        raise ValueError(f"{order} is no order of its dimensions")
    return tensor.permute([order.index(dimension) for dimension in range(len(order))])
