"""The sum of a step's gradients along one fixed binary tree, whatever number of workers share it out.

Floating-point addition does not associate, so a sum of M gradients has as many values as there are orders.
Here the order is that of the plan's tree over the micro-batches. A worker adds up the parts of the tree that
lie in its range (`TreeSum`); a DDP communication hook exchanges the rest, bucket by bucket, while backward goes
on (`TreeReduction`).

Invariants of the hook: collectives are issued in bucket order and from one place. A call finishes the bucket
before it, the last call finishes itself. No collective is issued from a future's callback: with two buckets
that hangs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lockstep.plan import Plan, Position, are_siblings, clip, nodes
from lockstep.train.group import Group

Gradients = list[Tensor]


class TreeSum:
    """Partial sums of one tree over `leaves` leaves; two nodes are added as soon as both are there.

    Over n leaves in order it holds at most log2(n) + 1 sets of tensors.
    """

    def __init__(self, leaves: int) -> None:
        self.leaves = leaves
        self.sums: list[tuple[range, Gradients]] = []

    def add(self, node: range, gradients: Gradients) -> None:
        """Add the sum of the next node to the right. Takes the tensors over."""
        while self.sums and are_siblings(self.sums[-1][0], node, self.leaves):
            left, total = self.sums.pop()
            torch._foreach_add_(total, gradients)
            node, gradients = range(left.start, node.stop), total
        self.sums.append((node, gradients))

    def close(self, leaf: int) -> tuple[list[Gradients], list[Gradients]]:
        """End with `leaf`, whose own gradients are yet to come.

        Returns the sums to add to them, in this order, and the sums that stay apart, from left to right.
        """
        node, folded = range(leaf, leaf + 1), []
        while self.sums and are_siblings(self.sums[-1][0], node, self.leaves):
            left, total = self.sums.pop()
            folded.append(total)
            node = range(left.start, node.stop)
        apart = [total for _, total in self.sums]
        self.sums = []
        return folded, apart


@dataclass(slots=True)
class _Bucket:
    """A DDP bucket on its way: first its partial sums, then the slices of the result."""

    buffer: Tensor
    future: Future[Tensor]
    slices: Tensor | None = None  # [sum of k, L]: this rank's slice of every partial sum
    result: Tensor | None = None  # [W * L]
    work: Any = None


class TreeReduction:
    """The communication hook: leaves in every bucket the root of the tree, the same bits for every W.

    Rank r sends k_r partial sums. Each rank is given one slice of all of them, adds them in tree order, and the
    results are gathered. On two workers with k = 1 on both, the root is one addition and addition commutes, so
    a plain all-reduce is the tree.
    """

    def __init__(self, group: Group, plan: Plan, parameters: Sequence[Tensor]) -> None:
        self.group = group
        self.ranges = plan.ranges(group.size)
        self._index = {id(parameter): i for i, parameter in enumerate(parameters)}
        self._orders = [memory_order(parameter) for parameter in parameters]
        self._leaves = 0
        self._nodes: list[tuple[range, ...]] = []
        self._folded: list[Gradients] = []
        self._apart: list[Gradients] = []
        self._sent: list[_Bucket] = []
        self.finished = True

    def begin(self, position: Position, folded: list[Gradients], apart: list[Gradients]) -> None:
        """Prepare for the last backward of a step: what this worker has summed of its range so far."""
        self._leaves = position.micro_batches
        self._nodes = [nodes(clip(r, self._leaves), self._leaves) for r in self.ranges]
        self._folded, self._apart, self._sent = folded, apart, []
        self.finished = False

    def __call__(self, _state: object, bucket: Any) -> Future[Tensor]:
        gradients = bucket.gradients()
        indices = [self._index[id(parameter)] for parameter in bucket.parameters()]
        for total in self._folded:
            torch._foreach_add_(gradients, self._as_in_bucket(total, indices))
        if self.group.size == 2 and all(len(own) == 1 for own in self._nodes):
            self.finished = bucket.is_last()
            work = dist.all_reduce(bucket.buffer(), group=self.group.channel, async_op=True)
            return work.get_future().then(_first)  # type: ignore[no-any-return]
        return self._exchange(bucket, indices)

    def _exchange(self, bucket: Any, indices: list[int]) -> Future[Tensor]:
        buffer = bucket.buffer()
        devices = [buffer.device] if buffer.is_cuda else None
        entry = _Bucket(buffer, Future(devices=devices))
        if self._sent:
            self._gather(self._sent[-1])
        sets = [self._as_in_bucket(total, indices) for total in self._apart]
        self._scatter(entry, [torch.cat([gradient.reshape(-1) for gradient in total]) for total in sets])
        self._sent.append(entry)
        if bucket.is_last():
            self._gather(entry)
            for sent in self._sent:
                self._complete(sent)
            self._sent, self.finished = [], True
        return entry.future

    def _as_in_bucket(self, total: Gradients, indices: list[int]) -> Gradients:
        """Gradients as `GradBucket.gradients()` gives its own: with the right shapes, but the numbers in memory order."""
        orders = [(total[i], self._orders[i]) for i in indices]
        return [
            gradient if order is None else gradient.permute(order).reshape(gradient.shape)
            for gradient, order in orders
        ]

    def _scatter(self, entry: _Bucket, apart: list[Tensor]) -> None:
        """Send slice s of each of this rank's partial sums to rank s."""
        size, numel = self.group.size, entry.buffer.numel()
        width = -(-numel // size)
        counts = [len(own) for own in self._nodes]
        own = counts[self.group.rank]
        sums = [*apart, entry.buffer][:own]  # a worker without a micro-batch has none: its zeros are no node
        if own == 1 and numel == size * width:
            outgoing = sums[0]
        else:
            padded = entry.buffer.new_zeros(own, size * width)
            for row, total in zip(padded, sums, strict=True):
                row[:numel] = total
            outgoing = padded.view(own, size, width).transpose(0, 1).contiguous().view(-1)
        entry.slices = entry.buffer.new_empty(sum(counts), width)
        entry.work = dist.all_to_all_single(
            entry.slices.view(-1),
            outgoing,
            output_split_sizes=[count * width for count in counts],
            input_split_sizes=[own * width] * size,
            group=self.group.channel,
            async_op=True,
        )

    def _gather(self, entry: _Bucket) -> None:
        """Add the slices in tree order, and gather the results of all ranks."""
        assert entry.slices is not None
        entry.work.wait()
        tree = TreeSum(self._leaves)
        for node, part in zip((n for own in self._nodes for n in own), entry.slices, strict=True):
            tree.add(node, [part])
        root = tree.sums[0][1][0]
        entry.result = root.new_empty(self.group.size * root.numel())
        entry.work = all_gather(entry.result, root, group=self.group.channel, async_op=True)

    def _complete(self, entry: _Bucket) -> None:
        assert entry.result is not None
        entry.work.wait()
        entry.buffer.copy_(entry.result[: entry.buffer.numel()])
        entry.future.set_result(entry.buffer)


def memory_order(parameter: Tensor) -> tuple[int, ...] | None:
    """The dimensions of a parameter from the slowest to the quickest in memory, such as (0, 2, 3, 1) for channels last.

    None where that is their own order, or where the memory has gaps: DDP then lays the gradient out by its shape.
    """
    order = tuple(sorted(range(parameter.dim()), key=parameter.stride, reverse=True))
    in_order = order == tuple(range(parameter.dim()))
    return None if in_order or not parameter.permute(order).is_contiguous() else order


# The newer name of the same collective; the older one warns where both exist.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _first(future: Future[list[Tensor]]) -> Tensor:
    return future.value()[0]
