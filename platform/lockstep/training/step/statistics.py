"""Statistics of a whole step, for `after_step`: sums along the tree of its micro-batches, and rows of all samples in the order of the epoch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.communication.group import Group
from lockstep.data.order import Ids
from lockstep.job.interface import Job, Mean, overrides
from lockstep.plan import Plan
from lockstep.reduction_tree import nodes
from lockstep.tensor_bytes import row_of
from lockstep.training.step import problems
from lockstep.training.step.reduction import TreeSum
from lockstep.training.step.sample_rows import StepRows

Statistics = Mapping[str, Mean | Tensor]


class _Kind(NamedTuple):
    """A mean's tensors: dtype and shape of its total and of its weight."""

    total: tuple[torch.dtype, tuple[int, ...]]
    weight: tuple[torch.dtype, tuple[int, ...]]


class StepStatistics:
    """Collects the statistics of a worker's micro-batches, and gives every rank those of the step."""

    def __init__(self, group: Group, plan: Plan, label: str) -> None:
        self._group, self._label = group, label
        self._ranges = partial(plan.ranges, group.size)
        self._rows = StepRows(group, self._ranges, label)
        self._kinds: dict[str, _Kind] | None = None
        self._agreed = False
        self._given: dict[int, dict[str, object]] = {}
        self._of_step: dict[str, Mean | Tensor] = {}
        self._places: Sequence[Ids] = ()

    def begin(self, places: Sequence[Ids]) -> None:
        """Begin a step. `places` are those of the samples of each micro-batch."""
        self._given, self._of_step, self._places = {}, {}, places
        self._rows.begin(places)

    def note(self, m: int, statistics: object, label: str) -> None:
        """Add statistics of micro-batch `m`, in memory of their own."""
        self._given.setdefault(m, {}).update(own_statistics(statistics, label))

    def note_whole(self, statistics: Statistics, label: str) -> None:
        """Add statistics that are those of the whole step already, on every rank."""
        self._of_step |= own_statistics(statistics, label)

    def gather(self, where: str) -> dict[str, Mean | Tensor]:
        """The statistics of the step, the same on every rank. All ranks call it; nothing may be lost after it and before the update."""
        means: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}
        for m, given in sorted(self._given.items()):
            rows = {name: value for name, value in given.items() if not isinstance(value, Mean)}
            self._rows.note(m, rows, where)
            means[m] = {name: _tensors(value) for name, value in given.items() if isinstance(value, Mean)}
            self._check(means[m], where)
        self._agree()
        gathered = self._rows.gather()
        return {**self._sums(means), **gathered, **self._of_step}

    def _check(self, means: Mapping[str, tuple[Tensor, Tensor]], where: str) -> None:
        kinds = {name: _Kind(_kind(total), _kind(weight)) for name, (total, weight) in means.items()}
        if self._kinds is None:
            self._kinds = kinds
        if kinds != self._kinds:
            odd = next(n for n in {**self._kinds, **kinds} if kinds.get(n) != self._kinds.get(n))
            raise problems.OTHER_STATISTICS(
                label=self._label,
                got=f"the mean {odd!r} is {_shown(kinds.get(odd))}{where}, and {_shown(self._kinds.get(odd))} in the micro-batch before",
            )

    def _agree(self) -> None:
        """In the first step of a group: have a rank without a micro-batch know what the others give."""
        if self._agreed:
            return
        known = [kinds for kinds in self._group.gather(self._kinds) if kinds is not None]
        if known and any(kinds != known[0] for kinds in known):
            raise problems.OTHER_STATISTICS(
                label=self._label, got="the means differ in type or shape from one micro-batch to another"
            )
        self._kinds, self._agreed = known[0] if known else {}, True

    def _sums(self, means: Mapping[int, Mapping[str, tuple[Tensor, Tensor]]]) -> dict[str, Mean]:
        """The sums of the means' totals and weights over all micro-batches, each along the tree."""
        kinds, leaves, group = self._kinds or {}, len(self._places), self._group
        if not kinds:
            return {}
        flat = [kind for pair in kinds.values() for kind in pair]
        tree = TreeSum(leaves)
        for m in self._ranges(leaves)[group.rank]:
            own = means.get(m)
            values = (
                [torch.zeros(shape, dtype=dtype, device=group.device) for dtype, shape in flat]
                if own is None
                else [value.to(group.device) for name in kinds for value in own[name]]
            )
            tree.add(range(m, m + 1), values)
        if group.size > 1:
            tree = self._joined(tree, flat, leaves)
        ((_, sums),) = tree.sums
        pairs = zip(sums[::2], sums[1::2], strict=True)
        return {name: Mean(total, weight) for name, (total, weight) in zip(kinds, pairs, strict=True)}

    def _joined(
        self, own: TreeSum, flat: Sequence[tuple[torch.dtype, tuple[int, ...]]], leaves: int
    ) -> TreeSum:
        """The partial sums of all ranks added, in the order of the tree."""
        group = self._group
        sizes = [dtype.itemsize * torch.Size(shape).numel() for dtype, shape in flat]
        of_ranks = [nodes(assigned, leaves) for assigned in self._ranges(leaves)]
        parts = [row_of(value).view(torch.uint8) for _, values in own.sums for value in values]
        message = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=group.device)
        lengths = [len(rank_nodes) * sum(sizes) for rank_nodes in of_ranks]
        largest, lengths[group.rank] = max(lengths), 0
        received, wait = group.swap(message, lengths, largest)
        wait()
        blocks = list(torch.split(received, lengths))
        blocks[group.rank] = message
        sums: dict[range, list[Tensor]] = {}
        for rank_nodes, block in zip(of_ranks, blocks, strict=True):
            contents = iter(torch.split(block, sizes * len(rank_nodes)))
            for node in rank_nodes:
                # Copied first: a view of another type must start aligned, and sums are added in place.
                sums[node] = [next(contents).clone().view(dtype).view(shape) for dtype, shape in flat]
        tree = TreeSum(leaves)
        for node in sorted(sums, key=lambda node: node.start):
            tree.add(node, sums[node])
        return tree


