"""Who of a group is left after a loss, and who goes on: pure, so that every case can be tested.

A worker has one number for as long as it lives: the rank of its first group. A roll call ends when each worker of the group has
come, or is known to be lost, or has ended by itself; one that is only late is waited for. Those that have come go on, in the order
of their numbers, as the next attempt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Progress(NamedTuple):
    """How far a worker is: steps done, and steps done at its last evaluation. The less comes first."""

    step: int
    evaluated: int


class Arrival(NamedTuple):
    """What a worker says when it has left its step."""

    progress: Progress
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


Answer = Formation | Refused | None
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

    def answer(self) -> Answer:
        """What those that have come are told."""
        if self.ended:
            return Refused(f"worker {min(self.ended)} has ended by itself")
        there = {worker: self.arrived[worker] for worker in sorted(self.arrived) if worker not in self.lost}
        if len(there) + len(self.lost) < len(self.workers):
            return None
        if len(there) < max(1, self.fewest):
            return Refused(
                f"{len(there)} of {len(self.workers)} workers are left, wanted at least {self.fewest}"
            )
        least = min(arrival.progress for arrival in there.values())
        if not self.lost and self.whole == least:
            return Refused("no worker is lost, and the same step fails again")
        first = next(iter(there.values()))
        return Formation(self.attempt + 1, tuple(there), first.host, first.port, least)


class RollCalls:
    """The roll calls of a run, one after another. Kept by a process that is none of the workers."""

    def __init__(self, attempt: int, workers: int, fewest: int = 1) -> None:
        self._now = RollCall(attempt, tuple(range(workers)), fewest)
        self._lost: set[int] = set()
        self._ready: set[int] = set()
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

    def lose(self, worker: int) -> bool:
        """A worker's process is gone. Whether the others go on without it, as far as that is known."""
        if worker not in self._lost:
            self._lost.add(worker)
            if worker in self._now.workers:
                self._now.lost.add(worker)
                self._close()
        left = set(self._now.workers) - self._lost
        able = left <= self._ready and len(left) >= max(1, self._now.fewest) and not self._now.ended
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

    def ask(self, attempt: int, worker: int) -> Answer:
        """What a worker that has come to the roll call of `attempt` is told."""
        answer = self._answers.get(attempt)
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
            whole = None if now.lost else answer.progress
            self._now = RollCall(answer.attempt, answer.workers, now.fewest, whole)
            self._now.lost |= self._lost & set(answer.workers)
