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
from lockstep.training.group import Group

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


LATENCY_BYTES = 1 << 19
"""What the latency of a second collective is worth: to save it, a rank sends at most so much."""


@dataclass(slots=True)
class _Bucket:
    """A DDP bucket of N numbers on its way.

    `whole`: the rank keeps its own partial sums and receives those of the others, [k, N]. Else it receives its
    slice of all of them, [k, N/W], and then the slices of the result.
    """

    buffer: Tensor
    future: Future[Tensor]
    whole: bool
    kept: Gradients
    received: Tensor
    work: Any = None


class TreeReduction:
    """The communication hook: leaves in every bucket the root of the tree, the same bits for every W.

    Rank r has k_r partial sums. Each rank is given one slice of all of them, adds them in tree order, and the
    results are gathered. Where it sends hardly more, each rank is given all of them whole and there is nothing to
    gather: small buckets, and two workers with k = 1, which swap their buckets. On gloo the swap of a small
    bucket takes 0.8 of the processor time of an all-reduce, and that of a large one as much.
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
        self._sent: _Bucket | None = None
        self._gathering: list[_Bucket] = []
        self.finished = True

    def begin(self, position: Position, folded: list[Gradients], apart: list[Gradients]) -> None:
        """Prepare for the last backward of a step: what this worker has summed of its range so far."""
        self._leaves = position.micro_batches
        self._nodes = [nodes(clip(r, self._leaves), self._leaves) for r in self.ranges]
        self._folded, self._apart = folded, apart
        self._sent, self._gathering, self.finished = None, [], False

    def __call__(self, _state: object, bucket: Any) -> Future[Tensor]:
        gradients = bucket.gradients()
        indices = [self._index[id(parameter)] for parameter in bucket.parameters()]
        for total in self._folded:
            torch._foreach_add_(gradients, self._as_in_bucket(total, indices))
        entry = self._send(bucket.buffer(), [self._as_in_bucket(total, indices) for total in self._apart])
        if self._sent is not None:
            self._add(self._sent)
        self._sent = entry
        if bucket.is_last():
            self._add(entry)
            for gathering in self._gathering:
                gathering.work.wait()
                _finish(gathering, gathering.received)
            self._sent, self._gathering, self.finished = None, [], True
        return entry.future

    def _as_in_bucket(self, total: Gradients, indices: list[int]) -> Gradients:
        """Gradients as `GradBucket.gradients()` gives its own: with the right shapes, but the numbers in memory order."""
        orders = [(total[i], self._orders[i]) for i in indices]
        return [
            gradient if order is None else gradient.permute(order).reshape(gradient.shape)
            for gradient, order in orders
        ]

    def _send(self, buffer: Tensor, apart: list[Gradients]) -> _Bucket:
        """Send this rank's partial sums to the others, all of them or to each its slice."""
        size, rank, numel = self.group.size, self.group.rank, buffer.numel()
        counts = [len(own) for own in self._nodes]
        own, most = counts[rank], max(counts)
        sums = [*(torch.cat([gradient.reshape(-1) for gradient in total]) for total in apart), buffer]
        sums = sums[:own]  # a worker without a micro-batch has none: its zeros are no node
        swap = size == 2 and most == 1
        whole = swap or most * (size - 1) * numel * buffer.element_size() <= LATENCY_BYTES
        if whole:
            width, counts[rank] = numel, 0
            outgoing = _joined(sums * (size - 1), buffer)
            splits = [0 if other == rank else own * width for other in range(size)]
        else:
            width = -(-numel // size)
            outgoing = _in_slices(sums, size, width, buffer)
            splits = [own * width] * size
        received = buffer.new_empty(sum(counts), width)
        work = dist.all_to_all_single(
            received.view(-1),
            outgoing,
            output_split_sizes=[count * width for count in counts],
            input_split_sizes=splits,
            group=self.group.channel,
            async_op=True,
        )
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        return _Bucket(buffer, future, whole, sums if whole else [], received, work)

    def _add(self, entry: _Bucket) -> None:
        """Add the partial sums in tree order. That is the result, or a slice of it, which goes to all ranks."""
        entry.work.wait()
        parts = list(entry.received)
        first = sum(len(own) for own in self._nodes[: self.group.rank])
        parts[first:first] = entry.kept
        tree = TreeSum(self._leaves)
        for node, part in zip((n for own in self._nodes for n in own), parts, strict=True):
            tree.add(node, [part])
        root = tree.sums[0][1][0]
        if entry.whole:
            _finish(entry, root)
        else:
            entry.received = root.new_empty(self.group.size * root.numel())
            entry.work = _all_gather(entry.received, root, group=self.group.channel, async_op=True)
            self._gathering.append(entry)


def _finish(entry: _Bucket, result: Tensor) -> None:
    """Put the result into the bucket, and tell DDP."""
    if result is not entry.buffer:
        entry.buffer.copy_(result[: entry.buffer.numel()])
    entry.future.set_result(entry.buffer)


def _joined(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """The tensors one after another; the only one is not copied."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(list(tensors)) if tensors else like.new_empty(0)


def _in_slices(sums: Sequence[Tensor], size: int, width: int, like: Tensor) -> Tensor:
    """Slice 0 of each sum, then slice 1 of each …, the last ones filled up with zeros: [size * sums * width]."""
    if len(sums) == 1 and sums[0].numel() == size * width:
        return sums[0]
    padded = like.new_zeros(len(sums), size * width)
    for row, total in zip(padded, sums, strict=True):
        row[: total.numel()] = total
    return padded.view(len(sums), size, width).transpose(0, 1).reshape(-1)


def memory_order(parameter: Tensor) -> tuple[int, ...] | None:
    """The dimensions of a parameter from the slowest to the quickest in memory, such as (0, 2, 3, 1) for channels last.

    None where that is their own order, or where the memory has gaps: DDP then lays the gradient out by its shape.
    """
    order = tuple(sorted(range(parameter.dim()), key=parameter.stride, reverse=True))
    in_order = order == tuple(range(parameter.dim()))
    return None if in_order or not parameter.permute(order).is_contiguous() else order


# The newer name of the same collective; the older one warns where both exist.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
