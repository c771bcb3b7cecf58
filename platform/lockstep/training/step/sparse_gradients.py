"""Tables: parameters whose gradients have rows, because a micro-batch touches a few of theirs, as `nn.Embedding(sparse=True)` gives them.

Such a gradient is a sparse tensor: indices of rows, in rising order and each once, and a row of values for each. The sum of two has the rows of
both; a row that both have is the left one's plus the right one's. They are added along the same tree as dense gradients, so each row's sum
is what the tree gives where the table is dense, without the zeros. Nothing here is as long as a table: neither memory nor messages.

A rank sends the rows of its partial sums to every other rank, and each adds them up by itself. Half as many could be sent to some, as
of a dense bucket, but then all would have to be told which rows there are first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from lockstep.communication.group import Group
from lockstep.plan import Plan
from lockstep.reduction_tree import clip, nodes
from lockstep.tensor_bytes import row_of
from lockstep.training import problems
from lockstep.training.step.joined_optimizer import members_of
from lockstep.training.step.reduction import Gradients, TreeSum


def declared_tables(model: nn.Module) -> frozenset[str]:
    """The names of the weights of modules that are asked for sparse gradients. Another use of the same weight may make its gradient dense all the same."""
    weights = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in weights)


def check_optimizer(optimizer: torch.optim.Optimizer, tables: Mapping[str, Tensor]) -> None:
    """JobError where one of torch's own optimizers has a table that it cannot update by rows: SGD's momentum would keep all rows that it ever met."""
    names = {id(table): name for name, table in tables.items()}
    for member in members_of(optimizer):
        kind, module = type(member).__name__, type(member).__module__
        for group in member.param_groups if module.startswith("torch.optim.") else ():
            first = next((names[id(p)] for p in group["params"] if id(p) in names), None)
            moving = next((name for name in ("momentum", "weight_decay") if group.get(name)), None)
            if first is not None and (kind not in _BY_ROWS or moving is not None):
                settings = f" with {moving}" if kind in _BY_ROWS else ""
                raise problems.SPARSE_OPTIMIZER(kind=kind, settings=settings, name=first)


_BY_ROWS = ("SparseAdam", "SGD", "Adagrad")
"""torch's optimizers that update the rows of a sparse gradient and no others."""


def no_rows(table: Tensor) -> Tensor:
    """A gradient of a table without a row."""
    return torch.sparse_coo_tensor(
        torch.empty((1, 0), dtype=torch.int64, device=table.device),
        table.new_empty((0, *table.shape[1:])),
        table.shape,
        is_coalesced=True,
        check_invariants=False,
    )


def added_by_row(left: Tensor, right: Tensor) -> Tensor:
    """The sum of two gradients of a table, row by row."""
    indices = torch.cat([left._indices(), right._indices()], 1)
    values = torch.cat([left._values(), right._values()])
    return torch.sparse_coo_tensor(indices, values, left.shape, check_invariants=False).coalesce()


def numbers_of(gradient: Tensor) -> Tensor:
    """The numbers of a gradient in its own memory: all of a dense one, the rows of a sparse one."""
    return gradient._values() if gradient.is_sparse else gradient


def _add(left: Gradients, right: Gradients) -> Gradients:
    return [added_by_row(a, b) for a, b in zip(left, right, strict=True)]


