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

    found: Corrupted
    """The difference, and who was wrong as far as is known by now."""
    nodes: frozenset[str] = frozenset()
    """Nodes that get no more workers."""
    fault_of_job: DriftError | None = None
    """The error that ends the run, if the job is at fault."""


class _Seen(NamedTuple):
    found: Corrupted
    workers: Mapping[tuple[str, str, str, int], tuple[int, ...]]
    """Node, device, UUID and rank of each worker, and its digests."""
    nodes: Mapping[int, str]

    @property
    def wrong(self) -> set[tuple[str, str, str, int]]:
        return {worker for worker in self.workers if worker[3] in self.found.wrong}


class UntrustedWorkers:
    """The differences between workers in the attempts of one run."""

    def __init__(self) -> None:
        self._seen: list[_Seen] = []

    @property
    def doubts(self) -> tuple[Corrupted, ...]:
        """The differences between states that are still undecided; the next attempt may settle them."""
        return tuple(
            difference.found
            for difference in self._seen
            if difference.found.how == "undecided" and difference.found.micro_batch is None
        )

    def judge(self, found: Corrupted, nodes: Mapping[int, str]) -> Verdict:
        """The verdict on a difference that an attempt reported; `nodes` has the nodes of its workers by rank."""
        if found.how == "recomputation":
            return self._settle(found)
        digests_by_worker = {
            (nodes.get(w.rank, w.host), w.device, w.uuid, w.rank): w.digests for w in found.workers
        }
        current = _Seen(found, digests_by_worker, nodes)
        earlier = [difference for difference in self._seen if self._is_same_place(difference.found, found)]
        self._seen.append(current)
        if found.wrong:
            others = [
                difference
                for difference in earlier
                if difference.wrong and not difference.wrong & current.wrong
            ]
            return self._of_job(current, others[-1]) if others else self._named(current)
        if not earlier and found.micro_batch is None:  # the step will be taken again, and may decide it
            return Verdict(found)
        if not earlier:
            return self._both(current)
        last = earlier[-1]
        common = {worker: digests for worker, digests in digests_by_worker.items() if worker in last.workers}
        contradicted = {worker for worker, digests in common.items() if digests != last.workers[worker]}
        if contradicted == set(common):
            return self._of_job(current, last)
        if not contradicted:  # each worker repeats its earlier result
            return self._both(current)
        wrong = tuple(sorted(worker[3] for worker in contradicted))
        current = current._replace(found=replace(found, wrong=wrong, how="repetition"))
        self._seen = [*(difference for difference in self._seen[:-1] if difference is not last), current]
        return self._named(current)

    @staticmethod
    def _is_same_place(one: Corrupted, other: Corrupted) -> bool:
        return (one.step, one.micro_batch) == (other.step, other.micro_batch) and one.attempt != other.attempt

    def _settle(self, found: Corrupted) -> Verdict:
        """Settle a doubt: an attempt whose workers agree has taken its step again."""
        doubts = [
            difference
            for difference in self._seen
            if difference.found.how == "undecided"
            and (difference.found.attempt, difference.found.step) == (found.attempt, found.step)
        ]
        self._seen = [
            difference._replace(found=found) if difference in doubts else difference
            for difference in self._seen
        ]
        return self._named(doubts[-1]._replace(found=found)) if doubts else Verdict(found)

    def _both(self, seen: _Seen) -> Verdict:
        workers = {worker.rank for worker in seen.found.workers}
        return Verdict(seen.found, frozenset(node for rank, node in seen.nodes.items() if rank in workers))

    def _named(self, seen: _Seen) -> Verdict:
        return Verdict(
            seen.found, frozenset(seen.nodes[rank] for rank in seen.found.wrong if rank in seen.nodes)
        )

    def _of_job(self, seen: _Seen, before: _Seen) -> Verdict:
        earlier = " and ".join(map(str, before.found.untrusted_workers))
        return Verdict(
            seen.found,
            fault_of_job=problems.FAULT_OF_JOB(got=seen.found, attempt=before.found.attempt, earlier=earlier),
        )
