"""The sum of a step's gradients along one fixed binary tree, whatever number of workers share it out.

Floating-point addition does not associate, so a sum of M gradients has as many values as there are orders.
Here the order is that of the plan's tree over the micro-batches. A worker adds up the parts of the tree that
lie in its range (`TreeSum`); a DDP communication hook exchanges the rest, bucket by bucket, while backward goes
on (`TreeReduction`). `NativeReduction` is the hook for those who need no such order.

Invariants of the hook: collectives are issued in bucket order and from one place. A call finishes the bucket
before it, the last call finishes itself. No collective is issued from a future's callback: with two buckets
that hangs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lockstep.plan import Plan, Position, are_siblings, clip, nodes
from lockstep.training.exchange import Exchange
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

    `received`: what came from each rank, flat. Sent "whole": the k partial sums of every other rank, [k * N], and
    its `message` to the exchange behind them where one rides; the rank keeps its own sums. In "slices": the rank's
    slice of all partial sums, [k * N/W], and then the slices of the result. "summed": nothing, the collective adds
    in the bucket itself.
    """

    buffer: Tensor
    future: Future[Tensor]
    how: Literal["whole", "slices", "summed"]
    work: Any
    received: Sequence[Tensor] = ()
    kept: Gradients = field(default_factory=list)
    message: Tensor | None = None


class Reduction(ABC):
    """A communication hook: leaves in every bucket the sum over the ranks, and sends off the step's exchange.

    Rank r has k_r partial sums. A small bucket goes whole to every other rank, who adds up the sums by itself; on
    gloo that takes 0.8 of the processor time of an all-reduce. What the exchange has to say rides in the first
    bucket of a step if that is a small one. How a large bucket is spread is for the subclasses to say.
    """

    def __init__(self, group: Group, plan: Plan, parameters: Sequence[Tensor], exchange: Exchange) -> None:
        self.group = group
        self.ranges = plan.ranges(group.size)
        self.exchange = exchange
        self._index = {id(parameter): i for i, parameter in enumerate(parameters)}
        self._orders = [memory_order(parameter) for parameter in parameters]
        self._leaves = 0
        self._nodes: list[tuple[range, ...]] = []
        self._folded: list[Gradients] = []
        self._apart: list[Gradients] = []
        self._sent: _Bucket | None = None
        self._gathering: list[_Bucket] = []
        self._exchanged = self.finished = True

    @abstractmethod
    def _tree(self, position: Position) -> tuple[int, list[tuple[range, ...]]]:
        """The leaves of the tree that is added up, and which of its nodes each rank has."""

    @abstractmethod
    def _send_large(self, buffer: Tensor, future: Future[Tensor], sums: Gradients) -> _Bucket:
        """Send the partial sums of a large bucket."""

    def begin(self, position: Position, folded: list[Gradients], apart: list[Gradients]) -> None:
        """Prepare for the last backward of a step: what this worker has summed of its range so far."""
        self._leaves, self._nodes = self._tree(position)
        self._folded, self._apart = folded, apart
        self._sent, self._gathering = None, []
        self._exchanged = self.finished = False

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
                _finish(gathering, gathering.received[0])
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
        """Send this rank's partial sums to the others, and with the first bucket of a step the exchange."""
        sums = [*(torch.cat([gradient.reshape(-1) for gradient in total]) for total in apart), buffer]
        sums = sums[
            : len(self._nodes[self.group.rank])
        ]  # a worker without a micro-batch has none: zeros are no node
        most = max(map(len, self._nodes))
        small = most * (self.group.size - 1) * buffer.numel() * buffer.element_size() <= LATENCY_BYTES
        first, self._exchanged = not self._exchanged, True
        message = self.exchange.message.view(buffer.dtype) if first and small else None
        if first and message is None:
            self.exchange.send()
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        return (
            self._send_whole(buffer, future, sums, message)
            if small
            else self._send_large(buffer, future, sums)
        )

    def _send_whole(
        self, buffer: Tensor, future: Future[Tensor], sums: Gradients, message: Tensor | None = None
    ) -> _Bucket:
        """Every other rank is sent all partial sums, and the message behind them."""
        size, rank = self.group.size, self.group.rank
        chunk = sums if message is None else [*sums, message]
        extra = 0 if message is None else message.numel()
        lengths = [len(own) * buffer.numel() + extra for own in self._nodes]
        splits = [lengths[rank]] * size
        lengths[rank] = splits[rank] = 0
        received = buffer.new_empty(sum(lengths))
        work = _all_to_all(received, _joined(chunk * (size - 1), buffer), lengths, splits, self.group)
        return _Bucket(buffer, future, "whole", work, torch.split(received, lengths), sums, message)

    def _add(self, entry: _Bucket) -> None:
        """Once the sums are there, add them in tree order. That is the result, or a slice of it, for all ranks."""
        entry.work.wait()
        if entry.how == "summed":
            _finish(entry, entry.buffer)
            return
        tree = TreeSum(self._leaves)
        for rank, (own, received) in enumerate(zip(self._nodes, entry.received, strict=True)):
            parts: Sequence[Tensor] = entry.kept
            if entry.how == "slices" or rank != self.group.rank:
                width = entry.buffer.numel() if entry.how == "whole" else received.numel() // max(1, len(own))
                parts = torch.split(received[: len(own) * width], width)[: len(own)]
            for node, part in zip(own, parts, strict=True):
                tree.add(node, [part])
        root = tree.sums[0][1][0]
        if entry.how == "whole":
            self._arrived(entry)
            _finish(entry, root)
        else:
            gathered = root.new_empty(self.group.size * root.numel())
            entry.work = _all_gather(gathered, root, group=self.group.channel, async_op=True)
            entry.received = (gathered,)
            self._gathering.append(entry)

    def _arrived(self, entry: _Bucket) -> None:
        """Hand over the messages that came with a bucket."""
        if entry.message is None:
            return
        length = entry.message.numel()
        messages = [received[received.numel() - length :] for received in entry.received if received.numel()]
        messages.insert(self.group.rank, entry.message)
        self.exchange.arrived(torch.cat(messages).view(self.exchange.message.dtype))


