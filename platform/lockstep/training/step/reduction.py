"""The sum of a step's gradients along one fixed binary tree, however many workers share it.

Floating-point addition does not associate, so a sum of M gradients has as many values as there are orders.
Here the order is that of the plan's tree over the micro-batches. A worker adds up the parts of the tree that
lie in its range (`TreeSum`). A DDP communication hook exchanges the rest, bucket by bucket, while backward goes
on (`TreeReduction`). `NativeReduction` is the hook for runs that need no such order.

Invariants of the hook: collectives and messages are issued from one place, in an order that is the same on all ranks.
A bucket, or each piece of a large one, goes through rounds. A call to the hook sends its own bucket, then moves every earlier
piece one round on, the oldest first; the last call moves all of them to the end. No collective is issued from a future's
callback: with two buckets that hangs.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lockstep.communication.group import Group
from lockstep.plan import Plan, Position
from lockstep.reduction_tree import Stage, are_siblings, nodes, slices, stages
from lockstep.training.step.complex_as_real import real_views
from lockstep.training.step.step_exchange import Exchange

Gradients = list[Tensor]


def add_in_place(left: Gradients, right: Gradients) -> Gradients:
    """The sums of two sets of tensors, in the memory of the left one."""
    if left:
        torch._foreach_add_(left, right)
    return left


class TreeSum:
    """Partial sums of one tree over `leaves` leaves; two sibling nodes are added as soon as both exist.

    Over n leaves in order it holds at most log2(n) + 1 sets of tensors.
    """

    def __init__(self, leaves: int, add: Callable[[Gradients, Gradients], Gradients] = add_in_place) -> None:
        """`add` gives the sum of a left and a right set of tensors."""
        self.leaves, self._add = leaves, add
        self.sums: list[tuple[range, Gradients]] = []

    def add(self, node: range, gradients: Gradients) -> None:
        """Add the sum of the next node to the right. Takes ownership of the tensors."""
        while self.sums and are_siblings(self.sums[-1][0], node, self.leaves):
            left, total = self.sums.pop()
            node, gradients = range(left.start, node.stop), self._add(total, gradients)
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
        unfolded = [total for _, total in self.sums]
        self.sums = []
        return folded, unfolded


_NOTHING = torch.empty(0)

LATENCY_BYTES = 1 << 19
"""To save the latency of a second collective, a rank sends at most so many bytes."""


PIECE_BYTES = 1 << 20
"""Larger buckets are cut into pieces: so many bytes take many times the latency of their messages."""

MOST_PIECES = 4
"""The most pieces of a bucket: they keep as many stages busy, and more would cost more messages."""


Rounds = Iterator[Callable[[], None]]
"""The rounds of a piece of a bucket: each one sends something and yields the function that must be called to wait for it before the next."""


@dataclass(slots=True)
class _Piece:
    """A DDP bucket in flight, or a part of one: its rounds, and the function that waits for the current one."""

    rounds: Rounds
    over: Callable[[], None]
    wait: Callable[[], None] | None = None

    def advance(self) -> bool:
        """Wait for the current round and begin the next. False where there is none: the sum is then in its part of the buffer."""
        if self.wait is not None:
            self.wait()
        self.wait = None  # frees what was sent and received, before the next round needs memory
        self.wait = next(self.rounds, None)
        if self.wait is None:
            self.over()
        return self.wait is not None


class _Bucket:
    """A DDP bucket in flight, in pieces. DDP's future is set when all of them are done."""

    def __init__(self, buffer: Tensor, rounds: Sequence[Rounds]) -> None:
        self.future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        self._buffer, self._left = buffer, len(rounds)
        self.pieces = [_Piece(piece_rounds, self._over) for piece_rounds in rounds]

    def _over(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.future.set_result(self._buffer)


class Reduction(ABC):
    """A communication hook: it leaves in every bucket the sum over the ranks, and sends the step's exchange.

    Rank r has k_r partial sums. A small bucket goes whole to every other rank, which adds up the sums by itself: that is one wait
    instead of two, and on CPUs the training thread reads such messages itself (`communication.links`). The exchange travels in the first
    bucket of a step if that is a small one. Subclasses decide how a large bucket is spread.
    """

    def __init__(self, group: Group, plan: Plan, parameters: Sequence[Tensor], exchange: Exchange) -> None:
        self.group = group
        self.plan = plan
        self.exchange = exchange
        self._index = {id(parameter): i for i, parameter in enumerate(parameters)}
        self._orders = [memory_order(parameter) for parameter in parameters]
        self._leaves = 0
        self._nodes: list[tuple[range, ...]] = []
        self._folded: list[Gradients] = []
        self._apart: list[Gradients] = []
        self._moving: list[_Piece] = []
        self._exchanged = self.finished = True
        self._summed = 0
        """How many parameters the buckets so far have."""
        self._stages: tuple[Stage, ...] = ()
        self._pairs_up = False
        """Whether the tree of the ranks' sums pairs neighbours, then neighbouring pairs, and so on."""
        cuda = group.device.type == "cuda"
        self._stream = torch.cuda.Stream(group.device) if cuda else None  # type: ignore[no-untyped-call]
        """Carries what the hook launches, so that backward does not wait for messages."""
        self.held_up_s = 0.0
        """Seconds that backward has spent in the hook so far, by the host's clock: adding, sending and waiting that nothing hides."""
        self.observe: Callable[[Gradients, list[int]], None] | None = None
        """Called with the last micro-batch's own gradients, bucket by bucket, and the indices of their parameters."""

    @abstractmethod
    def _tree(self, position: Position) -> tuple[int, list[tuple[range, ...]]]:
        """The number of leaves of the tree, and the nodes of it that each rank has."""

    @abstractmethod
    def _large(self, buffer: Tensor, sums: Gradients) -> list[Rounds]:
        """The rounds of each piece of a large bucket. `sums` are this rank's partial sums, which may be overwritten."""

    def begin(self, position: Position, folded: list[Gradients], apart: list[Gradients]) -> None:
        """Prepare for the last backward of a step, with what this worker has summed of its range so far.

        Takes ownership of the gradients: each is freed as soon as its bucket is sent.
        """
        self._leaves, self._nodes = self._tree(position)
        self._pairs_up = self.group.size > 2 and pairs_up(self._nodes, self._leaves)
        self._folded, self._apart = folded, apart
        self._moving = []
        self._exchanged = self.finished = False
        self._summed = 0

    def __call__(self, _state: object, bucket: Any) -> Future[Tensor]:
        began = time.perf_counter()
        future = self._taken_up(bucket)
        self.held_up_s += time.perf_counter() - began
        return future

    def _taken_up(self, bucket: Any) -> Future[Tensor]:
        """Observe a bucket, then send it; on CUDA in the stream of the reduction."""
        gradients = gradients_of(bucket)
        indices = [self._index[id(parameter)] for parameter in bucket.parameters()]
        self._summed += len(indices)
        if self.observe is not None:
            self.observe(
                [logical(g, self._orders[i]) for g, i in zip(gradients, indices, strict=True)], indices
            )
        if self._stream is None:
            return self._send_and_move(bucket, gradients, indices)
        backward = torch.cuda.current_stream(self.group.device)
        self._stream.wait_stream(backward)
        with torch.cuda.stream(self._stream):
            future = self._send_and_move(bucket, gradients, indices)
        if bucket.is_last():
            backward.wait_stream(self._stream)
        return future

    def _send_and_move(self, bucket: Any, gradients: Gradients, indices: list[int]) -> Future[Tensor]:
        """Send a bucket, and move the earlier ones one round on."""
        for total in self._folded:
            torch._foreach_add_(gradients, self._taken(total, indices))
        sent = self._sent(bucket.buffer(), indices)
        self._moving = [*(older for older in self._moving if older.advance()), *sent.pieces]
        if bucket.is_last():
            while self._moving:
                self._moving = [older for older in self._moving if older.advance()]
            self._folded, self._apart = [], []
            self.finished = self._summed == len(self._orders)
        return sent.future

    def waiting(self) -> list[Tensor]:
        """The partial sums that wait for the last micro-batch's buckets."""
        return [tensor for total in (*self._folded, *self._apart) for tensor in total]

    def _taken(self, total: Gradients, indices: list[int]) -> Gradients:
        """Gradients laid out as `GradBucket.gradients()` gives its own: with the right shapes, but the elements in memory order.

        They are removed from `total`, so that their memory is free before the next bucket's is needed.
        """
        taken = []
        for i in indices:
            gradient, order, total[i] = total[i], self._orders[i], _NOTHING
            self._keep_memory(gradient)
            taken.append(gradient if order is None else gradient.permute(order).reshape(gradient.shape))
        return taken

    def _keep_memory(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor that backward's stream has made until the stream of the reduction has read it."""
        if self._stream is not None:
            tensor.record_stream(self._stream)

    def _sent(self, buffer: Tensor, indices: list[int]) -> _Bucket:
        """Send this rank's partial sums to the others, and the exchange with the first bucket of a step."""
        sums = [torch.cat([g.reshape(-1) for g in self._taken(total, indices)]) for total in self._apart]
        sums.append(buffer)
        sums = [numbers.view(-1) for numbers in real_views(sums)]
        # A worker without a micro-batch has no node: its zeros are not sent.
        del sums[len(self._nodes[self.group.rank]) :]
        # By the rank with the most sums: all ranks must choose the same way.
        most = max(map(len, self._nodes))
        small = most * (self.group.size - 1) * buffer.numel() * buffer.element_size() <= LATENCY_BYTES
        first, self._exchanged = not self._exchanged, True
        if first:
            self._keep_memory(self.exchange.message)
        message = self.exchange.message.view(buffer.dtype) if first and small else None
        if first and message is None:
            self.exchange.send()
        rounds = [self._whole(buffer, sums, message)] if small else self._large(buffer, sums)
        del sums  # from here on only the rounds hold them, and free them early
        sent = _Bucket(buffer, rounds)
        for piece in sent.pieces:
            piece.advance()
        return sent

    def _whole(self, buffer: Tensor, sums: Gradients, message: Tensor | None = None) -> Rounds:
        """Send all partial sums, with the message behind them, to every other rank; each adds them up by itself."""
        rank = self.group.rank
        chunk = sums if message is None else [*sums, message]
        extra = 0 if message is None else message.numel()
        lengths = [len(rank_nodes) * buffer.numel() + extra for rank_nodes in self._nodes]
        largest, lengths[rank] = max(lengths), 0
        outgoing = _joined(chunk, buffer)
        received, wait = self.group.swap(outgoing, lengths, largest)
        yield wait

        by_rank = list(torch.split(received, lengths))
        if message is not None:
            messages = [block[block.numel() - extra :] for block in by_rank if block.numel()]
            messages.insert(rank, message)
            self.exchange.arrived(torch.cat(messages).view(self.exchange.message.dtype))
        if self._pairs_up:
            by_rank[rank] = outgoing
            buffer.copy_(in_pairs(torch.cat(by_rank).view(self.group.size, -1)[:, : buffer.numel()]))
        else:
            parts = [
                block[: len(rank_nodes) * buffer.numel()]
                for block, rank_nodes in zip(by_rank, self._nodes, strict=True)
            ]
            # By a view: a bucket without elements has as many sums as any other.
            every = [
                sums if i == rank else part.view(len(rank_nodes), buffer.numel()).unbind()
                for i, (part, rank_nodes) in enumerate(zip(parts, self._nodes, strict=True))
            ]
            _put(buffer, *self._added(self._nodes, every))
        # A backend thread keeps the tensors of a finished work until it gets a turn to run: free the memory now.
        received.untyped_storage().resize_(0)
        if not any(outgoing is part for part in chunk):
            outgoing.untyped_storage().resize_(0)

    def _added(self, owned: Sequence[Sequence[range]], sums: Sequence[Sequence[Tensor]]) -> Gradients:
        """The sums of some ranks, by rank, added as far as the tree goes. The left operands are overwritten."""
        tree = TreeSum(self._leaves)
        for rank_nodes, parts in zip(owned, sums, strict=True):
            for node, part in zip(rank_nodes, parts, strict=True):
                tree.add(node, [part])
        return [total for _, (total,) in tree.sums]


class TreeReduction(Reduction):
    """Leaves the root of the tree over the step's micro-batches in every bucket: the same bits for every W.

    A large bucket is halved along the tree. With W = 2 * 2 * 2 ranks, r and r ^ 1 have sibling nodes and swap halves of
    them; then r and r ^ 2 swap quarters of the sums; then r ^ 4. If W has another factor p, p ranks share their
    slice among them. Each rank then has a slice of the root, and the stages run backwards to gather the others into the
    bucket. With k = 1 that takes the bytes of a ring, and for a power of two log2(W) messages each way. Where ranges do not
    fit the tree, a rank sends each of its nodes.
    """

    def _tree(self, position: Position) -> tuple[int, list[tuple[range, ...]]]:
        leaves = position.micro_batches
        ranges = self.plan.ranges(self.group.size, leaves)
        self._stages = stages(ranges, leaves)
        return leaves, [nodes(r, leaves) for r in ranges]

    def _large(self, buffer: Tensor, sums: Gradients) -> list[Rounds]:
        # Two ranks with one sum each swap whole buckets: as many bytes as halves there and back, in half as many rounds.
        if self.group.size == 2 and max(map(len, self._nodes)) == 1:
            return [self._whole(buffer, sums)]
        # While one piece crosses the network, the next is swapped inside the machine. Sent whole, a bucket of 12 MB took 1.7 times as
        # long as its bytes need on the network; in pieces, 1.2 times. On a GPU one stream carries all pieces, one after another.
        count = 1 if buffer.is_cuda else min(MOST_PIECES, -(-buffer.nbytes // PIECE_BYTES))
        cuts = slices(buffer.numel(), count)
        return [self._in_stages(buffer[cut], [total[cut] for total in sums]) for cut in cuts]

    def _in_stages(self, buffer: Tensor, sums: Gradients) -> Rounds:
        """Each round of the first half splits the rank's slice among a few ranks; each round of the second half gathers theirs."""
        rank = self.group.rank
        totals, start, stop = sums, 0, buffer.numel()
        largest = stop  # the longest slice of any rank: all must choose the same number of rounds, or their messages cross
        del sums  # a generator keeps its arguments alive, and these must be freed with the first stage
        gathers = []
        for stage in self._stages:
            peers, me = stage.peers(rank), stage.position(rank)
            owned = [stage.nodes[stage.block(peer)] for peer in peers]
            length = stop - start
            sends_whole = stage.sends_whole(largest * buffer.element_size(), LATENCY_BYTES)
            cuts = [slice(0, length)] * stage.ways if sends_whole else slices(length, stage.ways)
            largest = _length(slices(largest, stage.ways)[0])
            mine = cuts[me]
            others = [i for i in range(stage.ways) if i != me]
            outgoing = [(peers[i], _joined([total[cuts[i]] for total in totals], buffer)) for i in others]
            incoming = [(peers[i], buffer.new_empty(len(owned[i]) * _length(mine))) for i in others]
            yield self.group.pass_on(outgoing, incoming)
            received: list[Sequence[Tensor]] = [
                part.view(len(owned[i]), _length(mine)).unbind()
                for i, (_, part) in zip(others, incoming, strict=True)
            ]
            received.insert(me, [total[mine] for total in totals])
            del outgoing, incoming
            totals = self._added(owned, received)
            del received
            if not sends_whole:
                gathers.append((peers, [slice(start + cut.start, start + cut.stop) for cut in cuts]))
            start, stop = start + mine.start, start + mine.stop
        _put(buffer[start:stop], *totals)
        totals.clear()
        for peers, cuts in reversed(gathers):
            summed = buffer[cuts[peers.index(rank)]]
            parts = [(peer, buffer[cut]) for peer, cut in zip(peers, cuts, strict=True) if peer != rank]
            yield self.group.pass_on([(peer, summed) for peer, _ in parts], parts)


class NativeReduction(Reduction):
    """Adds up the ranks' gradients, each one sum, in the backend's own order: other bits for another W."""

    def _tree(self, position: Position) -> tuple[int, list[tuple[range, ...]]]:
        size = self.group.size
        return size, [(range(rank, rank + 1),) for rank in range(size)]

    def _large(self, buffer: Tensor, sums: Gradients) -> list[Rounds]:
        return [self._by_backend(buffer)]

    def _by_backend(self, buffer: Tensor) -> Rounds:
        yield partial(self.group.wait, dist.all_reduce(buffer, group=self.group.channel, async_op=True))


def pairs_up(owned: Sequence[Sequence[range]], leaves: int) -> bool:
    """Whether each rank has one node, neighbours have siblings, pairs of neighbours too, and so on up to the root."""
    if any(len(rank_nodes) != 1 for rank_nodes in owned):
        return False
    level = [rank_nodes[0] for rank_nodes in owned]
    while len(level) > 1:
        pairs = list(zip(level[0::2], level[1::2], strict=False))
        if len(level) % 2 or not all(are_siblings(left, right, leaves) for left, right in pairs):
            return False
        level = [range(left.start, right.stop) for left, right in pairs]
    return True


def in_pairs(rows: Tensor) -> Tensor:
    """The sum of a power of two of rows, added as a tree: one launch for each level, and no more than one copy of half of them."""
    while len(rows) > 1:
        rows = rows[0::2] + rows[1::2]
    return rows[0]


def _length(cut: slice) -> int:
    return int(cut.stop - cut.start)


def _put(target: Tensor, result: Tensor) -> None:
    """Copy the result to its target, unless it was summed there."""
    if result.data_ptr() != target.data_ptr():
        target.copy_(result)


def _joined(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """The tensors concatenated; a single one is not copied."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(list(tensors)) if tensors else like.new_empty(0)


def gradients_of(bucket: Any) -> Gradients:
    """`GradBucket.gradients()`, complex ones as well: DDP gives their bucket as real numbers, and cuts it as if there were half as many."""
    parameters = bucket.parameters()
    if not parameters[0].is_complex():
        gradients: Gradients = bucket.gradients()
        return gradients
    numbers = torch.view_as_complex(bucket.buffer().view(-1, 2))
    parts = torch.split(numbers, [parameter.numel() for parameter in parameters])
    return [part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]


def memory_order(parameter: Tensor) -> tuple[int, ...] | None:
    """The dimensions of a parameter from the slowest to the fastest in memory, such as (0, 2, 3, 1) for channels last.

    None where that is their own order, or where the memory has gaps: DDP then lays the gradient out by its shape.
    """
    order = tuple(sorted(range(parameter.dim()), key=parameter.stride, reverse=True))
    in_order = order == tuple(range(parameter.dim()))
    return None if in_order or not parameter.permute(order).is_contiguous() else order


def logical(gradient: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """A gradient of `GradBucket.gradients()`, whose elements are in `memory_order`, in the order of its shape."""
    if order is None:
        return gradient
    in_memory = gradient.reshape([gradient.shape[dimension] for dimension in order])
    return in_memory.permute([order.index(dimension) for dimension in range(len(order))])
