"""Who forms the next group of a run, after a loss or because workers join or leave: pure, so that every case can be tested.

A worker keeps one number for life: the rank of its first group or, for a joining worker, the next free number. A rendezvous
ends when each worker of the group has arrived, is known to be lost, or has ended by itself; one that is only late is waited
for. Those that have arrived and do not leave go on as the next attempt, and behind them the waiting joining workers, both in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple


class Progress(NamedTuple):
    """How far a worker is: steps done, steps done at the last evaluation that has decided, and at the last one that has begun. Ordered from less to more."""

    step: int
    evaluated: int
    begun: int = 0


class Arrival(NamedTuple):
    """What a worker reports when it has left its step, or a joining worker when it is ready."""

    progress: Progress | None
    """None for a worker that holds no state of the run yet."""
    host: str
    port: int
    """The port of the store that it serves, at which the others can meet."""


class Formation(NamedTuple):
    """The group that goes on."""

    attempt: int
    workers: tuple[int, ...]
    """Their numbers, by new rank."""
    host: str
    port: int
    progress: Progress
    """The least that any of them has done: they go on from there."""


class Refused(NamedTuple):
    """The attempt must end, and why."""

    why: str


class Dismissed(NamedTuple):
    """The others go on, and this worker leaves the run as planned."""


Answer = Formation | Refused | Dismissed | None
"""None as long as someone is waited for."""


@dataclass(slots=True)
class RendezvousRound:
    """One round of the rendezvous: of the `workers` of attempt number `attempt`, whether or not one is needed."""

    attempt: int
    workers: tuple[int, ...]
    fewest: int = 1
    """How many members the next group needs."""
    whole: Progress | None = None
    """The progress at which this group formed without a loss or a plan: it may not form again from the same place."""
    arrived: dict[int, Arrival] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    joining_workers: dict[int, Arrival] = field(default_factory=dict)
    """Joining workers that wait to be let in, by number."""
    planned: bool = False
    """Whether the workers are asked to come although none is lost."""
    leaving: frozenset[int] = frozenset()
    """Workers that leave the run with this rendezvous."""

    def answer(self) -> Formation | Refused | None:
        """The answer to those that have arrived; None while someone is still waited for."""
        if self.ended:
            return Refused(f"worker {min(self.ended)} has ended by itself")
        there = {worker: self.arrived[worker] for worker in sorted(self.arrived) if worker not in self.lost}
        if len(there) + len(self.lost) < len(self.workers):
            return None
        stay = {worker: arrival for worker, arrival in there.items() if worker not in self.leaving}
        holding = [arrival.progress for arrival in stay.values() if arrival.progress is not None]
        if not holding:
            return Refused("no worker is left that holds the state of the run")
        # Rank 0 is one that has come with a store.
        members = (*stay, *sorted(set(self.joining_workers) - stay.keys()))
        if len(members) < self.fewest:
            return Refused(
                f"{len(members)} of {len(self.workers)} workers are left, wanted at least {self.fewest}"
            )
        least = min(holding)
        if not self.lost and not self.planned and self.whole == least:
            return Refused("no worker is lost, and the same step fails again")
        first = next(iter(stay.values()))
        return Formation(self.attempt + 1, members, first.host, first.port, least)


class RendezvousRounds:
    """The rounds of a run's rendezvous, one after another. Kept by a process that is none of the workers."""

    def __init__(self, attempt: int, workers: int, fewest: int = 1) -> None:
        self._first = range(workers)
        self._now = RendezvousRound(attempt, tuple(self._first), fewest)
        self._lost: set[int] = set()
        self._ready: set[int] = set()
        self._dismissed: set[int] = set()
        self._answers: dict[int, Formation | Refused] = {}
        self.newest: Formation | None = None
        """The newest group that a rendezvous formed, if any."""

    def ready(self, worker: int) -> None:
        """Note that a worker trains, and would come to a rendezvous."""
        self._ready.add(worker)

    def arrive(self, attempt: int, worker: int, arrival: Arrival) -> None:
        """Note that a worker of `attempt` has left its step and waits."""
        if attempt == self._now.attempt and worker in self._now.workers:
            self._now.arrived[worker] = arrival
            self._close()

    def enter(self, worker: int, arrival: Arrival) -> None:
        """Note that a joining worker is ready and waits to be let in."""
        if worker not in self._lost:
            self._ready.add(worker)
            self._now.joining_workers[worker] = arrival

    def plan(self, leaving: Collection[int] = ()) -> int | None:
        """Plan a rendezvous after a step, so that joining workers join and those in `leaving` leave. Returns the attempt to be asked.

        None where not every worker would come, or nobody would stay.
        """
        stay = set(self._now.workers) - set(leaving)
        if not stay or not self.able:
            return None
        self._now.planned, self._now.leaving = True, frozenset(leaving)
        return self._now.attempt

    @property
    def able(self) -> bool:
        """Whether every worker trains and would come to a rendezvous."""
        current = self._now
        refused = isinstance(self._answers.get(current.attempt), Refused)
        return (
            bool(current.workers)
            and set(current.workers) <= self._ready
            and not current.ended
            and not refused
        )

    @property
    def waiting(self) -> tuple[int, ...]:
        """The numbers of the joining workers that wait to be let in."""
        return tuple(sorted(self._now.joining_workers))

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers of the current attempt, by rank."""
        return self._now.workers

    def lose(self, worker: int) -> bool:
        """Note that a worker's process is gone. Returns whether the others go on without it, as far as is known."""
        self._now.joining_workers.pop(worker, None)
        if worker not in self._lost:
            self._lost.add(worker)
            if worker in self._now.workers:
                self._now.lost.add(worker)
                self._close()
        if (
            worker not in self._now.workers and worker not in self._first
        ):  # a joining worker that was not let in
            return True
        remaining = set(self._now.workers) - self._lost
        there = len(remaining) + len(self._now.joining_workers)
        able = (
            bool(remaining) and remaining <= self._ready and there >= self._now.fewest and not self._now.ended
        )
        if not able:
            self.refuse("not every worker that is left can go on")
        return able and not isinstance(self._answers.get(self._now.attempt), Refused)

    def refuse(self, why: str) -> None:
        """End the current attempt for `why`: nobody goes on."""
        self._answers.setdefault(self._now.attempt, Refused(why))

    def end(self, worker: int) -> None:
        """Note that a worker has ended by itself, with a result or an error of its own: it will not come."""
        if worker in self._now.workers and worker not in self._lost:
            self._now.ended.add(worker)
            self._close()

    def ask(self, attempt: int | None, worker: int) -> Answer:
        """The answer to a worker that has come to the rendezvous of `attempt`. A joining worker, which has no attempt, waits for the next one."""
        if attempt is None:
            if self.newest is not None and worker in self.newest.workers:
                return self.newest
            refused = self._answers.get(self._now.attempt)
            return refused if isinstance(refused, Refused) else None
        answer = self._answers.get(attempt)
        if worker in self._dismissed:
            return Dismissed()
        if isinstance(answer, Formation) and worker not in answer.workers:
            return Refused("the others have gone on without this worker")
        return answer

    @property
    def called(self) -> int | None:
        """The attempt whose workers must come, because one is lost or has arrived. None while all train."""
        return self._now.attempt if self._now.arrived or self._now.lost else None

    def _close(self) -> None:
        """If this rendezvous is over, keep its answer and begin the next one."""
        current = self._now
        answer = current.answer() if current.arrived else None
        if answer is None or current.attempt in self._answers:
            return
        self._answers[current.attempt] = answer
        if isinstance(answer, Formation):
            self.newest = answer
            self._dismissed |= current.leaving
            progress = None if current.lost or current.planned else answer.progress
            self._now = RendezvousRound(answer.attempt, answer.workers, current.fewest, progress)
            self._now.lost |= self._lost & set(answer.workers)
