"""Micro-batches that are computed a second time, elsewhere: a worker that computes other bits is found in the run in which it does.

Which ones follows from (seed, step, micro-batch) alone. The worker after the one whose micro-batch it is computes its gradient again, and
their digests are compared before the update. Where they differ, a third worker computes it, and the odd one out is wrong. Of two workers both
compute it once more, and the one that contradicts itself is wrong; one alone is held against itself.

Nothing of it stays: the generators are seeded anew before whatever draws next, gradients and buffers are put back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lockstep.data.loader import Loader, MicroBatches
from lockstep.data.sampler import MicroBatchSampler
from lockstep.errors import CorruptionError
from lockstep.plan import Plan, Position
from lockstep.randomness import digest64
from lockstep.record.events import Corrupted
from lockstep.spec.fields import Spec
from lockstep.training.agreement import Agreement, outvoted, witness
from lockstep.training.digests import resolved
from lockstep.training.group import Group

Found = Mapping[int, Sequence[int]]
"""The digests of one micro-batch's gradient, by the rank that computed them, in the order in which it did."""


def is_chosen(seed: int, share: float, step: int, micro_batch: int) -> bool:
    """Whether a micro-batch is computed a second time; `step` is counted from 0."""
    return digest64((seed, "recheck", step, micro_batch)) < share * 2.0**64


def odd_ones(found: Found) -> tuple[int, ...]:
    """The ranks that computed wrong bits; none where it cannot be told."""
    if len(found) == 1:
        return tuple(found)
    if len(found) > 2:
        ranks = list(found)
        return tuple(ranks[i] for i in outvoted([found[rank][-1] for rank in ranks]))
    unsteady = tuple(rank for rank, digests in found.items() if len(set(digests)) > 1)
    return unsteady if len(unsteady) == 1 else ()


class Recheck:
    """Has some micro-batches of one worker computed again, and computes those of others.

    `compute` gives the gradients of a micro-batch of this step from its batch, by the names of their parameters.
    """

    def __init__(
        self,
        spec: Spec,
        plan: Plan,
        group: Group,
        batches: MicroBatches,
        sampler: MicroBatchSampler,
        agreement: Agreement,
        compute: Callable[[Position, int, Any], Mapping[str, Tensor]],
    ) -> None:
        self._seed, self._share = spec.seed, spec.recheck
        self._plan, self._group, self._batches = plan, group, batches
        self._agreement, self._compute = agreement, compute
        self._sampler = sampler

    def chosen(self, position: Position) -> frozenset[int]:
        """The micro-batches of a step that are computed again: the same on every rank."""
        return frozenset(
            m for m in range(position.micro_batches) if is_chosen(self._seed, self._share, position.step, m)
        )

    def __call__(self, position: Position, own: Mapping[int, int]) -> None:
        """Compare the step's chosen micro-batches, of which `own` has the digests of this rank's. All ranks call it.

        CorruptionError where a worker computed other bits than another.
        """
        chosen, size = self.chosen(position), self._group.size
        if not chosen:
            return
        owners = {m: rank for rank, assigned in enumerate(self._plan.ranges(size)) for m in assigned}
        again = {m: self._digest(position, m) for m in chosen if (owners[m] + 1) % size == self._group.rank}
        every = self._group.gather(({m: own[m] for m in chosen if m in own}, again))
        for m in sorted(chosen):
            owner, other = owners[m], (owners[m] + 1) % size
            digests = every[owner][0][m], every[other][1][m]
            if digests[0] != digests[1]:
                raise self._disagreed(position, m, ((owner, digests[0]), (other, digests[1])))

    def _disagreed(
        self, position: Position, m: int, told: tuple[tuple[int, int], tuple[int, int]]
    ) -> CorruptionError:
        """Ask a third worker, or where there is none those two once more."""
        found: dict[int, list[int]] = {}
        for rank, digest in told:
            found.setdefault(rank, []).append(digest)
        size, rank = self._group.size, self._group.rank
        asked = [(told[0][0] + 2) % size] if size > 2 else list(found)
        every = self._group.gather(self._digest(position, m) if rank in asked else None)
        for one in asked:
            found.setdefault(one, []).append(every[one])
        wrong = odd_ones(found)
        witnesses = self._group.gather(witness(self._group, found.get(rank, ())))
        event = Corrupted(
            step=position.number,
            since=self._agreement.began_at,
            attempt=self._agreement.attempt,
            quantity="gradients",
            tensor="",
            workers=tuple(one for one in witnesses if one.rank in found),
            wrong=wrong,
            how="undecided" if not wrong else "majority" if size > 2 else "repetition",
            micro_batch=m,
        )
        self._agreement.tell(event)
        return CorruptionError(f"{event}; the step is not taken with it")

    def _digest(self, position: Position, m: int) -> int:
        loader = Loader(self._batches, [self._sampler.at(position, m)], self._group.device)
        try:
            gradients = self._compute(position, m, next(loader))
        finally:
            loader.close()
        digester = self._agreement.digester
        (found,) = resolved([[digester.summed(name, gradient) for name, gradient in gradients.items()]])
        return found
