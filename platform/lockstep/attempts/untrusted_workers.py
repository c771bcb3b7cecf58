"""Which workers can no longer be trusted, after attempts whose workers had different bits: pure, so that every case can be tested.

A worker that was wrong is left out of the next attempts, with its node. If the same step differs again on other workers, or if each of its
workers contradicts its own earlier result, no machine is wrong: the job is not deterministic there, and the run ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from lockstep.attempts import problems
from lockstep.errors import DriftError
from lockstep.record.events.union import Corrupted


class Verdict(NamedTuple):
    """The verdict on a difference between workers."""

    corruption: Corrupted
    """The difference, and who was wrong as far as is known by now."""
    nodes: frozenset[str] = frozenset()
    """Nodes that get no more workers."""
    fault_of_job: DriftError | None = None
    """The error that ends the run, if the job is at fault."""


class _Difference(NamedTuple):
    corruption: Corrupted
    workers: Mapping[tuple[str, str, str, int], tuple[int, ...]]
    """Node, device, UUID and rank of each worker, and its digests."""
    nodes: Mapping[int, str]

    @property
    def wrong(self) -> set[tuple[str, str, str, int]]:
        return {worker for worker in self.workers if worker[3] in self.corruption.wrong}


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
        digests_by_worker = {
            (nodes.get(w.rank, w.host), w.device, w.uuid, w.rank): w.digests for w in corruption.workers
        }
        current = _Difference(corruption, digests_by_worker, nodes)
        earlier = [
            difference
            for difference in self._differences
            if self._is_repetition(difference.corruption, corruption)
        ]
        self._differences.append(current)
        if corruption.wrong:
            others = [
                difference
                for difference in earlier
                if difference.wrong and not difference.wrong & current.wrong
            ]
            return self._of_job(current, others[-1]) if others else self._named(current)
        if not earlier and corruption.micro_batch is None:  # the step will be taken again, and may decide it
            return Verdict(corruption)
        if not earlier:
            return self._undecided(current)
        last = earlier[-1]
        common = {worker: digests for worker, digests in digests_by_worker.items() if worker in last.workers}
        contradicted = {worker for worker, digests in common.items() if digests != last.workers[worker]}
        if contradicted == set(common):
            return self._of_job(current, last)
        if not contradicted:  # each worker repeats its earlier result
            return self._undecided(current)
        wrong = tuple(sorted(worker[3] for worker in contradicted))
        current = current._replace(corruption=replace(corruption, wrong=wrong, how="repetition"))
        self._differences = [
            *(difference for difference in self._differences[:-1] if difference is not last),
            current,
        ]
        return self._named(current)

    @staticmethod
    def _is_repetition(first: Corrupted, second: Corrupted) -> bool:
        """Whether two attempts differed at the same step and micro-batch."""
        return (first.step, first.micro_batch) == (
            second.step,
            second.micro_batch,
        ) and first.attempt != second.attempt

    def _settle(self, corruption: Corrupted) -> Verdict:
        """Settle a doubt: an attempt whose workers agree has taken its step again."""
        doubts = [
            difference
            for difference in self._differences
            if difference.corruption.how == "undecided"
            and (difference.corruption.attempt, difference.corruption.step)
            == (corruption.attempt, corruption.step)
        ]
        self._differences = [
            difference._replace(corruption=corruption) if difference in doubts else difference
            for difference in self._differences
        ]
        return self._named(doubts[-1]._replace(corruption=corruption)) if doubts else Verdict(corruption)

    def _undecided(self, difference: _Difference) -> Verdict:
        """The verdict while nobody knows who was wrong: none of the nodes gets more workers."""
        workers = {worker.rank for worker in difference.corruption.workers}
        return Verdict(
            difference.corruption,
            frozenset(node for rank, node in difference.nodes.items() if rank in workers),
        )

    def _named(self, difference: _Difference) -> Verdict:
        """The verdict once the wrong ranks are known: their nodes get no more workers."""
        corruption, nodes = difference.corruption, difference.nodes
        return Verdict(corruption, frozenset(nodes[rank] for rank in corruption.wrong if rank in nodes))

    def _of_job(self, difference: _Difference, earlier: _Difference) -> Verdict:
        """The verdict that the job is at fault: no machine explains this difference and the earlier one."""
        workers = " and ".join(map(str, earlier.corruption.untrusted_workers))
        fault = problems.FAULT_OF_JOB(
            got=difference.corruption, attempt=earlier.corruption.attempt, earlier=workers
        )
        return Verdict(difference.corruption, fault_of_job=fault)
