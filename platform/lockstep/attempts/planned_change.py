"""A planned change of an attempt's workers: joining workers join and others leave while it trains, and no process is restarted.

The joining workers are started first, while the attempt trains on. When all of them are ready, the workers are asked to form another
group after their next step. If anything goes wrong before that, the caller decides: the attempt still trains as before.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from lockstep.attempts.cluster_capacity import rooms_left
from lockstep.attempts.joining_workers import JoiningWorkerPlace
from lockstep.attempts.mailbox import RunStatus
from lockstep.attempts.placement import most_of
from lockstep.attempts.recording import Recording
from lockstep.attempts.worker_group import WorkerGroup
from lockstep.running_time import running_s
from lockstep.spec.fields import Spec

READY_S = 300.0
"""How long joining workers may take to be ready: their processes start, and build data and model."""


class Members(NamedTuple):
    """Who joins and who leaves, by their numbers at rendezvous."""

    joining: tuple[int, ...]
    leaving: tuple[int, ...]


def joining_workers_for(
    nodes: frozenset[str], spec: Spec, attempt: WorkerGroup, status: RunStatus, without: frozenset[str]
) -> Members | None:
    """Start as many joining workers as there is room for, up to `workers.max`, to replace the workers on `nodes`, which are to leave.

    None, with nothing started, where nobody could stay, too few would be left, or nothing would change. No joining worker runs on a node in `without`.
    """
    everyone, numbers = status.everyone, status.numbers
    if not set(numbers) <= everyone.keys():
        return None
    leaving = tuple(number for number in numbers if everyone[number].node in nodes)
    stay = len(numbers) - len(leaving)
    if not stay:
        return None
    rooms = rooms_left(most_of(spec) - stay, attempt.each, attempt.vacant(everyone), without)
    if stay + len(rooms) < spec.workers.min or not (rooms or leaving):
        return None
    places = [JoiningWorkerPlace(*room) for room in rooms]
    return Members(attempt.start_joining_workers(places, everyone, status.view.table_versions), leaving)


class PlannedChange:
    """One change, from its start until the group is formed."""

    def __init__(self, why: str, members: Members, attempt: WorkerGroup, recording: Recording) -> None:
        self.why, self.members, self.began_at = why, members, time.time()
        self._attempt, self._recording = attempt, recording
        self._until = running_s() + READY_S
        self._asked = 0
        """The attempt whose workers were asked to form another group."""

    def is_done(self, status: RunStatus) -> bool:
        """Whether the group is formed."""
        present = set(status.numbers)
        return set(self.members.joining) <= present and not present & set(self.members.leaving)

    def look(self, status: RunStatus) -> str | None:
        """Do what is due next. Returns why the change cannot be made, in a few words, or None."""
        failed = self._attempt.joining_workers.failed
        for number in self.members.joining:
            if number in failed and number not in status.numbers:
                return f"worker {number} could not join: {failed[number]}"
        if running_s() > self._until:
            return f"the workers that were to join were not ready within {READY_S:.0f} s"
        ready = {*status.waiting, *status.numbers} >= set(self.members.joining)
        # A loss meanwhile may have begun another attempt: then ask again.
        if ready and self._asked < status.view.attempt:
            if not self._recording.ask_regroup(self.members.leaving):
                return "the workers cannot form another group"
            self._asked = status.view.attempt
        return None

    def give_up(self, status: RunStatus) -> None:
        """End the joining workers that were not let in."""
        self._attempt.dismiss([n for n in self.members.joining if n not in status.numbers])
