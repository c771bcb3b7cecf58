"""When an attempt gets another number of workers: back to what it was after a loss, more where there is room, elsewhere before its nodes go."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lockstep.attempts.cluster_capacity import draining, find_place, room, workers_at_most
from lockstep.attempts.demand import RoomRequest
from lockstep.attempts.failed_nodes import node_label
from lockstep.attempts.placement import WorkerPlacement, most_of
from lockstep.errors import SpecError
from lockstep.record.events.union import Joined
from lockstep.spec.fields import Spec

LOOK_S = 1.0
"""Seconds between two looks at the cluster."""

NEAR_S = 20.0
"""If nodes are about to go and nothing else has room: seconds before their deadline at which the last checkpoint is requested."""

STEADY_S = 3.0
"""How long room must persist before an attempt moves for it."""

REFILL_S = 10.0
"""How long workers that outlived others go on before they move to be as many again: a loss seldom comes alone."""


class Advice(NamedTuple):
    """What an attempt should do, with the reason: save and go on, or save, end, and go on elsewhere."""

    save: str | None = None
    move: str | None = None
    leaving: frozenset[str] = frozenset()
    """The nodes that the move leaves."""


class Resizing:
    """What one attempt at `placement` should do as the cluster around it changes; nodes in `without` are left out."""

    def __init__(self, spec: Spec, placement: WorkerPlacement, without: frozenset[str] = frozenset()) -> None:
        self._without = without
        self.spec, self.workers, self.each = spec, placement.workers, placement.each
        self._looked = 0.0
        self._noticed = 0
        """Saves so far for a notice without room elsewhere: 1 after the first, 2 after the one near the deadline."""
        self._roomy_since: float | None = None
        self._living, self._lost_at = placement.workers, 0.0
        self._request = RoomRequest()

    def close(self) -> None:
        """End the watch: request no more room."""
        self._request.release()

    def outlived(self, workers: int) -> None:
        """Note that only so many workers go on, after a loss. From `REFILL_S` later on, a move may replace the others."""
        self._living, self._lost_at = workers, time.monotonic()

    def changed(self, workers: int) -> None:
        """Note that the attempt has so many workers after a planned change."""
        self.workers = self._living = workers
        self._roomy_since = None

    def advice(self, members: Sequence[Joined]) -> Advice:
        """What the attempt of these workers should do now; at most one look per `LOOK_S`."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return Advice()
        self._looked = now
        gone = draining()
        leaving = {node: gone[node] for node in {member.node for member in members} if node in gone}
        return self._on_notice(leaving) if leaving else Advice(move=self._room_to_grow(now))

    def _on_notice(self, leaving: Mapping[str, float]) -> Advice:
        """Nodes with workers are about to go: move at once if there is room elsewhere, else save now and once more near their deadline."""
        names = ", ".join(map(node_label, sorted(leaving)))
        notice = f"{names} is being drained"
        try:
            find_place(self.spec, self._without)
        except SpecError as error:
            self._request.want(self.workers, self.each)
            near = min(leaving.values()) - time.time() < NEAR_S
            if self._noticed < 1 + near:
                self._noticed = 1 + near
                return Advice(save=f"{notice}, and nowhere else is room ({error})")
            return Advice()
        return Advice(move=notice, leaving=frozenset(leaving))

    def _room_to_grow(self, now: float) -> str | None:
        most = most_of(self.spec)
        self._request.want(most - self.workers, self.each)
        if self._living < self.workers:
            return self._room_to_refill(now)
        if self.workers >= most:
            return None
        possible = room(self.spec, self.workers, self.each)
        if possible > self.workers:  # part of what is free may be about to go
            possible = min(possible, workers_at_most(self.spec, self._without))
        if possible <= self.workers:
            self._roomy_since = None
            return None
        self._roomy_since = self._roomy_since or now
        if now - self._roomy_since < STEADY_S:
            return None
        return f"there is room for {possible} workers, {possible - self.workers} more"

    def _room_to_refill(self, now: float) -> str | None:
        """Whether to move for lost workers. Ray still reserves what they held for the attempt, so the nodes' totals count, not what is free."""
        if now - self._lost_at < REFILL_S:
            return None
        possible = min(workers_at_most(self.spec, self._without), self.workers)
        if possible <= self._living:
            return None
        return f"there is room for {possible} workers in place of the {self._living} that are left"
