"""A mixture of datasets by weight: which sample of which source an epoch visits where is a pure function of (seed, epoch, position).

Each epoch has `samples` positions. Source s gets its share of them by weight, whole numbers by largest remainder. Its draws are
numbered through the whole run, and go through the source pass by pass: a keyed bijection of its samples for each pass. So a source
with a small share shows other samples in the next epoch, one with a large share repeats none before all were seen, and
neither a resume nor the number of workers needs any state.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Subset

from lockstep.data import problems
from lockstep.data.dataset import checks_order, draws_nothing, is_table
from lockstep.data.fingerprint import fingerprint, of_part
from lockstep.data.order import Bijection, Ids
from lockstep.errors import LockstepError

Weights = Mapping[str, float]


class Mixture(Dataset[Any]):
    """Samples of several datasets, mixed in each epoch in proportion to `weights`.

    `sources` are map-style datasets by name. `weights` maps the same names to numbers, with any sum, or an epoch number to such
    a mapping that applies from that epoch on: `{0: {…}, 3: {…}}`. `samples` is the length of an epoch; default: all samples of the
    sources together. An id stands for one sample of one source (`source_of`); ids beyond the last one start over. Raises JobError if
    the arguments do not fit together.
    """

    def __init__(
        self,
        sources: Mapping[str, Dataset[Any]],
        weights: Weights | Mapping[int, Weights],
        samples: int | None = None,
    ) -> None:
        self.sources = dict(sources)
        self._datasets: list[Any] = list(self.sources.values())
        self.sizes = [_size(name, source) for name, source in self.sources.items()]
        self._first = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        self.samples = sum(self.sizes) if samples is None else samples
        if self.samples < 1:
            raise problems.MIXTURE_SAMPLES(got=self.samples)
        self.weights = _by_epoch(weights, self.sources)
        self._counts = {epoch: apportioned(self.samples, shares) for epoch, shares in self.weights.items()}

    @property
    def draws_nothing(self) -> bool:
        """Whether no source draws anything in a fetch."""
        return all(map(draws_nothing, self._datasets))

    @property
    def id_count(self) -> int:
        """Samples of all sources together, which the ids stand for. An epoch may have fewer or more."""
        return sum(self.sizes)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, sample_id: int) -> Any:
        s, index = self._locate(sample_id)
        return self._datasets[s][index]

    def source_of(self, sample_id: int) -> tuple[str, int]:
        """The name of the source that an id is from, and the index there."""
        s, index = self._locate(sample_id)
        return list(self.sources)[s], index

    def _locate(self, sample_id: int) -> tuple[int, int]:
        within = sample_id % self.id_count
        s = int(np.searchsorted(self._first, within, side="right")) - 1
        return s, within - self._first[s]

    def counts(self, epoch: int) -> dict[str, int]:
        """How many samples of each source an epoch has."""
        return dict(zip(self.sources, self._counts[self._since(epoch)], strict=True))

    def _since(self, epoch: int) -> int:
        """The epoch from which on the weights of `epoch` hold."""
        return max(start for start in self.weights if start <= epoch)

    def epoch_order(self, seed: int, epoch: int, shuffle: str) -> MixtureOrder:
        """The ids of an epoch; with `shuffle` none, source after source and each in its own order."""
        drawn = [0] * len(self.sizes)
        starts = [*self.weights, epoch]
        for start, end in pairwise(starts):
            for s, count in enumerate(self._counts[start]):
                drawn[s] += count * max(0, min(end, epoch) - start)
        counts = self._counts[self._since(epoch)]
        key = None if shuffle == "none" else (seed, "mixture")
        return MixtureOrder(counts, drawn, self.sizes, self._first, epoch, key)

    def check_order(self, shuffle: str, window: int) -> None:
        """Raises SpecError where an order needs blocks, or a source cannot be read in any order."""
        if shuffle == "blocks":
            raise problems.MIXTURE_BLOCKS()
        for source in self._datasets:
            if checks_order(source):
                source.check_order("hashed", window)

    def fingerprint(self, left_out: Callable[[int], bool] = lambda _: False) -> dict[str, Any]:
        """What the sources are, and how they are mixed. A sample whose id is `left_out` is not read."""
        fields: dict[str, Any] = {"samples_per_epoch": self.samples, "weights": json.dumps(self.weights)}
        for (name, source), size, first in zip(self.sources.items(), self.sizes, self._first, strict=True):
            try:
                of_source = fingerprint(source, size, 0, lambda index, first=first: left_out(first + index))  # type: ignore[misc]
            except LockstepError as error:
                raise of_part(
                    error,
                    lambda what, name=name: f"{what} of source {name!r}",  # type: ignore[misc]
                    lambda index, first=first: range(first + index, first + index + 1),  # type: ignore[misc]
                ) from error.__cause__
            fields |= {f"{name}.{field}": value for field, value in of_source.items()}
            fields[f"{name}.size"] = size
        return fields


class MixtureOrder:
    """One epoch of a mixture, read at any position.

    `counts` are the draws of each source in it, `drawn` those before it; `first` is the id of each source's first sample.
    """

    def __init__(
        self,
        counts: Sequence[int],
        drawn: Sequence[int],
        sizes: Sequence[int],
        first: Sequence[int],
        epoch: int,
        key: tuple[int | str, ...] | None,
    ) -> None:
        self._ends = np.cumsum(np.asarray(counts, np.int64))
        self._counts, self._drawn, self._sizes, self._first = counts, drawn, sizes, first
        self._key = key
        self._mixed = None if key is None else Bijection(int(self._ends[-1]), (*key, "epoch", epoch))

    def __getitem__(self, positions: slice) -> Ids:
        places = np.arange(positions.start, positions.stop, positions.step or 1, dtype=np.int64)
        if self._mixed is not None:
            places = self._mixed(places)
        source = np.searchsorted(self._ends, places, side="right")
        ids = np.empty_like(places)
        for s in np.unique(source).tolist():
            mask = source == s
            draws = places[mask] - (int(self._ends[s]) - self._counts[s]) + self._drawn[s]
            ids[mask] = self._first[s] + self._indices(s, draws)
        return ids

    def _indices(self, s: int, draws: Ids) -> Ids:
        """Indices in source number s of its draws, numbered through the run."""
        passes, within = np.divmod(draws, self._sizes[s])
        if self._key is None:
            return within
        indices = np.empty_like(within)
        for number in np.unique(passes).tolist():
            mask = passes == number
            indices[mask] = Bijection(self._sizes[s], (*self._key, s, number))(within[mask])
        return indices


def apportioned(samples: int, shares: Weights) -> list[int]:
    """`samples` in whole numbers by weight: the largest remainders get what is left over, of equal ones the first."""
    total = math.fsum(shares.values())
    exact = [samples * weight / total for weight in shares.values()]
    counts = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda s: (counts[s] - exact[s], s))
    for s in by_remainder[: samples - sum(counts)]:
        counts[s] += 1
    return counts


def _size(name: str, source: Any) -> int:
    if is_table(source):
        raise problems.MIXTURE_TABLE(name=name)
    whole = source
    while isinstance(whole, Subset):
        whole = whole.dataset
    if isinstance(whole, Mixture):
        raise problems.MIXTURE_OF_MIXTURE(name=name)
    if not hasattr(type(source), "__len__") or not hasattr(type(source), "__getitem__"):
        raise problems.MIXTURE_SOURCE(name=name, got=type(source).__name__)
    return len(source)


def _by_epoch(weights: Any, sources: Mapping[str, Any]) -> dict[int, dict[str, float]]:
    """Weights by the epoch from which on they hold, each in the order of the sources."""
    table = (
        dict(sorted(weights.items()))
        if weights and all(type(key) is int for key in weights)
        else {0: weights}
    )
    if min(table, default=-1) != 0:
        raise problems.MIXTURE_FIRST_EPOCH()
    for epoch, shares in table.items():
        if not isinstance(shares, Mapping) or shares.keys() != sources.keys():
            got = sorted(shares) if isinstance(shares, Mapping) else type(shares).__name__
            raise problems.MIXTURE_OTHER_SOURCES(got=got, wanted=sorted(sources))
        if not all(math.isfinite(weight) and weight >= 0 for weight in shares.values()) or not any(
            shares.values()
        ):
            raise problems.MIXTURE_WEIGHTS(got=dict(shares))
        empty = [name for name, source in sources.items() if shares[name] and not len(source)]
        if empty:
            raise problems.MIXTURE_EMPTY_SOURCE(name=empty[0])
        table[epoch] = {name: float(shares[name]) for name in sources}
    return table
