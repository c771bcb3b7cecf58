"""Which workers can no longer be trusted, after attempts whose workers had different bits: pure, so that every case can be tested.

A worker that was wrong is left out of the next attempts, with its node. Attempts vote: the same step has the same bits in each of them, so where two
attempts differ and have one result in common, that one is right. If they have none in common, or the step differs a third time on yet
other workers, no machine is wrong: the job is not deterministic there, and the run ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from lockstep.attempts import problems
from lockstep.errors import DriftError
from lockstep.record.events.union import Corrupted, Witness

CHANCE = 2
"""How often other workers may be wrong in the same step: bits that flip between two comparisons show in the step of the second one. More is the job's."""


class Verdict(NamedTuple):
    """The verdict on a difference between workers."""

    corruption: Corrupted
    """The difference, and who was wrong as far as is known by now."""
    nodes: frozenset[str] = frozenset()
    """Nodes that get no more workers."""
    settled: tuple[Corrupted, ...] = ()
    """Differences of earlier attempts that this one has decided."""
    fault_of_job: DriftError | None = None
    """The error that ends the run, if the job is at fault."""


Result = tuple[int, ...]
"""The digests that a worker had."""

Identity = tuple[str, str, int]
"""A worker across attempts: its node, and the UUID of its GPU; on a processor the device and its rank."""


class _Difference(NamedTuple):
    corruption: Corrupted
    nodes: Mapping[int, str]
    """The nodes of the attempt's workers, by rank."""

    def result(self, worker: Witness) -> Result:
        # Of a micro-batch a worker has one digest for each time that it computed it.
        return worker.digests if self.corruption.micro_batch is None else worker.digests[-1:]

    def identity(self, worker: Witness) -> Identity:
        node = self.nodes.get(worker.rank, worker.host)
        return (node, worker.uuid, 0) if worker.uuid else (node, worker.device, worker.rank)

    @property
    def results(self) -> dict[Identity, Result]:
        return {self.identity(worker): self.result(worker) for worker in self.corruption.workers}

    @property
    def wrong(self) -> set[Identity]:
        return {self.identity(w) for w in self.corruption.workers if w.rank in self.corruption.wrong}

    @property
    def right(self) -> set[Result]:
        """The results of which each may be right, as far as they are known."""
        others = (w for w in self.corruption.workers if w.rank not in self.corruption.wrong)
        return set(filter(None, map(self.result, others)))

    @property
    def has_unknown(self) -> bool:
        """Whether some worker had a result of which only is known that it was another one."""
        return not all(self.results.values())

    @property
    def nodes_of_wrong(self) -> frozenset[str]:
        return frozenset(self.nodes[rank] for rank in self.corruption.wrong if rank in self.nodes)

    def decided(self, right: Result) -> _Difference:
        """The same, once its right result is known."""
        if self.corruption.how != "undecided":
            return self
        known = replace(
            self.corruption,
            workers=tuple(w._replace(digests=self.result(w)) for w in self.corruption.workers),
        )
        wrong = tuple(sorted(known.wrong_beside(right)))
        return self._replace(corruption=replace(self.corruption, wrong=wrong, how="recomputation"))


class UntrustedWorkers:
    """The differences between workers in the attempts of one run."""

    def __init__(self) -> None:
        self._differences: list[_Difference] = []

    @property
    def doubts(self) -> tuple[Corrupted, ...]:
        """The differences between states that are still undecided; the next attempt may settle them."""
        return tuple(
            difference.corruption
            for difference in self._differences
            if difference.corruption.how == "undecided" and difference.corruption.micro_batch is None
        )

    def judge(self, corruption: Corrupted, nodes: Mapping[int, str]) -> Verdict:
        """The verdict on a difference that an attempt reported; `nodes` has the nodes of its workers by rank."""
        if corruption.how == "recomputation":
            return self._settle(corruption)
        current = _Difference(corruption, nodes)
        earlier = [
            difference
            for difference in self._differences
            if self._is_repetition(difference.corruption, corruption)
        ]
        self._differences.append(current)
        if earlier:
            return self._of_attempts(current, earlier)
        if corruption.wrong:
            return Verdict(corruption, current.nodes_of_wrong)
        if corruption.micro_batch is None:  # the step will be taken again, and may decide it
            return Verdict(corruption)
        return self._undecided(current)

    def _of_attempts(self, current: _Difference, earlier: Sequence[_Difference]) -> Verdict:
        """The verdict on the difference of a step that has differed in earlier attempts."""
        last = earlier[-1]
        right = current.right & last.right
        if len(right) == 1:
            return self._decided(current, earlier, right.pop())
        if right:
            repeated = any(last.results.get(worker) == result for worker, result in current.results.items())
            return self._undecided(current) if repeated else self._of_job(current, last)
        if current.has_unknown or last.has_unknown:  # what is not known may be what the other attempt had
            has_majority = bool(current.wrong) and len(current.right) == 1
            if not has_majority:
                return self._undecided(current)
            return self._decided(current, earlier, *current.right)
        # A worker that is compared with itself alone has no right result.
        if not (current.right and last.right) and current.wrong & last.wrong:
            return Verdict(current.corruption, current.nodes_of_wrong)
        return self._of_job(current, last)

    def _decided(self, current: _Difference, earlier: Sequence[_Difference], right: Result) -> Verdict:
        """The verdict where two attempts have one result in common."""
        alike = [current, *earlier]
        decided = [difference.decided(right) for difference in alike]
        by_id = {id(was): now for was, now in zip(alike, decided, strict=True)}
        self._differences = [by_id.get(id(difference), difference) for difference in self._differences]
        current, earlier = decided[0], decided[1:]
        unrelated = [difference for difference in earlier if not difference.wrong & current.wrong]
        if len(unrelated) >= CHANCE:
            return self._of_job(current, unrelated[-1])
        settled = [now for was, now in zip(alike[1:], earlier, strict=True) if now is not was]
        nodes = frozenset[str]().union(*(each.nodes_of_wrong for each in (current, *settled)))
        return Verdict(current.corruption, nodes, tuple(each.corruption for each in settled))

    @staticmethod
    def _is_repetition(first: Corrupted, second: Corrupted) -> bool:
        """Whether two attempts differed at the same step and micro-batch."""
        return (first.step, first.micro_batch) == (
            second.step,
            second.micro_batch,
        ) and first.attempt != second.attempt

    def _settle(self, corruption: Corrupted) -> Verdict:
        """Settle a doubt: an attempt whose workers agree has taken its step again."""
        for i, difference in enumerate(self._differences):
            doubt = difference.corruption
            if doubt.how == "undecided" and (doubt.attempt, doubt.step) == (
                corruption.attempt,
                corruption.step,
            ):
                self._differences[i] = settled = difference._replace(corruption=corruption)
                return Verdict(corruption, settled.nodes_of_wrong)
        return Verdict(corruption)

    def _undecided(self, difference: _Difference) -> Verdict:
        """The verdict while nobody knows who was wrong: none of the nodes gets more workers."""
        workers = {worker.rank for worker in difference.corruption.workers}
        return Verdict(
            difference.corruption,
            frozenset(node for rank, node in difference.nodes.items() if rank in workers),
        )

    def _of_job(self, difference: _Difference, earlier: _Difference) -> Verdict:
        """The verdict that the job is at fault: no machine explains this difference and the earlier one."""
        workers = " and ".join(map(str, earlier.corruption.untrusted_workers))
        fault = problems.FAULT_OF_JOB(
            got=difference.corruption, attempt=earlier.corruption.attempt, earlier=workers
        )
        return Verdict(difference.corruption, fault_of_job=fault)