class TreeReduction(Reduction):
    """Leaves the root of the tree over the step's micro-batches in every bucket: the same bits for every W.

    Of a large bucket each rank is given one slice of all partial sums, adds them in tree order, and the results are
    gathered. Two workers with one sum each swap their buckets instead, which takes gloo as long as an all-reduce.
    """

    def _tree(self, position: Position) -> tuple[int, list[tuple[range, ...]]]:
        leaves = position.micro_batches
        return leaves, [nodes(clip(r, leaves), leaves) for r in self.ranges]

    def _send_large(self, buffer: Tensor, future: Future[Tensor], sums: Gradients) -> _Bucket:
        size, numel = self.group.size, buffer.numel()
        counts = [len(own) for own in self._nodes]
        if size == 2 and max(counts) == 1:
            return self._send_whole(buffer, future, sums)
        width = -(-numel // size)
        lengths = [count * width for count in counts]
        received = buffer.new_empty(sum(lengths))
        splits = [len(sums) * width] * size
        work = _all_to_all(received, _in_slices(sums, size, width, buffer), lengths, splits, self.group)
        return _Bucket(buffer, future, "slices", work, torch.split(received, lengths))


class NativeReduction(Reduction):
    """Adds up the ranks' gradients, each one sum, as the backend likes to: other bits for another W."""

    def _tree(self, position: Position) -> tuple[int, list[tuple[range, ...]]]:
        size = self.group.size
        return size, [(range(rank, rank + 1),) for rank in range(size)]

    def _send_large(self, buffer: Tensor, future: Future[Tensor], sums: Gradients) -> _Bucket:
        work = dist.all_reduce(buffer, group=self.group.channel, async_op=True)
        return _Bucket(buffer, future, "summed", work)


def _all_to_all(
    received: Tensor, outgoing: Tensor, lengths: Sequence[int], splits: Sequence[int], group: Group
) -> Any:
    """Send `splits` numbers to each rank and receive `lengths` of them, without waiting."""
    return dist.all_to_all_single(
        received,
        outgoing,
        output_split_sizes=list(lengths),
        input_split_sizes=list(splits),
        group=group.channel,
        async_op=True,
    )


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
