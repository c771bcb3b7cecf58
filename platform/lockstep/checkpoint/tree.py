"""A section's state as JSON and tensors, and back, exactly.

A tree is a tensor, an array or number of NumPy's, None, a truth value, a number, text, or a list, tuple or mapping of
trees; keys are plain values. `pack` copies no tensor: it gives a skeleton, which is plain JSON, and the tensors by name. `tree_decoder.unpack`
gives back the same tree: types and order of keys, every bit of a float or a tensor, whole numbers of any size, a
tuple as a tuple. Tensors that share the same memory are stored once and are one tensor again; those that overlap are views
of one stored memory again, and a list or mapping that is in several places is one object again. A tensor that is
dense in another order of dimensions (channels last) keeps that order. Nothing that is read can run code.

In the skeleton a JSON object is a mapping with text keys, unless its only key begins with `$`:

    {"$tensor": "state/0/exp_avg"}                 the tensor of that name
    {"$tensor": "conv.weight", "order": [0, 2, 3, 1]}      … stored with its dimensions in this order
    {"$view": "flat", "dtype": "F32", "at": 8, "shape": [3], "strides": [1]}
                                                   a view of the memory of that tensor, from byte 8 on
    {"$same": 4}                                   list or mapping number 4, in the order in which they end
    {"$tuple": […]}    {"$map": [[key, value], …]}         a tuple; a mapping with any other keys
    {"$ordered": [[key, value], …]}                a collections.OrderedDict within a tree; a tree that is one, as a model's state, is a mapping
    {"$float": "7ff8000000000001"}                 the bits of a float that is not finite
    {"$int": "0x8000000000000000"}                 a whole number beyond 64 bits
    {"$number": "<f4", "bytes": "cdcccc3d"}        a number of NumPy's, with its type
    {"$array": {"$tensor": "seen"}}                an array of NumPy's, in the memory of that tensor
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.checkpoint import problems
from lockstep.checkpoint.tree_decoder import NUMBERS
from lockstep.errors import JobError
from lockstep.tensor_bytes import is_row_major

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

METADATA = "__metadata__"
"""The name that safetensors keeps for itself."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}

_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
_DEEPEST = 100
_NO_NAMES = ("", METADATA)


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
    skeleton = packing.encode(tree, "", 0)
    if packing.overlaps():
        packing = _Packing(where, _blocks(_spans(tree, where)))
        skeleton = packing.encode(tree, "", 0)
    return Packed(skeleton, packing.tensors)


def plain(tree: Tree, where: str) -> Any:
    """A tree without tensors as JSON, each value in its place. TypeError where it has tensors, JobError for anything else."""
    packing = _Packing(where, by_value=True)
    skeleton = packing.encode(tree, "", 0)
    if packing.tensors:
        raise TypeError(f"{where} holds a tensor ({min(packing.tensors)!r}), wanted plain values")
    return skeleton


Shared = set[frozenset[tuple[str, int]]]
"""Which tensors of a tree share memory: for each piece of it their places, and the bytes at which they begin there."""


def sharing(tree: Tree, where: str) -> Shared:
    """What is shared within a tree; each place begins with `where`."""
    pieces = [
        frozenset((f"{where}{span.path}", span.start - block.start) for span in block.spans)
        for block in _blocks(_spans(tree, where))
    ]
    return {piece for piece in pieces if len(piece) > 1}


class _Span(NamedTuple):
    """The bytes from the first to the last element of a tensor, and its place in the tree."""

    start: int
    stop: int
    tensor: Tensor
    path: str

    @property
    def dense(self) -> bool:
        """Whether the tensor is all of these bytes, each of them once, as they are."""
        tensor = self.tensor
        complete = tensor.nbytes == self.stop - self.start and not (tensor.is_conj() or tensor.is_neg())
        return complete and _in_order_of_memory(tensor)[0].data_ptr() == self.start


class _Block(NamedTuple):
    """Memory that is seen by several tensors, or several times by one."""

    start: int
    stop: int
    spans: list[_Span]

    def base(self) -> tuple[str, Tensor] | None:
        """A contiguous tensor of all of it, and the place whose name it takes. None where no storage has all of it."""
        for span in self.spans:
            if (span.start, span.stop) == (self.start, self.stop) and span.dense:
                return span.path, _in_order_of_memory(span.tensor)[0]
        for span in self.spans:
            storage = span.tensor.untyped_storage()
            begin = storage.data_ptr()
            if begin <= self.start and self.stop <= begin + storage.nbytes():
                row = torch.empty(0, dtype=torch.uint8, device=span.tensor.device)
                return self.spans[0].path, row.set_(
                    storage, self.start - begin, (self.stop - self.start,), (1,)
                )
        return None


