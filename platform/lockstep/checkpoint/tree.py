"""A section's state as JSON and tensors, and back, exactly.

A tree is a tensor, None, a truth value, a number, text, or a list, tuple or mapping of trees; keys are plain
values. `pack` copies no tensor: it gives a skeleton, which is plain JSON, and the tensors by name. `skeleton.unpack`
gives back the same tree: types and order of keys, every bit of a float or a tensor, whole numbers of any size, a
tuple as a tuple. Tensors that share the same memory are stored once and are one tensor again. A tensor that is
dense in another order of dimensions (channels last) keeps that order. Nothing that is read can run code.

In the skeleton a JSON object is a mapping with text keys, unless its only key begins with `$`:

    {"$tensor": "state/0/exp_avg"}                 the tensor of that name
    {"$tensor": "conv.weight", "order": [0, 2, 3, 1]}      … stored with its dimensions in this order
    {"$tuple": […]}    {"$map": [[key, value], …]}         a tuple; a mapping with any other keys
    {"$float": "7ff8000000000001"}                 the bits of a float that is not finite
    {"$int": "0x8000000000000000"}                 a whole number beyond 64 bits
"""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.errors import JobError

Tree = Any
"""See the module's docstring: type checkers do not support such a recursion through invariant containers."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Element types by their names in safetensors."""

_STORED = frozenset(DTYPES.values())
_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
_DEEPEST = 100
_NO_NAMES = ("", "__metadata__")  # safetensors keeps the second for itself


@dataclass(frozen=True, slots=True, eq=False)
class Elsewhere:
    """Stands in a tree for a tensor that another rank writes. `shape` is the stored one, `order` as in the skeleton."""

    dtype: torch.dtype
    shape: torch.Size
    order: list[int] | None

    @classmethod
    def like(cls, tensor: Tensor, dtype: torch.dtype) -> Elsewhere:
        """The placeholder for what `torch.empty_like` would make of a tensor."""
        stored, order = _in_order_of_memory(torch.empty_like(tensor, dtype=dtype, device="meta"))
        return cls(dtype, stored.shape, order)

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class Packed(NamedTuple):
    """A tree taken apart. The tensors are contiguous, and normally still the memory of the tree."""

    skeleton: Any
    tensors: dict[str, Tensor | Elsewhere]


def pack(tree: Tree, where: str = "tree") -> Packed:
    """Take a tree apart. JobError, with the place after `where`, for what is not a tree."""
    packing = _Packing(where)
    return Packed(packing.encode(tree, "", 0), packing.tensors)


def plain(tree: Tree, where: str) -> Any:
    """A tree without tensors as JSON. JobError for anything else."""
    packed = pack(tree, where)
    if packed.tensors:
        raise JobError(f"checkpoint: {where} holds a tensor ({min(packed.tensors)!r}), wanted plain values")
    return packed.skeleton


class _Packing:
    """Packs one tree. It takes some 3 µs a tensor, which every saving step pays."""

    def __init__(self, where: str) -> None:
        self.tensors: dict[str, Tensor | Elsewhere] = {}
        self._where = where
        self._at: dict[int, list[str]] = {}
        """Names of the tensors by the address at which they begin."""

    def encode(self, value: Any, path: str, depth: int) -> Any:
        """`path` is the keys that lead to `value`, each with a `/` before it."""
        kind = type(value)
        if kind in _TENSORS:
            return self._tensor(value, path)
        if kind is Elsewhere:
            return self._elsewhere(value, path)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**63 else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        if depth > _DEEPEST:
            raise self._refused(path, "nested too deep, or holds itself")
        if kind is list:
            return [self.encode(item, f"{path}/{i}", depth + 1) for i, item in enumerate(value)]
        if kind is tuple:
            return {"$tuple": [self.encode(item, f"{path}/{i}", depth + 1) for i, item in enumerate(value)]}
        if kind is dict or kind is OrderedDict:
            return self._mapping(value, path, depth + 1)
        raise self._refused(path, f"a {kind.__module__}.{kind.__qualname__}")

    def _mapping(self, mapping: Mapping[Any, Any], path: str, depth: int) -> Any:
        if all(type(key) is str and not key.startswith("$") for key in mapping):
            return {key: self.encode(value, f"{path}/{key}", depth) for key, value in mapping.items()}
        return {
            "$map": [
                [self._key(key, path), self.encode(value, f"{path}/{key}", depth)]
                for key, value in mapping.items()
            ]
        }

    def _key(self, key: Any, path: str) -> Any:
        if key is not None and type(key) not in (bool, int, float, str):
            raise self._refused(path, f"a mapping with a {type(key).__qualname__} as a key")
        return self.encode(key, path, 0)

    def _tensor(self, tensor: Tensor, path: str) -> Any:
        if tensor.dtype not in _STORED or tensor.layout is not torch.strided or tensor.is_meta:
            raise self._refused(path, f"a tensor of {tensor.dtype}, {tensor.layout} on {tensor.device}")
        if tensor.requires_grad:
            tensor = tensor.detach()
        if tensor.is_neg() or tensor.is_conj():
            tensor = tensor.resolve_conj().resolve_neg()
        tensor, order = _in_order_of_memory(tensor)
        name = self._same_memory(tensor)
        if name is None:
            name = self._named(path, tensor)
            self._at.setdefault(tensor.data_ptr(), []).append(name)
        return _tensor_word(name, order)

    def _elsewhere(self, value: Elsewhere, path: str) -> Any:
        return _tensor_word(self._named(path, value), value.order)

    def _named(self, path: str, tensor: Tensor | Elsewhere) -> str:
        """Store a tensor under the name of its place."""
        name = path[1:]
        if name in self.tensors or name in _NO_NAMES:
            name = self._free_name(name)
        self.tensors[name] = tensor
        return name

    def _same_memory(self, tensor: Tensor) -> str | None:
        """The name of a stored tensor with the same memory, if any. An empty tensor has no memory to share."""
        for name in self._at.get(tensor.data_ptr(), ()):
            other = self.tensors[name]
            assert isinstance(other, Tensor)
            if (other.dtype, other.shape, other.device) == (tensor.dtype, tensor.shape, tensor.device):
                return name if tensor.numel() else None
        return None

    def _free_name(self, wanted: str) -> str:
        wanted = "tensor" if wanted in _NO_NAMES else wanted
        name, count = wanted, 1
        while name in self.tensors:
            count += 1
            name = f"{wanted}#{count}"
        return name

    def _refused(self, path: str, what: str) -> JobError:
        place = f"{self._where}{path}"
        return JobError(
            f"checkpoint: {place if len(place) < 200 else place[:200] + '…'} is {what}, which a checkpoint cannot hold; "
            "wanted tensors, numbers, text, true, false, None, and lists, tuples or mappings of these"
        )


def _tensor_word(name: str, order: list[int] | None) -> dict[str, Any]:
    return {"$tensor": name} if order is None else {"$tensor": name, "order": order}


def _in_order_of_memory(tensor: Tensor) -> tuple[Tensor, list[int] | None]:
    """The tensor as a contiguous one without a copy, and the order of dimensions for that; a copy if there is no such order."""
    if tensor.is_contiguous():
        return tensor, None
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension])
    permuted = tensor.permute(order)
    return (permuted, order) if permuted.is_contiguous() else (tensor.contiguous(), None)
