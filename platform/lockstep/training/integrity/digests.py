"""Digests of what a step holds: its weights, its optimizer's state and the gradient of each of its micro-batches.

A digest is a whole number below 2**64, made by integer arithmetic on the bits, so that it is the same on a CPU and a GPU,
for every number of workers, and wherever in memory a tensor lies. Every tensor adds to it by itself, so it does not matter
how the parameters lie in buckets. The definition, in arithmetic modulo 2**64:

* The *words* of a tensor, in logical order (row-major by its shape): an element of 1, 2 or 4 bytes is one word, its bits read as a
  signed number; of 8 or 16 bytes two or four words of 4 bytes, the lowest first.
* `mix(n)` is the (n + 1)-th output of SplitMix64 seeded with 0; `odd(x)` is x with its lowest bit set.
* The sum of a tensor with words w[0], w[1], … is S = sum of w[i] * odd(mix(i mod 65536)) * odd(mix(2**32 + i div 65536)).
* sha256 of `name|dtype|shape`, such as `fc.weight|torch.float32|(10, 64)`, gives two little-endian 64-bit numbers, its first 8
  bytes k and its next 8 bytes r. The tensor adds S * odd(k) + r to the digest.
* Values that are no tensors are lines `path=value`, sorted and joined with newlines; the first 8 bytes of their sha256,
  little-endian, are added where there are any.

All factors are odd, so that one flipped bit always changes the digest; two elements that are swapped change it but for one case
in about 2**32. It is no cryptographic hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.checkpoint.tree import Elsewhere
from lockstep.communication.group import Group
from lockstep.tensor_bytes import row_of
from lockstep.training.integrity import problems
from lockstep.training.integrity.state_digest import tensor_digests, weights_digest
from lockstep.training.state import TrainState
from lockstep.training.step.phases import Optimizers, sharded_of
from lockstep.training.step.shards import Elements, Shard

BLOCK = 1 << 16
"""Words that share a factor. As 64-bit numbers they are 512 KiB, which stay in a core's cache from the copy to the sum."""

_BLOCKS_AT_ONCE = {"cpu": 1, "cuda": 64}
_FEW = 4
"""CPU tensors of at most so many words, such as an optimizer's step count, are summed faster by Python."""

_MASK = 2**64 - 1
_WORDS = {1: torch.int8, 2: torch.int16}


class Summed:
    """What a tensor adds to a digest, before it is resolved: its two constants, and the sums of its blocks from `first` on, still on their device.

    Where they are `weighted`, what is left to do is to add them up.
    """

    __slots__ = ("factor", "first", "sums", "term", "weighted")

    def __init__(
        self, factor: int, term: int, sums: Tensor | int, first: int = 0, *, weighted: bool = False
    ) -> None:
        self.factor, self.term, self.sums, self.first, self.weighted = factor, term, sums, first, weighted