class TableSums:
    """The gradients of a phase's tables in a step: those of this rank's micro-batches, then the sum of all ranks'."""

    def __init__(self, tables: Mapping[str, nn.Parameter], group: Group, plan: Plan) -> None:
        self.names, self.parameters = list(tables), list(tables.values())
        self._group, self._ranges = group, partial(plan.ranges, group.size)
        self._tree = TreeSum(0, _add)

    def begin(self, leaves: int) -> None:
        """Begin a step of so many micro-batches."""
        self._tree = TreeSum(leaves, _add)

    def take(self, where: str, may_rest: Iterable[str]) -> tuple[Gradients, list[str]]:
        """The gradients that a backward has left in the tables, which have none afterwards; and the names of those that it left out, but for the ones that `may_rest`.

        JobError for a dense one.
        """
        taken, missing, resting = [], [], frozenset(may_rest)
        for name, table in zip(self.names, self.parameters, strict=True):
            gradient, table.grad = table.grad, None
            if gradient is None:
                missing += [] if name in resting else [name]
                gradient = no_rows(table)
            if not gradient.is_sparse:
                raise problems.DENSE_TABLE(name=name, where=where)
            taken.append(gradient.coalesce())
        return taken, missing

    def add(self, m: int, gradients: Gradients) -> None:
        """Add what was taken of micro-batch `m`, the next one to the right."""
        self._tree.add(range(m, m + 1), gradients)

    def add_pass(self, together: range, gradients: Gradients) -> None:
        """Add what the ranks took of the micro-batches `together`, one after another each one's. All ranks call it; the `gradients` of one beyond them do not count."""
        if not self.names:
            return
        rank, others = self._group.rank, self._group.size - len(together)
        owned = [*([range(m, m + 1)] for m in together), *([[]] * others)]
        by_rank = self._of_every_rank([gradients] if rank < len(together) else [], owned)
        for m, (of_rank,) in zip(together, by_rank[: len(together)], strict=True):
            self._tree.add(range(m, m + 1), of_rank)

    def finish(self) -> None:
        """Leave the sum over all ranks' micro-batches in the tables. All ranks call it."""
        leaves = self._tree.leaves
        if not self.names:
            return
        if self._group.size > 1:
            owned = [nodes(clip(assigned, leaves), leaves) for assigned in self._ranges(leaves)]
            by_rank = self._of_every_rank([total for _, total in self._tree.sums], owned)
            self.begin(leaves)
            for rank_nodes, sums in zip(owned, by_rank, strict=True):
                for node, gradients in zip(rank_nodes, sums, strict=True):
                    self._tree.add(node, gradients)
        self.leave_sum()

    def leave_sum(self) -> None:
        """Leave the sum in the tables, once all micro-batches are added here."""
        if not self.names:
            return
        ((_, total),) = self._tree.sums
        self._tree = TreeSum(0, _add)
        for table, gradient in zip(self.parameters, total, strict=True):
            table.grad = gradient

    def _of_every_rank(self, own: list[Gradients], owned: Sequence[Sequence[range]]) -> list[list[Gradients]]:
        """The partial sums of every rank, by rank: first how many rows each has, then the rows."""
        group, tables = self._group, len(self.parameters)
        most = max(map(len, owned))
        counts = torch.zeros((most, tables), dtype=torch.int64)
        for i, gradients in enumerate(own):
            counts[i] = torch.tensor([gradient._indices().size(1) for gradient in gradients])
        of_rank = [
            part.view(most, tables).tolist()
            for part in self._swapped(counts.view(-1).to(group.device), [most * tables] * group.size)
        ]
        row_bytes = [8 + table[:1].nbytes for table in self.parameters]
        lengths = [
            sum(count * size for sums in rank_counts for count, size in zip(sums, row_bytes, strict=True))
            for rank_counts in of_rank
        ]
        parts = [
            row_of(part).view(torch.uint8)
            for gradients in own
            for g in gradients
            for part in (g._indices(), g._values())
        ]
        message = torch.cat([torch.empty(0, dtype=torch.uint8, device=group.device), *parts])
        received = self._swapped(message, lengths)
        return [
            own if rank == group.rank else self._read(received[rank], of_rank[rank][: len(owned[rank])])
            for rank in range(group.size)
        ]

    def _swapped(self, message: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """The messages of all ranks, by rank, of which each has the length there."""
        others = [0 if rank == self._group.rank else length for rank, length in enumerate(lengths)]
        received, wait = self._group.swap(message, others, max(lengths))
        wait()
        every = list(torch.split(received, others))
        every[self._group.rank] = message
        return every

    def _read(self, message: Tensor, counts: Sequence[Sequence[int]]) -> list[Gradients]:
        """The partial sums in a message, of so many rows by sum and table."""
        sums, at = [], 0
        for of_sum in counts:
            gradients = []
            for count, table in zip(of_sum, self.parameters, strict=True):
                edges = at, at + 8 * count, at + 8 * count + count * table[:1].nbytes
                indices, values = (message[a:b].clone() for a, b in pairwise(edges))
                at = edges[-1]
                gradients.append(
                    torch.sparse_coo_tensor(
                        indices.view(torch.int64).view(1, count),
                        values.view(table.dtype).view(count, *table.shape[1:]),
                        table.shape,
                        is_coalesced=True,
                        check_invariants=False,
                    )
                )
            sums.append(gradients)
        return sums
