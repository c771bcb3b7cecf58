"""Who forms the next group of a run, after a loss or because workers join or leave: pure, so that every case can be tested.

A worker has one number for as long as it lives: the rank of its first group, or for a newcomer the next number that is free. A roll
call ends when each worker of the group has come, or is known to be lost, or has ended by itself; one that is only late is waited
for. Those that have come and do not leave go on with the newcomers that wait, in the order of their numbers, as the next attempt.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple


class Progress(NamedTuple):
    """How far a worker is: steps done, and steps done at its last evaluation. The less comes first."""

    step: int
    evaluated: int


class Arrival(NamedTuple):
    """What a worker says when it has left its step, or a newcomer when it is ready."""

    progress: Progress | None
    """None for one that holds nothing of the run yet."""
    host: str
    port: int
    """Where it serves a store, at which the others can meet."""


class Formation(NamedTuple):
    """The group that goes on."""

    attempt: int
    workers: tuple[int, ...]
    """By their new ranks."""
    host: str
    port: int
    progress: Progress
    """The least that one of them has done: from there they go on."""


class Refused(NamedTuple):
    """The attempt must end, and why."""

    why: str


class Dismissed(NamedTuple):
    """The others go on, and this worker leaves the run as was planned."""


Answer = Formation | Refused | Dismissed | None
"""None as long as someone is waited for."""


@dataclass(slots=True)
class RollCall:
    """The roll call of the `workers` of attempt number `attempt`, whether or not one is needed."""

    attempt: int
    workers: tuple[int, ...]
    fewest: int = 1
    """How many must be left."""
    whole: Progress | None = None
    """Where the group came together that lost nobody: there it may not come together again."""
    arrived: dict[int, Arrival] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    newcomers: dict[int, Arrival] = field(default_factory=dict)
    """Those that wait to be let in."""
    planned: bool = False
    """Whether the workers are asked to come, though none is lost."""
    leaving: frozenset[int] = frozenset()
    """Those that leave the run with this roll call."""

    def answer(self) -> Formation | Refused | None:
        """What those that have come are told."""
        if self.ended:
            return Refused(f"worker {min(self.ended)} has ended by itself")
        there = {worker: self.arrived[worker] for worker in sorted(self.arrived) if worker not in self.lost}
        if len(there) + len(self.lost) < len(self.workers):
            return None
        stay = {worker: arrival for worker, arrival in there.items() if worker not in self.leaving}
        holding = [arrival.progress for arrival in stay.values() if arrival.progress is not None]
        if not holding:
            return Refused("no worker is left that holds the state of the run")
        members = tuple(sorted({*stay, *self.newcomers}))
        if len(members) < self.fewest:
            return Refused(
                f"{len(members)} of {len(self.workers)} workers are left, wanted at least {self.fewest}"
            )
        least = min(holding)
        if not self.lost and not self.planned and self.whole == least:
            return Refused("no worker is lost, and the same step fails again")
        first = next(iter(stay.values()))
        return Formation(self.attempt + 1, members, first.host, first.port, least)


class RollCalls:
    """The roll calls of a run, one after another. Kept by a process that is none of the workers."""

    def __init__(self, attempt: int, workers: int, fewest: int = 1) -> None:
        self._first = range(workers)
        self._now = RollCall(attempt, tuple(self._first), fewest)
        self._lost: set[int] = set()
        self._ready: set[int] = set()
        self._dismissed: set[int] = set()
        self._answers: dict[int, Formation | Refused] = {}
        self.newest: Formation | None = None
        """The group that went on last, where one did."""

    def ready(self, worker: int) -> None:
        """A worker trains, and would come to a roll call."""
        self._ready.add(worker)

    def arrive(self, attempt: int, worker: int, arrival: Arrival) -> None:
        """A worker of `attempt` has left its step and waits."""
        if attempt == self._now.attempt and worker in self._now.workers:
            self._now.arrived[worker] = arrival
            self._close()

    def enter(self, worker: int, arrival: Arrival) -> None:
        """A newcomer is ready, and waits to be let in."""
        if worker not in self._lost:
            self._ready.add(worker)
            self._now.newcomers[worker] = arrival

    def plan(self, leaving: Collection[int] = ()) -> int | None:
        """Have the workers come after a step, so that newcomers join and those in `leaving` leave. The attempt to be asked.

        None where they would not all come, or nobody would stay.
        """
        stay = set(self._now.workers) - set(leaving)
        if not stay or not self.able:
            return None
        self._now.planned, self._now.leaving = True, frozenset(leaving)
        return self._now.attempt

    @property
    def able(self) -> bool:
        """Whether every worker trains and would come to a roll call."""
        now = self._now
        refused = isinstance(self._answers.get(now.attempt), Refused)
        return bool(now.workers) and set(now.workers) <= self._ready and not now.ended and not refused

    @property
    def waiting(self) -> tuple[int, ...]:
        """The newcomers that wait to be let in."""
        return tuple(sorted(self._now.newcomers))

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers of the attempt at hand, by rank."""
        return self._now.workers

    def lose(self, worker: int) -> bool:
        """A worker's process is gone. Whether the others go on without it, as far as that is known."""
        self._now.newcomers.pop(worker, None)
        if worker not in self._lost:
            self._lost.add(worker)
            if worker in self._now.workers:
                self._now.lost.add(worker)
                self._close()
        if worker not in self._now.workers and worker not in self._first:  # a newcomer that was not let in
            return True
        left = set(self._now.workers) - self._lost
        there = len(left) + len(self._now.newcomers)
        able = bool(left) and left <= self._ready and there >= self._now.fewest and not self._now.ended
        if not able:
            self.refuse("not every worker that is left can go on")
        return able and not isinstance(self._answers.get(self._now.attempt), Refused)

    def refuse(self, why: str) -> None:
        """Nobody goes on any more: the attempt at hand ends, or has."""
        self._answers.setdefault(self._now.attempt, Refused(why))

    def end(self, worker: int) -> None:
        """A worker has ended by itself, with a result or an error of its own: it comes no more."""
        if worker in self._now.workers and worker not in self._lost:
            self._now.ended.add(worker)
            self._close()

    def ask(self, attempt: int | None, worker: int) -> Answer:
        """What a worker that has come to the roll call of `attempt` is told; a newcomer has come to the next one, without a number."""
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
        """The attempt whose workers are to come: one of them is lost, or has come. None as long as all train."""
        return self._now.attempt if self._now.arrived or self._now.lost else None

    def _close(self) -> None:
        """Go on to the next roll call where this one is over."""
        now = self._now
        answer = now.answer() if now.arrived else None
        if answer is None or now.attempt in self._answers:
            return
        self._answers[now.attempt] = answer
        if isinstance(answer, Formation):
            self.newest = answer
            self._dismissed |= now.leaving
            whole = None if now.lost or now.planned else answer.progress
            self._now = RollCall(answer.attempt, answer.workers, now.fewest, whole)
            self._now.lost |= self._lost & set(answer.workers)
