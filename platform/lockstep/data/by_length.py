"""Orders that put samples of like lengths into one micro-batch, so that little is padded: pure functions of lengths, seed and epoch.

* `LengthWindows`: micro-batches of so many samples. The epoch is permuted, cut into windows of some global batches, and each window sorted by
  length and cut into micro-batches, which come in keyed order: Hugging Face's `group_by_length`, with its batches shuffled.
* `TokenBatches`: micro-batches of so many padded tokens. All samples are sorted by length and cut once; each epoch has the micro-batches in another
  keyed order, and samples of one length exchanged among themselves: fairseq's `max_tokens`. The lengths alone decide how many there are, so the
  steps of an epoch are known by arithmetic.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.data import problems
from lockstep.data.order import Bijection, Ids, Order, epoch_order
from lockstep.data.sampler import LeftOut
from lockstep.spec.fields import Spec

EPOCHS_KEPT = 4
"""Epochs whose micro-batches are kept at hand: the loader may be one ahead of the step, and an attempt may go back."""


def grouped_by_length(spec: Spec, lengths: Ids, left_out: LeftOut) -> LengthWindows | TokenBatches:
    """What groups the samples by `lengths`, one for each. SpecError where one is longer than a micro-batch may be and is not left out."""
    tokens, micro = spec.batch.tokens, spec.batch.micro
    if tokens is None:
        largest = max(each.size for each in spec.batch.sizes)
        return LengthWindows(lengths, micro, spec.data.window * largest, spec.seed)
    too_long = left_out.remaining(np.flatnonzero(lengths > tokens))
    if len(too_long):
        raise problems.TOO_LONG(
            got=tokens, sample=too_long[0], length=lengths[too_long[0]], count=len(too_long)
        )
    return TokenBatches(np.minimum(lengths, tokens), tokens, micro, spec.seed, lengths_digest(lengths))


def lengths_digest(lengths: Ids) -> str:
    """The lengths of all samples as a field of the identity."""
    return hashlib.sha256(lengths.astype("<i8").tobytes()).hexdigest()[:32]


class LengthWindows:
    """Micro-batches of `micro` samples of like lengths out of windows of `window` samples, a multiple of it."""

    count = None

    def __init__(self, lengths: Ids, micro: int, window: int, seed: int) -> None:
        self.lengths, self._micro, self._window, self._seed = lengths, micro, window, seed
        self.longest = int(lengths.max())
        self.fields = {"data.train.lengths": lengths_digest(lengths)}

    def bounds(self, epoch: int) -> Ids:
        raise NotImplementedError  # samples bound these micro-batches

    def largest(self) -> list[Ids]:
        """The ids of the longest samples that may meet in a micro-batch."""
        return [np.argsort(-self.lengths, kind="stable")[: self._micro]]

    def order(self, epoch: int, in_full_steps: int) -> Order:
        """The ids of an epoch. The first `in_full_steps` samples, a multiple of `micro`, make full steps; the others are sorted and stay at the end."""
        drawn = epoch_order(self._seed, epoch, len(self.lengths), "full")[0 : len(self.lengths)]
        full, remaining = drawn[:in_full_steps], drawn[in_full_steps:]
        windows = np.arange(in_full_steps) // self._window
        full = full[np.lexsort((-self.lengths[full], windows))]
        count = in_full_steps // self._micro
        places = Bijection(count, (self._seed, "by length", epoch, "micro-batches"))(np.arange(count))
        moved = np.lexsort((places, windows[:: self._micro]))
        full = full.reshape(count, self._micro)[moved].reshape(-1)
        ids: Ids = np.concatenate([full, remaining[np.argsort(-self.lengths[remaining], kind="stable")]])
        return ids


class _Epoch(NamedTuple):
    """The micro-batches of an epoch by number, in turn, and where each begins in the order, with the end."""

    batches: Ids
    bounds: Ids


class TokenBatches:
    """Micro-batches of samples of like lengths: at most `tokens` padded tokens, which is their number times the longest, and at most `most` samples.

    No length is above `tokens`. Of all the samples it holds the ids by length, and nothing of an epoch but its micro-batches.
    """

    def __init__(self, lengths: Ids, tokens: int, most: int, seed: int, digest: str) -> None:
        self._seed = seed
        self.longest = max(1, int(lengths.max()))
        self._ids = np.argsort(lengths, kind="stable")
        self._in_order = in_order = lengths[self._ids]
        starts = np.flatnonzero(np.diff(in_order, prepend=-1))
        self._runs = np.append(starts, len(lengths))
        """Where the samples of each length begin among the ids by length."""
        self._of_runs = in_order[starts]
        self._cuts = token_cuts(self._of_runs, self._runs, tokens, most)
        self.count = len(self._cuts) - 1
        self.fields = {"data.train.lengths": digest, "data.train.token_batches": self.count}
        self._epoch = lru_cache(maxsize=EPOCHS_KEPT)(self._drawn)

    def _drawn(self, epoch: int) -> _Epoch:
        batches = Bijection(self.count, (self._seed, "by length", epoch, "micro-batches"))(
            np.arange(self.count)
        )
        bounds = np.zeros(self.count + 1, np.int64)
        np.cumsum(np.diff(self._cuts)[batches], out=bounds[1:])
        return _Epoch(batches, bounds)

    def bounds(self, epoch: int) -> Ids:
        """Where the micro-batches of an epoch begin in its order, and its end."""
        return self._epoch(epoch).bounds

    def largest(self) -> list[Ids]:
        """The ids of the micro-batch with the most padded tokens, and of that with the most pairs of them within a row, of which attention holds a number each."""
        longest = self._in_order[self._cuts[1:] - 1]
        tokens = np.diff(self._cuts) * longest
        pairs = tokens * longest
        most = {int(np.lexsort(order)[-1]) for order in ((pairs, tokens), (tokens, pairs))}
        return [self._ids[self._cuts[i] : self._cuts[i + 1]] for i in sorted(most)]

    def order(self, epoch: int, in_full_steps: int) -> Order:
        """The order of an epoch, computed for the positions that are asked."""
        return _TokenOrder(self, epoch)

    def ids(self, epoch: int, positions: Ids) -> Ids:
        """The ids at some positions of an epoch."""
        batches, bounds = self._epoch(epoch)
        batch = np.searchsorted(bounds, positions, side="right") - 1
        by_length = self._cuts[batches[batch]] + positions - bounds[batch]
        run = np.searchsorted(self._runs, by_length, side="right") - 1
        for each in np.unique(run).tolist():  # samples of one length change places in every epoch
            mask, start = run == each, int(self._runs[each])
            key = (self._seed, "by length", epoch, int(self._of_runs[each]))
            by_length[mask] = start + Bijection(int(self._runs[each + 1]) - start, key)(
                by_length[mask] - start
            )
        ids: Ids = self._ids[by_length]
        return ids


class _TokenOrder:
    def __init__(self, batches: TokenBatches, epoch: int) -> None:
        self._batches, self._epoch = batches, epoch

    def __getitem__(self, positions: slice) -> Ids:
        asked = np.arange(positions.start, positions.stop, positions.step or 1, dtype=np.int64)
        return self._batches.ids(self._epoch, asked)


def token_cuts(lengths: Ids, runs: Ids, tokens: int, most: int) -> NDArray[np.int64]:
    """Where micro-batches begin among samples in rising order of length, and the end.

    Samples runs[i] … runs[i + 1] - 1 have the length lengths[i]. Each micro-batch takes samples in turn as long as it keeps both bounds.
    """
    cuts, begin = [np.zeros(1, np.int64)], 0
    for length, first, end in zip(lengths.tolist(), runs[:-1].tolist(), runs[1:].tolist(), strict=True):
        room = min(most, tokens // max(1, length))
        if end - begin > room:
            # Where the samples before already leave none of this length any room, it ends at them.
            cuts.append(np.arange(max(begin + room, first), end, room, dtype=np.int64))
            begin = int(cuts[-1][-1])
    return np.concatenate([*cuts, runs[-1:]])
