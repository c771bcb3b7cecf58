"""Micro-batches that are computed a second time, elsewhere, so that a worker that computes wrong bits is found while the run goes on.

Which ones follows from (seed, step, micro-batch) alone: by default one of the steps 2, 4, 8, 16 … and of one step in `SELDOM` after that, or the
share that the spec gives. Another worker computes the gradient again, before its own micro-batches: the
worker with the fewest in this step, which would wait for the others anyway if it has fewer. The digests are compared before the
update. Where they differ, a third worker computes it, and the odd one out is wrong. With only two workers, both compute it once more, and
the one that contradicts itself is wrong. A single worker is compared with itself.

Where the parameters are sharded no worker computes alone: all compute together, each the micro-batch that it has to compute again, or any other that nobody
looks at.

It leaves no trace: the generators are seeded anew before anything else draws, and gradients and buffers are put back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.communication.group import Group
from lockstep.data.loader import Loader
from lockstep.data.micro_batches import MicroBatches
from lockstep.data.sampler import MicroBatchSampler
from lockstep.errors import JobError, LockstepError
from lockstep.plan import Plan, Position
from lockstep.randomness import digest64, recheck_key
from lockstep.record.events.union import Corrupted
from lockstep.spec.fields import Spec
from lockstep.training.integrity import problems
from lockstep.training.integrity.agreement import Agreement, outvoted, witness
from lockstep.training.integrity.digests import Summed, resolved
from lockstep.training.integrity.rehearsal.names_of_objects import named
from lockstep.training.integrity.rehearsal.object_state import Memory

Found = Mapping[int, Sequence[int]]
"""The digests of one micro-batch's gradient by the rank that computed them, in the order of computation."""


SELDOM = 512
"""By default one micro-batch is computed again in one of so many steps: at most a fifth of a per cent of the work."""


def is_looked_at(seed: int, step: int) -> bool:
    """Whether one micro-batch of a step is computed again by default; `step` is counted from 0. The first step is the rehearsal's."""
    number = step + 1
    return (number > 1 and number & (number - 1) == 0) or digest64(recheck_key(seed, step)) % SELDOM == 0


def is_chosen(seed: int, share: float, step: int, micro_batch: int) -> bool:
    """Whether a micro-batch is computed a second time; `step` is counted from 0."""
    return digest64(recheck_key(seed, step, micro_batch)) < share * 2.0**64


def assigned_again(counts: Sequence[int], owners: Mapping[int, int]) -> dict[int, int]:
    """The rank that computes each micro-batch again: of all but its owner, the one with the fewest to compute.

    `counts` has how many micro-batches each rank has in this step, `owners` the rank of each that is computed again. On a tie it is the
    next rank after the owner. A single rank does it itself.
    """
    load, size, assignment = list(counts), len(counts), {}
    for m, owner in sorted(owners.items()):
        others = [(owner + i) % size for i in range(1, size)] or [owner]
        assignment[m] = min(others, key=load.__getitem__)
        load[assignment[m]] += 1
    return assignment


def odd_ones(found: Found) -> tuple[int, ...]:
    """The ranks that computed wrong bits; none where that cannot be decided."""
    if len(found) == 1:
        return tuple(found)
    if len(found) > 2:
        ranks = list(found)
        return tuple(ranks[i] for i in outvoted([found[rank][-1] for rank in ranks]))
    unsteady = tuple(rank for rank, digests in found.items() if len(set(digests)) > 1)
    return unsteady if len(unsteady) == 1 else ()


