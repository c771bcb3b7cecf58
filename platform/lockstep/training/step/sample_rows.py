"""A row for each sample of a step, brought together on every rank in the order of the epoch, whoever computed it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.communication.group import Group
from lockstep.data.order import Ids
from lockstep.errors import LockstepError
from lockstep.reduction_tree import Ranges
from lockstep.tensor_bytes import row_of
from lockstep.training.step import problems


class RowKind(NamedTuple):
    """What a row is: the type and shape of its tensor, and whether a gradient may flow back into it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    learns: bool

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))

    def __str__(self) -> str:
        return f"rows of {self.dtype} and shape {self.shape}{'' if self.learns else ' without a gradient'}"


class StepRows:
    """Collects the rows of a worker's micro-batches, and gives every rank those of all.

    Rows are tensors by name. All micro-batches of a run have the same names, and rows of one kind. `label` is the method that returns
    them, for messages.
    """

    def __init__(self, group: Group, ranges: Ranges, label: str) -> None:
        """`ranges` gives the micro-batches of each rank in a step of so many."""
        self._group, self._label, self._ranges = group, label, ranges
        self.kinds: dict[str, RowKind] | None = None
        """By name; the ranks agree on them in the first step, since one may have no micro-batch in it."""
        self.alone = False
        """Whether what was returned is one tensor, without a name."""
        self._own: dict[int, dict[str, Tensor]] = {}
        self._places: Sequence[Ids] = ()
        self._compared = False
        """Whether the ranks have compared what their rows are."""

    def begin(self, places: Sequence[Ids]) -> None:
        """Begin a step. `places` has, for each of its micro-batches, the places of the samples among those of the step."""
        self._own, self._places = {}, places

    def note(self, m: int, returned: object, where: str) -> dict[str, Tensor]:
        """Take what the job returned for micro-batch `m`: its rows by name. JobError where they are none, or of another kind than before."""
        rows = self.named(m, returned, where)
        kinds = {
            name: RowKind(row.dtype, tuple(row.shape[1:]), row.requires_grad) for name, row in rows.items()
        }
        if self.kinds is None:
            self.kinds, self.alone = kinds, isinstance(returned, Tensor)
        elif kinds != self.kinds:
            raise self._differs(self.kinds, kinds, where)
        self._own[m] = {name: row.detach().to(self._group.device) for name, row in rows.items()}
        return rows

    def named(self, m: int, returned: object, where: str) -> dict[str, Tensor]:
        """What the job returned for micro-batch `m`, by name. JobError where it has no row for each sample."""
        return rows_by_name(returned, len(self._places[m]), self._label, where)

    def own(self, m: int) -> dict[str, Tensor] | None:
        """The rows of a micro-batch of this rank, as they were noted."""
        return self._own.get(m)

    def at(self, m: int) -> Tensor:
        """The indices of a micro-batch's rows among those of the step: samples that are left out have places, and no rows."""
        return torch.from_numpy(np.searchsorted(np.sort(np.concatenate(self._places)), self._places[m]))

    def form(self, rows: dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
        """Rows in the form in which the job returns them."""
        return rows[""] if self.alone else rows

    def gather(self) -> dict[str, Tensor]:
        """The rows of all samples of the step, by name, in the order of the epoch. All ranks call it.

        Those of a step of one micro-batch are on its rank the tensors themselves, with their strides.
        """
        kinds = self._agreed()
        count = len(self._places)
        if not kinds:
            return {}
        if count == 1 and self._group.size == 1:
            return self._only()
        by_rank = [self._places[m] for assigned in self._ranges(count) for m in assigned]
        order = torch.from_numpy(np.argsort(np.concatenate(by_rank), kind="stable"))
        own = [self._own[m] for m in sorted(self._own)]
        if self._group.size == 1:
            parts = {name: [rows[name] for rows in own] for name in kinds}
        else:
            parts = self._swapped(kinds, own)
            if count == 1 and self._own:
                return self._only()
        order = order.to(self._group.device)
        return {name: torch.cat(each).index_select(0, order) for name, each in parts.items()}

    def _only(self) -> dict[str, Tensor]:
        """The rows of the only micro-batch. What the loss may write to is in memory of its own: the second pass is compared with the first."""
        kinds = self.kinds or {}
        return {name: row if kinds[name].learns else row.clone() for name, row in self._own[0].items()}

    def _agreed(self) -> dict[str, RowKind]:
        """The kinds of the rows. In the first step of a group all ranks compare theirs, where they have any."""
        if self.kinds is None or not self._compared:
            every = self._group.gather(None if self.kinds is None else (self.kinds, self.alone))
            known = [kinds for kinds in every if kinds is not None]
            if not known:
                raise problems.NO_ROWS(label=self._label)
            for kinds, _ in known:
                if kinds != known[0][0]:
                    raise self._differs(known[0][0], kinds, "")
            (self.kinds, self.alone), self._compared = known[0], True
        return self.kinds

    def _swapped(
        self, kinds: Mapping[str, RowKind], own: Sequence[Mapping[str, Tensor]]
    ) -> dict[str, list[Tensor]]:
        """The rows of each rank, by name, rank after rank: as bytes, whose number every rank knows."""
        group, width = self._group, sum(kind.nbytes for kind in kinds.values())
        counts = [sum(len(self._places[m]) for m in assigned) for assigned in self._ranges(len(self._places))]
        flat = [row_of(torch.cat([rows[name] for rows in own])).view(torch.uint8) for name in kinds if own]
        message = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=group.device)
        lengths = [count * width for count in counts]
        largest, lengths[group.rank] = max(lengths), 0
        received, wait = group.swap(message, lengths, largest)
        wait()
        blocks = list(torch.split(received, lengths))
        blocks[group.rank] = message
        parts: dict[str, list[Tensor]] = {name: [] for name in kinds}
        for count, block in zip(counts, blocks, strict=True):
            each = torch.split(block, [count * kind.nbytes for kind in kinds.values()])
            for (name, kind), content in zip(kinds.items(), each, strict=True):
                # Copied first: a view of another type must start aligned.
                parts[name].append(content.clone().view(kind.dtype).view(count, *kind.shape))
        return parts

    def _differs(
        self, wanted: Mapping[str, RowKind], got: Mapping[str, RowKind], where: str
    ) -> LockstepError:
        if wanted.keys() != got.keys():
            names = [", ".join(map(repr, kinds)) or "none" for kinds in (got, wanted)]
            return problems.OTHER_ROWS(label=self._label, got=names[0], where=where, wanted=names[1])
        name = next(name for name in wanted if wanted[name] != got[name])
        what = f" in {name!r}" if name else ""
        return problems.OTHER_ROWS(
            label=self._label, got=f"{got[name]}{what}", where=where, wanted=wanted[name]
        )


def rows_by_name(returned: object, count: int, label: str, where: str) -> dict[str, Tensor]:
    """Rows of `count` samples by name, a tensor alone by the empty one. JobError where there is no row for each sample; `label` is what returned them."""
    named = {"": returned} if isinstance(returned, Tensor) else returned
    if not isinstance(named, Mapping):
        raise problems.ROWS_KIND(
            label=label,
            got=f"returned {type(returned).__name__}",
            where=where,
            wanted="sample, or several by name",
        )
    rows = dict[str, Tensor]()
    for name, value in named.items():
        if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != count:
            is_tensor = isinstance(value, Tensor)
            got = f"a tensor of shape {tuple(value.shape)}" if is_tensor else type(value).__name__
            raise problems.ROWS_KIND(
                label=label,
                got=f"{name!r} is {got}" if name else f"returned {got}",
                where=where,
                wanted=f"of the {count} samples",
            )
        rows[str(name)] = value
    return rows