def _spans(tree: Tree, where: str) -> list[_Span]:
    """Where the tensors of a tree are, in its order."""
    packing = _Packing(where, spans=[])
    packing.encode(tree, "", 0)
    return packing.spans or []


def _blocks(spans: list[_Span]) -> list[_Block]:
    """The pieces of memory in which spans overlap, in the order of addresses; their spans in the order of the tree."""
    groups: list[tuple[int, list[int]]] = []
    stop = 0
    for i in sorted(range(len(spans)), key=lambda i: spans[i].start):
        if not groups or spans[i].start >= stop:
            groups.append((spans[i].start, []))
        groups[-1][1].append(i)
        stop = max(stop, spans[i].stop)
    blocks = [
        _Block(start, max(spans[i].stop for i in members), [spans[i] for i in sorted(members)])
        for start, members in groups
    ]
    return [
        block
        for block in blocks
        if len(block.spans) > 1 or block.spans[0].tensor.nbytes > block.stop - block.start
    ]


class _Packing:
    """Packs one tree. It takes some 3 µs a tensor, which every saving step pays.

    It is told of the `blocks` in which tensors overlap, once another one has noted in `spans` where all of them are.
    """

    def __init__(
        self,
        where: str,
        blocks: Sequence[_Block] = (),
        *,
        spans: list[_Span] | None = None,
        by_value: bool = False,
    ) -> None:
        self.tensors: dict[str, Tensor | Elsewhere] = {}
        self._elsewheres: dict[int, str] = {}
        """The names of what other ranks write, by id: one that is in several places is stored once."""
        self.spans = spans
        self._where = where
        self._at: dict[int, tuple[int, str | None]] = {}
        """Where a tensor ends and its name, if its own memory is stored, by the address at which it begins."""
        self._overlap = False
        self._by_value = by_value
        self._ended: dict[int, int] = {}
        """The numbers of lists and mappings by their ids, in the order in which they end."""
        self._blocks = blocks
        self._starts = [block.start for block in self._blocks]
        self._bases: dict[int, tuple[str, Tensor]] = {}
        """Name and memory of a block, by the address at which it begins."""

    def overlaps(self) -> bool:
        """Whether tensors share memory and are not the same."""
        stop = 0
        for start in sorted(self._at):
            if self._overlap or start < stop:
                return True
            stop = self._at[start][0]
        return False

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
        if kind is np.ndarray:
            return {"$array": self._tensor(self._of_array(value, path), path)}
        if isinstance(value, np.generic) and (dtype := value.dtype.str) in NUMBERS:
            return {"$number": dtype, "bytes": value.tobytes().hex()}
        if depth > _DEEPEST:
            raise self._refused(path, "nested too deep, or holds itself")
        if kind is tuple:
            return {"$tuple": [self.encode(item, f"{path}/{i}", depth + 1) for i, item in enumerate(value)]}
        if kind is not list and kind is not dict and kind is not OrderedDict:
            raise self._refused(path, f"a {kind.__module__}.{kind.__qualname__}")
        if (number := self._ended.get(id(value))) is not None:
            return {"$same": number}
        if kind is list:
            encoded: Any = [self.encode(item, f"{path}/{i}", depth + 1) for i, item in enumerate(value)]
        else:
            ordered = kind is OrderedDict and depth > 0 and not self._by_value
            encoded = self._mapping(value, path, depth + 1, "$ordered" if ordered else "$map")
        if not self._by_value:
            self._ended[id(value)] = len(self._ended)
        return encoded

    def _mapping(self, mapping: Mapping[Any, Any], path: str, depth: int, word: str) -> Any:
        if word == "$map" and all(type(key) is str and not key.startswith("$") for key in mapping):
            return {key: self.encode(value, f"{path}/{key}", depth) for key, value in mapping.items()}
        return {
            word: [
                [self._key(key, path), self.encode(value, f"{path}/{key}", depth)]
                for key, value in mapping.items()
            ]
        }

    def _key(self, key: Any, path: str) -> Any:
        if key is not None and type(key) not in (bool, int, float, str):
            raise self._refused(path, f"a mapping with a {type(key).__qualname__} as a key")
        return self.encode(key, path, 0)

    def _tensor(self, tensor: Tensor, path: str) -> Any:
        if tensor.dtype not in NAMES or tensor.layout is not torch.strided or tensor.is_meta:
            raise self._refused(path, f"a tensor of {tensor.dtype}, {tensor.layout} on {tensor.device}")
        if tensor.requires_grad:
            tensor = tensor.detach()
        start, original = tensor.data_ptr(), tensor
        if self._blocks and (block := self._block_at(start)) is not None and tensor.numel():
            return self._view(tensor, block, path)
        if tensor.is_neg() or tensor.is_conj():
            tensor = tensor.resolve_conj().resolve_neg()
        tensor, order = _in_order_of_memory(tensor)
        copied = tensor is not original and tensor.data_ptr() != start
        nbytes = tensor.nbytes
        reach = _reach(original) if copied else nbytes
        if self.spans is not None and reach:
            self.spans.append(_Span(start, start + reach, original, path))
        if reach and (earlier := self._at.get(start)) is not None:
            if earlier[1] is not None and not copied and self._same(self.tensors[earlier[1]], tensor):
                return _tensor_word(earlier[1], order)
            self._overlap = True
        name = self._named(path, tensor)
        if reach:
            self._overlap |= nbytes > reach
            self._at[start] = start + reach, None if copied else name
        return _tensor_word(name, order)

    def _of_array(self, array: np.ndarray, path: str) -> Tensor:
        """A tensor in the memory of an array; of a copy where torch takes no such memory."""
        if min(array.strides, default=0) < 0 or not array.flags.writeable:
            array = array.copy("K")
        try:
            return torch.from_numpy(array)
        except (TypeError, ValueError):
            raise self._refused(path, f"an array of {array.dtype}") from None

    def _same(self, stored: Tensor | Elsewhere, tensor: Tensor) -> bool:
        """Whether a stored tensor is another one that begins at the same address."""
        assert isinstance(stored, Tensor)
        return (stored.dtype, stored.shape, stored.device) == (tensor.dtype, tensor.shape, tensor.device)

    def _block_at(self, start: int) -> _Block | None:
        i = bisect_right(self._starts, start) - 1
        return self._blocks[i] if i >= 0 and start < self._blocks[i].stop else None

    def _view(self, tensor: Tensor, block: _Block, path: str) -> Any:
        """A tensor that shares a block with others. The block is stored once, under the name of the first that is all of it, if any."""
        if block.start not in self._bases:
            base = block.base()
            if base is None:
                others = [span.path for span in block.spans if span.path != path]
                raise self._refused(
                    path,
                    f"a tensor in the memory of {self._where}{others[0]}, but no view of the same tensor",
                )
            self._bases[block.start] = self._named(base[0], base[1]), base[1]
        name, memory = self._bases[block.start]
        dense, order = _in_order_of_memory(tensor)
        turned = tensor.is_conj() or tensor.is_neg()
        if not turned and (dense.data_ptr(), dense.dtype, dense.shape) == (
            memory.data_ptr(),
            memory.dtype,
            memory.shape,
        ):
            return _tensor_word(name, order)
        return {
            "$view": name,
            "dtype": NAMES[tensor.dtype],
            "at": tensor.data_ptr() - block.start,
            "shape": list(tensor.shape),
            "strides": list(tensor.stride()),
            **({"conj": True} if tensor.is_conj() else {}),
            **({"neg": True} if tensor.is_neg() else {}),
        }

    def _elsewhere(self, value: Elsewhere, path: str) -> Any:
        if id(value) not in self._elsewheres:
            self._elsewheres[id(value)] = self._named(path, value)
        return _tensor_word(self._elsewheres[id(value)], value.order)

    def _named(self, path: str, tensor: Tensor | Elsewhere) -> str:
        """Store a tensor under the name of its place."""
        name = path[1:]
        if name in self.tensors or name in _NO_NAMES:
            name = self._free_name(name)
        self.tensors[name] = tensor
        return name

    def _free_name(self, preferred: str) -> str:
        preferred = "tensor" if preferred in _NO_NAMES else preferred
        name, count = preferred, 1
        while name in self.tensors:
            count += 1
            name = f"{preferred}#{count}"
        return name

    def _refused(self, path: str, reason: str) -> JobError:
        location = f"{self._where}{path}"
        return problems.UNSTORABLE(
            where=location if len(location) < 200 else location[:200] + "…", got=reason
        )


def _tensor_word(name: str, order: list[int] | None) -> dict[str, Any]:
    return {"$tensor": name} if order is None else {"$tensor": name, "order": order}


def _reach(tensor: Tensor) -> int:
    """Bytes from the first to the last element."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * stride for size, stride in steps) + 1) * tensor.element_size()


def _in_order_of_memory(tensor: Tensor) -> tuple[Tensor, list[int] | None]:
    """The tensor as a contiguous one without a copy, and the order of dimensions for that; a copy if there is no such order."""
    contiguous, shape, strides = tensor.is_contiguous(), tensor.shape, tensor.stride()
    if contiguous and 1 not in shape:
        return tensor, None
    order = sorted(range(len(shape)), key=lambda dimension: (-strides[dimension], -shape[dimension]))
    permuted = tensor.permute(order)
    if contiguous:
        # A dimension of one element may have any stride, and libraries go by it: a column that is a turned row stays one.
        turned = order != sorted(order) and is_row_major(permuted)
        return (permuted, order) if turned else (tensor, None)
    return (permuted, order) if permuted.is_contiguous() else (tensor.contiguous(), None)
