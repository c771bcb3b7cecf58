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
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.checkpoint.tree import Elsewhere
from lockstep.errors import DriftError
from lockstep.plan import Position, clip
from lockstep.record.events import Digests
from lockstep.spec.fields import Spec
from lockstep.training.digest import tensor_digests
from lockstep.training.group import Group
from lockstep.training.sharding import ShardedOptimizer
from lockstep.training.state import TrainState, tensors

BLOCK = 1 << 16
"""Words that share a factor. As 64-bit numbers they are 512 KiB, which stay in a core's cache from the copy to the sum."""

_BLOCKS_AT_ONCE = {"cpu": 1, "cuda": 64}
_FEW = 4
"""So few words of a tensor on a CPU, such as an optimizer's count of steps, are quicker added up by Python."""

_MASK = 2**64 - 1
_WORDS = {1: torch.int8, 2: torch.int16}


class _Summed:
    """A tensor on its way into a digest: its two constants, and the sums of its blocks, still on their device."""

    __slots__ = ("factor", "sums", "term")

    def __init__(self, factor: int, term: int, sums: Tensor | int) -> None:
        self.factor, self.term, self.sums = factor, term, sums


class Digester:
    """Makes digests of tensors on one device, with a workspace that it keeps."""

    def __init__(self, device: torch.device) -> None:
        self._rows = _BLOCKS_AT_ONCE.get(device.type, 1)
        self._factors = torch.from_numpy(_odd(0, BLOCK).view(np.int64).copy()).to(device)
        self._workspace = torch.empty((self._rows, BLOCK), dtype=torch.int64, device=device)
        self._device = device

    def summed(self, name: str, tensor: Tensor) -> _Summed:
        """What the tensor adds, not waited for. It is read now: it may change afterwards."""
        factor, term = _constants(name, str(tensor.dtype), tuple(tensor.shape))
        words = _words(tensor)
        if words.numel() <= _FEW and words.device.type == "cpu":
            return _Summed(factor, term, _few(words.tolist()))
        return _Summed(factor, term, self._sums(words.to(self._device)))

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
            rest = words[full * BLOCK :]
            work = self._workspace[0, : rest.numel()]
            sums[full] = work.copy_(rest).mul_(self._factors[: rest.numel()]).sum()
        return sums

    def digest(self, tensors: Mapping[str, Tensor], values: Sequence[str] = ()) -> int:
        """The digest of tensors by name, and of lines of values."""
        (found,) = resolved([[self.summed(name, tensor) for name, tensor in tensors.items()]])
        return (found + _of_lines(values)) & _MASK


def resolved(digests: Sequence[Sequence[_Summed]]) -> list[int]:
    """Digests, each from what its tensors add. Waits for the device once."""
    there = [one.sums for summed in digests for one in summed if isinstance(one.sums, Tensor)]
    flat = torch.cat(there).cpu().numpy().view(np.uint64) if there else np.empty(0, np.uint64)
    found, at = [], 0
    for summed in digests:
        total = 0
        for one in summed:
            if isinstance(one.sums, Tensor):
                blocks = flat[at : at + one.sums.numel()]
                at += len(blocks)
                whole = int((blocks * _odd(2**32, len(blocks))).sum(dtype=np.uint64))
            else:
                whole = one.sums
            total += whole * one.factor + one.term
        found.append(total & _MASK)
    return found


def model_digest(digester: Digester, state: Mapping[str, Any]) -> int:
    """The digest of the tensors of a model's `state_dict`, by its names."""
    return digester.digest({name: value for name, value in state.items() if isinstance(value, Tensor)})


def optimizer_digest(digester: Digester, state: Mapping[str, Any]) -> int:
    """The digest of an optimizer's `state_dict`: tensors and values by the keys that lead to them, such as `state/0/exp_avg`."""
    found: dict[str, Tensor] = {}
    lines = []
    for path, value in _leaves(state, ""):
        if isinstance(value, Tensor):
            found[path] = value
        else:
            lines.append(f"{path}={_text(value)}")
    return digester.digest(found, lines)


def held_optimizer_digest(digester: Digester, optimizer: torch.optim.Optimizer) -> int:
    """`optimizer_digest` of an optimizer as it is. All ranks call it: of one whose state is shared out, each adds up some tensors."""
    saved = optimizer.state_dict()
    if not isinstance(optimizer, ShardedOptimizer):
        return optimizer_digest(digester, saved)
    rank, ranks = optimizer.group.rank, optimizer.group.size
    places = [id(value) for _, value in _leaves(saved, "") if isinstance(value, Elsewhere)]
    mine = optimizer.assembled(saved, {place: i % ranks for i, place in enumerate(places)})
    whole = [value for _, value in _leaves(saved, "")]
    tensors = {
        path: value
        for (path, value), before in zip(_leaves(mine, ""), whole, strict=True)
        if isinstance(value, Tensor) and (isinstance(before, Elsewhere) or rank == 0)
    }
    lines = [
        f"{path}={_text(value)}"
        for path, value in _leaves(mine, "")
        if rank == 0 and not isinstance(value, Tensor | Elsewhere)
    ]
    partial: list[int] = optimizer.group.gather(digester.digest(tensors, lines))
    return sum(partial) & _MASK


def state_digests(digester: Digester, state: TrainState) -> dict[str, str]:
    """The digests of weights, optimizer and average by their names, as 16 hexadecimal digits. All ranks call it."""
    return {
        "weights_digest": f"{model_digest(digester, state.model.state_dict()):016x}",
        "optimizer_digest": f"{held_optimizer_digest(digester, state.optimizer):016x}",
        **({} if state.average is None else {"ema_digest": f"{digester.digest(state.average.weights):016x}"}),
    }


