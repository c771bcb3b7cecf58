"""The order of the samples in an epoch: a pure function of (seed, epoch, number of samples), read at any position.

| order    | what an epoch is                                             | memory                        |
|----------|--------------------------------------------------------------|-------------------------------|
| `full`   | the permutation of torch's DistributedSampler                | 8 bytes a sample, once a node |
| `hashed` | a keyed bijection, computed for the positions that are asked | none                          |
| `blocks` | blocks permuted, then the rows of `window` blocks mixed      | some 40 bytes a block         |
| `none`   | the data's own order                                         | none                          |

`by_length` needs the lengths of the samples: `data.by_length`.

An order gives the ids at the positions of a slice; nothing before them has to be drawn first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isqrt
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.data import problems
from lockstep.data.node_folder import mapped_array
from lockstep.randomness import digest64

Shuffle = Literal["full", "hashed", "blocks", "by_length", "none"]

Ids = NDArray[np.int64]

WINDOW = 8
"""Blocks that `blocks` mixes together where nothing else is said."""

SHARED_FROM = 1 << 20
"""Samples (8 MiB of ids) from which a permutation is shared by the processes of a node instead of made by each."""


class Order(Protocol):
    """The ids of one epoch."""

    def __getitem__(self, positions: slice, /) -> Ids:
        """Ids at `positions` (start and stop given, both within the epoch, a positive step), int64."""


def epoch_order(
    seed: int,
    epoch: int,
    samples: int,
    shuffle: Shuffle,
    *,
    blocks: Sequence[int] | Ids | None = None,
    window: int = WINDOW,
) -> Order:
    """The order in which an epoch visits its samples. `blocks`: rows of each block of the data, for that order alone.

    `full` is bit for bit the permutation of `torch.utils.data.DistributedSampler` after `set_epoch(epoch)`.
    Raises SpecError where `blocks` is asked for and the data have none.
    """
    if shuffle == "none":
        return _OwnOrder()
    if shuffle == "hashed":
        return _HashedOrder(samples, (seed, "order", epoch))
    if shuffle == "blocks":
        if blocks is None:
            raise problems.NO_BLOCKS()
        return BlockOrder(np.asarray(blocks, np.int64), window, (seed, "order", epoch))
    return _permutation(seed, epoch, samples)


def _permutation(seed: int, epoch: int, samples: int) -> Ids:
    """The permutation that torch itself makes, as an array; a large one is made once on a node and mapped by all its processes."""

    def fill(ids: Ids) -> None:
        torch.randperm(
            samples, generator=torch.Generator().manual_seed(seed + epoch), out=torch.from_numpy(ids)
        )

    if samples >= SHARED_FROM:
        return mapped_array(f"order {torch.__version__} {seed} {epoch} {samples}", samples, np.int64, fill)
    ids = np.empty(samples, np.int64)
    fill(ids)
    return ids


class _OwnOrder:
    def __getitem__(self, positions: slice) -> Ids:
        return _arange(positions)


class _HashedOrder:
    def __init__(self, samples: int, key: tuple[int | str, ...]) -> None:
        self._bijection = Bijection(samples, key)

    def __getitem__(self, positions: slice) -> Ids:
        return self._bijection(_arange(positions))


class BlockOrder:
    """Blocks in keyed order, cut into windows of so many; the rows of a window in keyed order."""

    def __init__(self, sizes: Ids, window: int, key: tuple[int | str, ...]) -> None:
        self._key = key
        self._first = np.cumsum(sizes) - sizes
        self._blocks = Bijection(len(sizes), (*key, "blocks"))(np.arange(len(sizes)))
        self._sizes = sizes[self._blocks]
        self._window = window
        last = np.minimum(np.arange(window, len(sizes) + window, window), len(sizes)) - 1
        self._ends = np.cumsum(self._sizes)[last]
        """Positions at which the windows end."""

    def __getitem__(self, positions: slice) -> Ids:
        requested = _arange(positions)
        if not len(requested):
            return requested
        low, high = np.searchsorted(self._ends, (requested[0], requested[-1]), side="right")
        cuts = np.searchsorted(requested, self._ends[low:high])
        parts = pairwise([0, *cuts.tolist(), len(requested)])
        return np.concatenate(
            [self._in_window(int(low) + i, requested[a:b]) for i, (a, b) in enumerate(parts)]
        )

    def due(self, position: int) -> list[int]:
        """Blocks of the next window that should be there once `position` is reached, for reading to keep pace with training.

        The fraction of the next window's blocks equals the fraction of this window that is done, so all are there when the next one begins.
        """
        number = int(np.searchsorted(self._ends, position, side="right"))
        start = self._start(number)
        next_window = slice((number + 1) * self._window, (number + 2) * self._window)
        blocks: list[int] = self._blocks[next_window].tolist()
        behind = position + 1 - start
        return blocks[: -(-len(blocks) * behind // (int(self._ends[number]) - start))]

    def _start(self, number: int) -> int:
        """The position at which a window begins."""
        return int(self._ends[number - 1]) if number else 0

    def _in_window(self, number: int, positions: Ids) -> Ids:
        """Ids at positions that all lie in one window."""
        start = self._start(number)
        rows = Bijection(int(self._ends[number]) - start, (*self._key, number))(positions - start)
        window = slice(number * self._window, (number + 1) * self._window)
        ends = np.cumsum(self._sizes[window])
        block = np.searchsorted(ends, rows, side="right")
        shift = self._first[self._blocks[window]] - (ends - self._sizes[window])
        ids: Ids = rows + shift[block]
        return ids


def _arange(positions: slice) -> Ids:
    return np.arange(positions.start, positions.stop, positions.step or 1, dtype=np.int64)


# --- a keyed bijection ------------------------------------------------------------------------------------

ROUNDS = 6

_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_32 = np.uint64(32)


class Bijection:
    """A keyed bijection of 0 … n-1 (n up to 2^62), computed for the numbers that are asked and holding nothing.

    An alternating Feistel network over a grid of a × b ≥ n, a = ceil(sqrt(n)): the two coordinates of a number are
    shifted in turn by a hash of the other one. The grid has less than a numbers too many; one that lands there is
    taken through the network again until it lands below n (Black & Rogaway 2002, "Ciphers with arbitrary finite
    domains", section 4 and its cycle-walking).
    """

    def __init__(self, size: int, key: tuple[int | str, ...]) -> None:
        self.size = size
        self._a = isqrt(size - 1) + 1 if size else 1
        self._b = -(-size // self._a)
        self._keys = [np.uint64(digest64((*key, i))) for i in range(ROUNDS)]

    def __call__(self, numbers: Ids) -> Ids:
        """The images of `numbers`, each in 0 … n-1."""
        x = self._through(numbers.astype(np.uint64))
        while (outside := np.flatnonzero(x >= np.uint64(self.size))).size:
            x[outside] = self._through(x[outside])
        return x.astype(np.int64)

    def _through(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        a, b = np.uint64(self._a), np.uint64(self._b)
        row, column = np.divmod(x, b)
        for i, key in enumerate(self._keys):
            if i % 2 == 0:
                row = _shifted(row, column, key, a)
            else:
                column = _shifted(column, row, key, b)
        return row * b + column


def _shifted(
    value: NDArray[np.uint64], by: NDArray[np.uint64], key: np.uint64, modulus: np.uint64
) -> NDArray[np.uint64]:
    """`value` plus a hash of `by`, in 0 … modulus-1; modulus below 2^32.

    Two multiplications with a fold between them mix enough for a shuffle; each operation here costs a microsecond.
    """
    z = by + key
    z *= _MIX_1
    z ^= z >> _32
    z *= _MIX_2
    z >>= _32
    z *= modulus
    z >>= _32  # uniform in 0 … modulus-1 (Lemire 2019, "Fast random integer generation in an interval")
    z += value
    below: NDArray[np.uint64] = np.minimum(
        z, z - modulus
    )  # under the modulus the difference wraps to something large
    return below