def _kind(value: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return value.dtype, tuple(value.shape)


def _shown(kind: _Kind | None) -> str:
    return "not given" if kind is None else f"{kind.total[0]} of shape {kind.total[1]}"


def _tensors(mean: Mean) -> tuple[Tensor, Tensor]:
    """Total and weight as tensors; numbers in float64."""
    values = (mean.total, mean.weight)
    total, weight = (
        value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
        for value in values
    )
    return total, weight


def own_statistics(statistics: object, label: str) -> dict[str, Mean | Tensor]:
    """Statistics without their graph and in memory of their own. JobError for what is neither a mean nor rows; `label` is what returned them."""
    if not isinstance(statistics, Mapping):
        raise problems.STATISTICS_KIND(
            label=label,
            what="returned",
            got=type(statistics).__name__,
            wanted="means or tensors of rows by name, empty for none",
        )
    own: dict[str, Mean | Tensor] = {}
    for name, value in statistics.items():
        if isinstance(value, Mean):
            total, weight = (each.detach().clone() for each in _tensors(value))
            own[str(name)] = Mean(total, weight)
        elif isinstance(value, Tensor):
            own[str(name)] = value.detach().clone()
        else:
            raise problems.STATISTICS_KIND(
                label=label,
                what=f"the statistic {name!r} is",
                got=type(value).__name__,
                wanted="lockstep.Mean(total, weight), or a tensor with a row for each sample",
            )
    return own


def takes_statistics(job: Job) -> bool:
    """Whether the job's `after_step` takes what the step has gathered, as an argument `statistics`."""
    return overrides(job, "after_step") and "statistics" in inspect.signature(job.after_step).parameters


def rehearsed(each: Sequence[Statistics], samples: int) -> dict[str, Mean | Tensor]:
    """Statistics of a step on trial, of fewer micro-batches: sums, and as many rows as a step has samples, repeated."""
    joined: dict[str, Mean | Tensor] = {}
    for name, first in each[0].items():
        values = [statistics[name] for statistics in each if name in statistics]
        if isinstance(first, Mean):
            pairs = [_tensors(value) for value in values if isinstance(value, Mean)]
            totals, weights = zip(*pairs, strict=True)
            joined[name] = Mean(sum(totals[1:], totals[0]), sum(weights[1:], weights[0]))
        else:
            rows = torch.cat([value for value in values if isinstance(value, Tensor)])
            joined[name] = rows[torch.arange(samples, device=rows.device) % max(1, len(rows))]
    return joined