def digest_is_due(spec: Spec, position: Position, last: int) -> bool:
    """Whether the row of a step has digests: each `record.digest_every` steps, where the plan has a checkpoint, and at the end.

    It follows from the plan alone, so the same rows have them in every execution of a run. `last` is the run's last step.
    """
    every, cadence = spec.record.digest_every, spec.checkpoint.every
    if every is None:
        return False
    number = position.number
    return number % every == 0 or number == last or (cadence is not None and cadence.due(position))


class StepDigests:
    """The digests of one worker's steps. `note` takes those of a step's micro-batches; then come `gather`, the update, `taken` and `compare`."""

    def __init__(self, spec: Spec, group: Group, state: TrainState, total_steps: int) -> None:
        self._spec, self._group, self._state, self._last = spec, group, state, total_steps
        self._names = [name for name, p in state.model.named_parameters() if p.requires_grad]
        self._digester: Digester | None = None
        self._micro_batches: list[list[_Summed]] | None = None
        self._gradients: tuple[int, ...] | None = None
        self._held: tuple[int, int, int | None] | None = None

    @property
    def digester(self) -> Digester:
        if self._digester is None:  # a run without digests needs no workspace
            self._digester = Digester(self._group.device)
        return self._digester

    def begin(self, position: Position) -> bool:
        """Whether this step has digests; if so, its micro-batches' gradients are to be given to `note`."""
        due = digest_is_due(self._spec, position, self._last)
        self._micro_batches = [] if due and self._spec.reduction == "exact" else None
        return due

    @property
    def notes(self) -> bool:
        """Whether the gradients of this step's micro-batches are noted. With `reduction: native` none is kept apart."""
        return self._micro_batches is not None

    def next_micro_batch(self) -> None:
        """The gradients that follow are another micro-batch's."""
        if self._micro_batches is not None:
            self._micro_batches.append([])

    def note(self, gradients: Sequence[Tensor], indices: Sequence[int] | None = None) -> None:
        """Gradients of the micro-batch at hand, in logical order: those of the parameters `indices`, or of all."""
        if self._micro_batches is None:
            return
        for gradient, i in zip(
            gradients, range(len(self._names)) if indices is None else indices, strict=True
        ):
            self._micro_batches[-1].append(self.digester.summed(self._names[i], gradient))

    def gather(self, position: Position, ranges: Sequence[range]) -> None:
        """Hear of the other ranks' micro-batches. Before the update: what a rank that is lost had noted is lost with it."""
        self._gradients = None
        if self._micro_batches is None:
            return
        every = self._group.gather(resolved(self._micro_batches))
        self._micro_batches = None
        counts = [len(clip(assigned, position.micro_batches)) for assigned in ranges]
        self._gradients = tuple(
            value for found, count in zip(every, counts, strict=True) for value in found[:count]
        )

    def taken(self, position: Position) -> Digests | None:
        """The digests of the step that has just been updated, as this rank has them; None where it has none."""
        if not digest_is_due(self._spec, position, self._last):
            return None
        weights, optimizer, average = self._held = self.state()
        return Digests(weights, optimizer, self._gradients, average)

    def compare(self) -> None:
        """Compare what was `taken` with the other ranks. DriftError where they do not hold the same state."""
        if self._held is not None:
            own, self._held = self._held, None
            self._check_same(self._group.gather(own))

    def state(self) -> tuple[int, int, int | None]:
        """The digests of the weights, of the optimizer's state and of the weights' average as they are."""
        weights = model_digest(self.digester, self._state.model.state_dict())
        average = None if self._state.average is None else self.digester.digest(self._state.average.weights)
        return weights, held_optimizer_digest(self.digester, self._state.optimizer), average

    def for_checkpoint(self) -> dict[str, str]:
        """What a checkpoint keeps beside the state: its digests, unless the run has none."""
        return {} if self._spec.record.digest_every is None else state_digests(self.digester, self._state)

    def _check_same(self, every: Sequence[tuple[int, int, int | None]]) -> None:
        step, names = self._state.counters.step, ("weights", "optimizer state", "average of the weights")
        for what, held in zip(names, zip(*every, strict=True), strict=True):
            strays = [rank for rank, value in enumerate(held) if value != held[0]]
            if strays and what == "weights":
                check_same_weights(self._group, self._state.model, step, strays)
            if strays:
                raise DriftError(
                    f"after step {step} ranks {strays} hold another {what} than rank 0; this run is void"
                )


def check_same_weights(
    group: Group, model: nn.Module, step: int, strays: Sequence[int], what: str = "weights"
) -> None:
    """Raise the DriftError of ranks whose weights are not those of rank 0, by the first tensor that differs."""
    every = group.gather(tensor_digests(tensors(model)))
    first = next(name for name in every[0] if any(other.get(name) != every[0][name] for other in every))
    raise DriftError(
        f"after step {step} ranks {list(strays)} hold other {what} than rank 0, first in {first!r}; this run is void"
    )


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
    return tensor.contiguous().reshape(-1).view(_WORDS.get(tensor.element_size(), torch.int32))


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


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """What a tree of mappings, lists and tuples holds, by the keys that lead to it."""
    below = f"{path}/" if path else ""
    if isinstance(value, Elsewhere):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{below}{key}")
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _leaves(inner, f"{below}{i}")
    else:
        yield path, value


def _text(value: Any) -> str:
    """A value as text: floats bit for bit; of an object that a checkpoint cannot hold only its type."""
    if isinstance(value, float):
        return value.hex()
    if value is None or isinstance(value, bool | int | str):
        return json.dumps(value)
    return type(value).__qualname__