class Recheck:
    """Has some micro-batches of one worker computed again, and computes those of others.

    `compute` gives what the gradient of a micro-batch of this step adds to its digest, from its batch; `together` is whether all ranks have to call it.
    `memory` is what the job and its model hold, to name what it keeps.
    """

    def __init__(
        self,
        spec: Spec,
        plan: Plan,
        group: Group,
        batches: MicroBatches,
        sampler: MicroBatchSampler,
        agreement: Agreement,
        compute: Callable[[Position, int, Any], Sequence[Summed]],
        memory: Callable[[], Memory],
        *,
        together: bool = False,
    ) -> None:
        self._seed, self._share = spec.seed, spec.recheck
        self._plan, self._group, self._batches = plan, group, batches
        self._agreement, self._compute, self._memory = agreement, compute, memory
        self._sampler, self._together = sampler, together
        self._owners: dict[int, int] = {}
        """The ranks of the step's micro-batches that are computed again."""
        self._others: dict[int, int] = {}
        """The ranks that compute them again."""
        self._again: dict[int, int] = {}
        """The digests of the micro-batches that this rank has computed again."""

    def chosen(self, position: Position) -> frozenset[int]:
        """The micro-batches of a step that are computed again: the same on every rank. Together no rank computes one without samples."""
        if self._share is None:
            if not is_looked_at(self._seed, position.step):
                return frozenset()
            draw = digest64(recheck_key(self._seed, position.step, "micro-batch"))
            chosen = {draw % position.micro_batches}
        else:
            each = range(position.micro_batches)
            chosen = {m for m in each if is_chosen(self._seed, self._share, position.step, m)}
        return frozenset(m for m in chosen if not self._together or len(self._sampler.at(position, m).ids))

    def compute(self, position: Position) -> None:
        """Compute this rank's share of the second computations. It runs before the rank's own micro-batches: ranks with more of those take longer."""
        chosen = self.chosen(position)
        if not chosen:
            self._owners, self._others, self._again = {}, {}, {}
            return
        ranges = self._plan.ranges(self._group.size, position.micro_batches)
        self._owners = {m: rank for rank, rank_range in enumerate(ranges) for m in rank_range if m in chosen}
        self._others = assigned_again([len(rank_range) for rank_range in ranges], self._owners)
        mine = [m for m, checker in self._others.items() if checker == self._group.rank]
        self._again = {m: self._digest(position, m) for m in mine}
        if self._together and self._others:
            most = max(Counter(self._others.values()).values())
            for _ in range(most - len(mine)):
                self._digest(position, min(self._others))

    def compare(self, position: Position, own: Mapping[int, int]) -> None:
        """Compare the second digests with the first ones; `own` has this rank's. All ranks call it.

        CorruptionError where two workers computed different bits, JobError where the job keeps something that changes them.
        """
        if not self._owners:
            return
        every = self._group.gather(({m: own[m] for m in self._owners if m in own}, self._again))
        for m, owner in sorted(self._owners.items()):
            checker = self._others[m]
            digests = every[owner][0][m], every[checker][1][m]
            if digests[0] != digests[1]:
                raise self._disagreed(position, m, ((owner, digests[0]), (checker, digests[1])))

    def _disagreed(
        self, position: Position, m: int, digests: tuple[tuple[int, int], tuple[int, int]]
    ) -> LockstepError:
        """Ask a third worker or, if there is none, those two once more. If it gives other bits each time, what the job keeps is the cause.

        CorruptionError, of their states, where these differ: other weights give other gradients.
        """
        self._agreement.check()
        if (error := self._kept_by_job(position, m)) is not None:
            return error
        digests_by_rank: dict[int, list[int]] = {}
        for rank, digest in digests:
            digests_by_rank.setdefault(rank, []).append(digest)
        size, rank = self._group.size, self._group.rank
        arbiters = [worker for worker in range(size) if worker not in digests_by_rank][:1] or list(
            digests_by_rank
        )
        every = self._group.gather(self._digest(position, m) if rank in arbiters or self._together else None)
        for worker in arbiters:
            digests_by_rank.setdefault(worker, []).append(every[worker])
        wrong = odd_ones(digests_by_rank)
        witnesses = self._group.gather(witness(self._group, digests_by_rank.get(rank, ())))
        event = Corrupted(
            step=position.number,
            since=self._agreement.began_at,
            attempt=self._agreement.attempt,
            quantity="gradients",
            tensor="",
            workers=tuple(worker for worker in witnesses if worker.rank in digests_by_rank),
            wrong=wrong,
            how="undecided" if not wrong else "majority" if size > 2 else "repetition",
            micro_batch=m,
        )
        self._agreement.tell(event)
        return problems.OTHER_GRADIENTS(got=event)

    def _kept_by_job(self, position: Position, m: int) -> JobError | None:
        """The error for a micro-batch that gives other bits at each computation on every rank, because of what a computation leaves in the job."""
        memory_before = self._memory()
        unsteady = self._digest(position, m) != self._digest(position, m)
        every = self._group.gather((unsteady, self._memory().changed_since(memory_before)))
        places = [place for _, changed in every for place in changed]
        if not places or not all(unsteady for unsteady, _ in every):
            return None
        return problems.KEPT_IN_TRAINING(
            got=named(list(dict.fromkeys(places))), step=position.number, micro_batch=m
        )

    def _digest(self, position: Position, m: int) -> int:
        loader = Loader(self._batches, [self._sampler.at(position, m)], self._group.device)
        try:
            summed = self._compute(position, m, next(loader))
        finally:
            loader.close()
        (digest,) = resolved([summed])
        return digest
