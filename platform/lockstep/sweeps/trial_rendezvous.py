"""How the workers of a trial go on without one that is lost: their rendezvous, which are kept with the trial's recorder.

Rank 0 is Tune's own actor, with which Ray ends the actors that it has started: the other workers. Any of these may be lost: the rest go on in memory, to the
trial's end or until Tune gives their processes to another trial, which begins with all workers again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray

from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.clusters.bounded_calls import answer_of
from lockstep.communication.credentials import Secret
from lockstep.communication.group import Group
from lockstep.record.events.union import Joined
from lockstep.sweeps import problems
from lockstep.training.elastic.membership import Answer, Arrival, Formation, RendezvousRounds
from lockstep.training.elastic.recovery import Seat, next_attempt
from lockstep.training.elastic.rendezvous import RendezvousHandler

ANSWER_S = 60.0
"""How long the recorders may take to answer: nothing that they do for a rendezvous waits for anything."""

WHOSE = "the process of the sweep's recorders"


class TrialRendezvous:
    """The rendezvous of one attempt of a trial, which any thread may call. `formed` is called with each new group."""

    def __init__(self, attempt: int, workers: int, formed: Callable[[Formation], None]) -> None:
        self._calls, self._formed = RendezvousRounds(attempt, workers), formed
        self._attempt = attempt
        self._lock = threading.Lock()
        self.members: dict[int, Joined] = {}
        """The workers by number, which is the rank that each began with."""

    def ready(self, worker: int) -> None:
        """A worker trains, and would come to a rendezvous."""
        with self._lock:
            self._calls.ready(worker)

    def arrive(self, worker: int, attempt: int, arrival: Arrival) -> None:
        """A worker has left its step and waits."""
        with self._lock:
            self._calls.arrive(attempt, worker, arrival)
            self._follow()

    def ask(self, worker: int, attempt: int | None) -> Answer:
        """What a worker that waits is answered."""
        with self._lock:
            return self._calls.ask(attempt, worker)

    def called(self, _worker: int) -> int | None:
        """The attempt whose workers are to come to a rendezvous, where there is one."""
        with self._lock:
            return self._calls.called

    def lose(self, worker: int) -> bool:
        """A worker's process is gone. Whether the others go on without it."""
        with self._lock:
            goes_on = self._calls.lose(worker)
            self._follow()
            return goes_on

    def end(self, worker: int) -> None:
        """A worker has ended by itself: nobody goes on without it."""
        with self._lock:
            self._calls.refuse(f"worker {worker} has ended by itself")

    def _follow(self) -> None:
        formation = self._calls.newest
        if formation is not None and formation.attempt > self._attempt:
            self._attempt = formation.attempt
            self._formed(formation)


class TrialRendezvousClient:
    """One worker's way to the rendezvous of its trial (`training.elastic.rendezvous.RendezvousClient`)."""

    def __init__(self, recorders: Any, key: str, attempt: int, worker: int) -> None:
        """`attempt` is the one that the workers began with."""
        self._recorders, self._key, self._attempt, self._worker = recorders, key, attempt, worker

    def ready(self) -> None:
        self._call("ready")

    def arrive(self, attempt: int, arrival: Arrival) -> None:
        self._answer("arrive", attempt, arrival)

    def enter(self, arrival: Arrival) -> None:
        raise NotImplementedError("no worker joins a trial while it trains")

    def ask(self, attempt: int | None) -> Answer:
        answer: Answer = self._answer("ask", attempt)
        return answer

    def called(self) -> int | None:
        try:
            called: int | None = self._answer("called")
        except ray.exceptions.ActorUnavailableError as error:
            raise problems.RECORDERS_UNREACHABLE() from error
        except ray.exceptions.RayActorError:  # the sweep ends without them
            return None
        return called

    def lose(self, worker: int) -> bool:
        """Whether the others go on without a worker whose process is gone."""
        goes_on: bool = answer_of(
            self._recorders.ask_rendezvous.remote(self._key, self._attempt, "lose", worker), WHOSE, ANSWER_S
        )
        return goes_on

    def end(self) -> None:
        """Say that this worker ends: nobody is to wait for it."""
        self._call("end")

    def _answer(self, name: str, *arguments: Any) -> Any:
        return answer_of(self._call(name, *arguments), WHOSE, ANSWER_S)

    def _call(self, name: str, *arguments: Any) -> Any:
        return self._recorders.ask_rendezvous.remote(self._key, self._attempt, name, self._worker, *arguments)


@contextmanager
def trial_rendezvous(
    client: TrialRendezvousClient,
    attempt: int,
    worker: int,
    secret: Secret,
    seat: Callable[[Group, AttemptOrigin | None], Seat],
) -> Iterator[RendezvousHandler]:
    """Where a worker meets the others after a loss; `seat` makes its seat in their new group. On the way out nobody waits for this worker any more."""
    stores: list[Any] = []

    def seated(group: Group, number: int, previous: Seat) -> Seat:
        stores.append(group.store)
        return seat(group, next_attempt(previous.origin, number))

    with RendezvousHandler(
        attempt, worker, ray.util.get_node_ip_address(), secret, client, seated
    ) as rendezvous:
        try:
            yield rendezvous
        finally:
            client.end()
            for store in stores:
                if store is not None:
                    store.close()