class Digester:
    """Makes digests of tensors on one device, with a workspace that it keeps."""

    def __init__(self, device: torch.device) -> None:
        self._rows = _BLOCKS_AT_ONCE.get(device.type, 1)
        self._factors = torch.from_numpy(_odd(0, BLOCK).view(np.int64).copy()).to(device)
        self._workspace = torch.empty((self._rows, BLOCK), dtype=torch.int64, device=device)
        self._device = device

    def summed(self, name: str, tensor: Tensor) -> Summed:
        """What the tensor adds, without waiting for the device. The tensor may change afterwards."""
        factor, term = _constants(name, str(tensor.dtype), tuple(tensor.shape))
        if tensor.layout is torch.sparse_coo and tensor.sparse_dim() == 1:
            return Summed(factor, term, self._sums_of_rows(tensor.coalesce()), weighted=True)
        words = _words(tensor)
        if words.numel() <= _FEW and words.device.type == "cpu":
            return Summed(factor, term, _few(words.tolist()))
        return Summed(factor, term, self._sums(words.to(self._device)))

    def part(self, name: str, elements: Elements) -> Summed:
        """What some elements of a tensor add: the whole is the sum over all, of which the first ones add the constant term."""
        values, shape, start, is_first = elements
        factor, term = _constants(name, str(values.dtype), tuple(shape))
        words = _words(values).to(self._device)
        each = words.numel() // max(1, values.numel())
        first, begin = divmod(start * each, BLOCK)
        # The first block begins within the words of a whole tensor: it is filled up from the left with zeros, which add nothing.
        head = words[: BLOCK - begin] if begin else words[:0]
        sums = self._sums(words[head.numel() :])
        if begin:
            padded = torch.cat([words.new_zeros(begin), head])
            sums = torch.cat([self._sums(padded), sums])
        return Summed(factor, term if is_first else 0, sums, first)

    def _sums(self, words: Tensor) -> Tensor:
        """The sum of each block of the words."""
        count = words.numel()
        full = count // BLOCK
        sums = torch.empty(-(-count // BLOCK), dtype=torch.int64, device=self._device)
        rows = words[: full * BLOCK].view(-1, BLOCK)
        for i in range(0, full, self._rows):
            part = rows[i : i + self._rows]
            work = self._workspace[: len(part)]
            torch.sum(work.copy_(part).mul_(self._factors), 1, out=sums[i : i + len(part)])
        if count > full * BLOCK:
            tail = words[full * BLOCK :]
            work = self._workspace[0, : tail.numel()]
            sums[full] = work.copy_(tail).mul_(self._factors[: tail.numel()]).sum()
        return sums

    def _sums_of_rows(self, tensor: Tensor) -> Tensor:
        """The sums of the words of a tensor of which the rows are given that are not zero, times both factors of each, so many rows at a time."""
        rows = tensor.indices()[0].to(self._device)
        words = _words(tensor.values().clone(memory_format=torch.contiguous_format)).to(self._device)
        width = words.numel() // max(1, len(rows))  # words of a row
        blocks = -(-tensor.size(0) * width // BLOCK)
        of_blocks = torch.from_numpy(_odd(2**32, blocks).view(np.int64).copy()).to(self._device)
        columns = torch.arange(width, device=self._device)
        at_once = max(1, self._rows * BLOCK // max(1, width))
        sums = []
        for start in range(0, len(rows) if width else 0, at_once):
            some = slice(start, start + at_once)
            places = rows[some, None] * width + columns
            factors = self._factors[places % BLOCK] * of_blocks[places // BLOCK]
            sums.append((words.view(-1, width)[some].to(torch.int64) * factors).sum())
        return torch.stack(sums) if sums else words.new_zeros(1, dtype=torch.int64)

    def digest(self, tensors: Mapping[str, Tensor], values: Sequence[str] = ()) -> int:
        """The digest of tensors by name, and of lines of values."""
        (total,) = resolved([[self.summed(name, tensor) for name, tensor in tensors.items()]])
        return (total + _of_lines(values)) & _MASK


def resolved(digests: Sequence[Sequence[Summed]]) -> list[int]:
    """The digests, each from what its tensors add. Waits for the device once."""
    there = [part.sums for summed in digests for part in summed if isinstance(part.sums, Tensor)]
    flat = torch.cat(there).cpu().numpy().view(np.uint64) if there else np.empty(0, np.uint64)
    results, at = [], 0
    for summed in digests:
        total = 0
        for part in summed:
            if isinstance(part.sums, Tensor):
                blocks = flat[at : at + part.sums.numel()]
                at += len(blocks)
                factors = 1 if part.weighted else _odd(2**32, part.first + len(blocks))[part.first :]
                tensor_sum = int((blocks * factors).sum(dtype=np.uint64))
            else:
                tensor_sum = part.sums
            total += tensor_sum * part.factor + part.term
        results.append(total & _MASK)
    return results


def model_digest(digester: Digester, state: Mapping[str, Any]) -> int:
    """The digest of the tensors of a model's `state_dict`, by its names."""
    return digester.digest({name: value for name, value in state.items() if isinstance(value, Tensor)})


def optimizer_digest(digester: Digester, state: Mapping[str, Any]) -> int:
    """The digest of an optimizer's `state_dict`: tensors and values by the keys that lead to them, such as `state/0/exp_avg`."""
    state_tensors: dict[str, Tensor] = {}
    lines = []
    for path, value in leaves(state, ""):
        if isinstance(value, Tensor):
            state_tensors[path] = value
        else:
            lines.append(f"{path}={_text(value)}")
    return digester.digest(state_tensors, lines)


def values_digest(tree: Mapping[str, Any]) -> int:
    """The digest of the values in a tree that are no tensors, by the keys that lead to them."""
    return _of_lines(
        [f"{path}={_text(value)}" for path, value in leaves(tree, "") if not isinstance(value, Tensor)]
    )


def held_optimizer_digest(digester: Digester, optimizer: Optimizers) -> int:
    """`optimizer_digest` of an optimizer's current state. All ranks call it.

    Of a sharded one each rank digests what it has, and what all have whole counts as this rank has it: with other bits of that it has another digest.
    """
    sharded = sharded_of(optimizer)
    if not sharded:
        return optimizer_digest(digester, optimizer.state_dict())
    group = next(iter(sharded.values())).group
    parts, whole = list[Summed](), list[Summed]()
    lines, lines_of_parts = list[str](), list[str]()
    for phase, member in sharded.items():
        above = f"{phase}/" if phase else ""
        for i, name, value, is_on_all in member.own_values():
            path = f"{above}state/{i}/{name}"
            if isinstance(value, Elements):
                parts.append(digester.part(path, value))
            elif isinstance(value, Tensor):
                (whole if is_on_all else parts).append(digester.summed(path, value))
            else:
                (lines if is_on_all else lines_of_parts).append(f"{path}={_text(value)}")
        for path, value in leaves({"param_groups": member.groups_as_saved()}):
            if isinstance(value, Tensor):  # such as a rate
                whole.append(digester.summed(f"{above}{path}", value))
            else:
                lines.append(f"{above}{path}={_text(value)}")
    of_parts, of_whole = resolved([parts, whole])
    every: list[tuple[int, list[str]]] = group.gather((of_parts, lines_of_parts))
    lines += [line for _, some in every for line in some]
    return (sum(part for part, _ in every) + of_whole + _of_lines(lines)) & _MASK


def held_digest(digester: Digester, tensors: Mapping[str, Any], group: Group | None) -> int:
    """The digest of tensors by name, of some of which each rank of the `group` has a `Shard`. All ranks call it; without a group there are none.

    What is no shard adds as this rank has it: a rank with other bits of that has another digest.
    """
    if group is None:
        return digester.digest({name: value for name, value in tensors.items() if isinstance(value, Tensor)})
    parts = [
        digester.part(name, value.as_elements())
        for name, value in tensors.items()
        if isinstance(value, Shard)
    ]
    whole = [digester.summed(name, value) for name, value in tensors.items() if isinstance(value, Tensor)]
    of_parts, of_whole = resolved([parts, whole])
    every: list[int] = group.gather(of_parts)
    return (sum(every) + of_whole) & _MASK


def element_digest(device: torch.device) -> Callable[[str, Tensor | Shard], int]:
    """What makes the digest of a tensor, or the part of it that the rows of a shard add: they add up to that of the whole, modulo 2**64."""
    digester = Digester(device)

    def digest(name: str, value: Tensor | Shard) -> int:
        if isinstance(value, Shard):
            return resolved([[digester.part(name, value.as_elements())]])[0]
        return resolved([[digester.summed(name, value)]])[0]

    return digest


def gathered_on_first(group: Group, value: Any) -> Any:
    """A shard's whole tensor on rank 0, None on the others; anything else as it is. All ranks call it."""
    return value.gathered(group, 0) if isinstance(value, Shard) else value


def digest_on_first(group: Group, weights: Mapping[str, Any]) -> str:
    """`weights_digest` of weights of some of which each rank has a `Shard`, on every rank. Rank 0 has one whole tensor after another. All ranks call it."""
    return str(group.broadcast_object(weights_digest(weights, partial(gathered_on_first, group)), 0))


def state_digests(digester: Digester, state: TrainState) -> dict[str, str]:
    """The digests of weights, optimizer and average by their names, as 16 hexadecimal digits. All ranks call it."""
    return {
        "weights_digest": f"{held_digest(digester, state.model_state(), state.shared_by):016x}",
        "optimizer_digest": f"{held_optimizer_digest(digester, state.optimizer):016x}",
        **(
            {}
            if state.average is None
            else {"ema_digest": f"{held_digest(digester, state.average_state(), state.shared_by):016x}"}
        ),
    }


def check_same_weights(
    group: Group, model: nn.Module, step: int, strays: Sequence[int], what: str = "weights"
) -> None:
    """Raise DriftError for ranks whose weights differ from rank 0's, and name the first tensor that differs."""
    every = group.gather(tensor_digests(model.state_dict()))
    first = next(name for name in every[0] if any(digests.get(name) != every[0][name] for digests in every))
    raise problems.RANKS_DIFFER(step=step, ranks=list(strays), what=what, got=first)


# --- the arithmetic ---------------------------------------------------------------------------------------------


def _words(tensor: Tensor) -> Tensor:
    """The words of a tensor, in logical order."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return row_of(tensor).view(_WORDS.get(tensor.element_size(), torch.int32))


def _few(words: Sequence[int]) -> int:
    """The sum of a tensor of few words."""
    block = int(_odd(2**32, 1)[0])
    return sum(word * int(factor) for word, factor in zip(words, _odd(0, _FEW), strict=False)) * block & _MASK


@lru_cache(maxsize=1024)
def _odd(first: int, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """`odd(mix(n))` for `count` numbers n from `first` on."""
    n = np.arange(first + 1, first + 1 + count, dtype=np.uint64)
    z = n * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


@lru_cache(maxsize=1 << 16)
def _constants(name: str, dtype: str, shape: tuple[int, ...]) -> tuple[int, int]:
    digest = hashlib.sha256(f"{name}|{dtype}|{shape}".encode()).digest()
    return int.from_bytes(digest[:8], "little") | 1, int.from_bytes(digest[8:16], "little")


def _of_lines(lines: Sequence[str]) -> int:
    if not lines:
        return 0
    return int.from_bytes(hashlib.sha256("\n".join(sorted(lines)).encode()).digest()[:8], "little")


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a tree of mappings, lists and tuples, each with the path of keys to it."""
    below = f"{path}/" if path else ""
    if isinstance(value, Elsewhere):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, f"{below}{key}")
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from leaves(inner, f"{below}{i}")
    else:
        yield path, value


def _text(value: Any) -> str:
    """A value as text: a float bit for bit; for an object that a checkpoint cannot hold, only its type."""
    if isinstance(value, float):
        return value.hex()
    if value is None or isinstance(value, bool | int | str):
        return json.dumps(value)
    return type(value).__qualname__
