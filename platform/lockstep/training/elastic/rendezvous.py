"""How workers form the next group of a run, after a loss or with joining workers: they report at a rendezvous, then connect as it says.

The rendezvous is kept by a process that is none of the workers. Each worker that reports serves a key store, for those that know the
attempt's secret; the group is formed at that of its new rank 0.

A killed process closes its connections, and the others get an error at once. A machine that falls silent does not. So
each worker also asks now and then whether a rendezvous is on, and if so breaks its own group off.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

from lockstep.communication.credentials import Secret
from lockstep.communication.group import Group
from lockstep.communication.store import AuthenticatedStore, StoreServer
from lockstep.errors import SilentError
from lockstep.running_time import running_s
from lockstep.training.elastic import problems
from lockstep.training.elastic.membership import Answer, Arrival, Dismissed, Formation, Progress
from lockstep.training.elastic.recovery import Seat

ASK_S = 0.02
"""Seconds between the questions of a waiting worker whether all have come."""

WAIT_S = 0.2
"""Seconds between the questions of a joining worker whether it is let in."""

LISTEN_S = 1.0
"""Seconds between the questions of a training worker whether a rendezvous is on."""

CUT_OFF_S = 60.0
"""How long the process that keeps the rendezvous may be out of reach: it belongs to the run, and whoever reaches it goes on."""

CONNECT_S = 30.0
"""How long members of a new group may take to connect; one that is lost meanwhile never does."""


def end_cut_off() -> None:
    """End this process, whatever it waits for: it cannot reach its run any more, as beyond a cut of the network. The others go on without it."""
    os.write(
        2, b"lockstep: this worker cannot reach its run any more, and ends; the others go on without it\n"
    )
    os._exit(1)


class RendezvousClient(Protocol):
    """One worker's way to the process that keeps the rendezvous (`training.elastic.membership.RendezvousRounds`)."""

    def ready(self) -> None: ...

    def arrive(self, attempt: int, arrival: Arrival) -> None: ...

    def enter(self, arrival: Arrival) -> None: ...

    def ask(self, attempt: int | None) -> Answer: ...

    def called(self) -> int | None:
        """The attempt whose workers are to come, if any. SilentError where the process that keeps the rendezvous cannot be reached."""


class RendezvousHandler:
    """A worker's side of the rendezvous of a run: a `training.elastic.recovery.Recovery`. A context manager, which listens while it is open."""

    def __init__(
        self,
        attempt: int,
        worker: int,
        host: str,
        secret: Secret,
        client: RendezvousClient,
        seated: Callable[[Group, int, Seat], Seat],
        cut_off: Callable[[], object] = end_cut_off,
    ) -> None:
        """`worker` is this worker's number, `host` its machine's address, `secret` what the workers recognise each other by. `seated` makes the new seat from the group, its attempt and the old seat.

        `cut_off` is called in a thread of its own, where the client's answers have failed to come for CUT_OFF_S, twice in a row.
        """
        self._attempt, self._worker, self._host, self._secret = attempt, worker, host, secret
        self._client, self._seated, self._cut_off = client, seated, cut_off
        self._group: Group | None = None
        """The current group, until this worker leaves it."""
        self._lock = threading.Lock()
        self._over, self._wake = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def ready(self, seat: Seat) -> None:
        """Take part in rendezvous from now on."""
        self._group = seat.group
        self._group.waits.on_cut = self._wake.set
        self._client.ready()
        self._begin_to_listen()

    def enter(self, seat: Seat) -> Seat | None:
        """As a joining worker, wait until the workers of a run let this one in. Returns the seat in their new group; None where nobody is let in."""
        self._client.enter(Arrival(None, self._host, 0))
        while (answer := self._client.ask(None)) is None:
            time.sleep(WAIT_S)
        if not isinstance(answer, Formation):
            return None
        self._begin_to_listen()
        return self._connected(seat, answer, None)

    def regroup(self, seat: Seat, progress: Progress | None) -> Seat | None:
        """The seat in the next group, once all have come; None where the attempt must end. LeftError where this worker leaves."""
        with self._lock:
            self._group = None
        store = StoreServer(self._host, self._secret)
        try:
            self._client.arrive(self._attempt, Arrival(progress, self._host, store.port))
            while (answer := self._client.ask(self._attempt)) is None:
                time.sleep(ASK_S)
            if isinstance(answer, Formation):
                return self._connected(seat, answer, store)
        except BaseException:
            store.close()
            raise
        store.close()
        if isinstance(answer, Dismissed):
            raise problems.LEFT()
        return None

    def _connected(self, seat: Seat, answer: Formation, own: StoreServer | None) -> Seat:
        """Connect at the store of the new rank 0, which may be this worker's `own`, and return the seat once all members have connected."""
        self._attempt, timeout = answer.attempt, timedelta(seconds=CONNECT_S)
        rank, size = answer.workers.index(self._worker), len(answer.workers)
        if own is not None:
            if rank > 0:
                own.close()
            else:
                own.expect(size)
        store = AuthenticatedStore(
            answer.host, answer.port, self._secret, timeout, own if rank == 0 else None
        )
        store.set(f"here-{rank}", "")
        store.wait([f"here-{each}" for each in range(size)], timeout)
        group = Group.formed(rank, size, seat.group.device, store, answer.attempt)
        group.waits.on_cut = self._wake.set
        with self._lock:
            self._group = group
        return self._seated(group, self._attempt, seat)

    def close(self) -> None:
        """Stop listening."""
        self._over.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> RendezvousHandler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin_to_listen(self) -> None:
        self._thread = threading.Thread(target=self._listen, name="lockstep-roll-call", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        """Break the group off if a rendezvous is on and this worker still waits for a lost one."""
        heard: int | None = None
        silences, answered_at = 0, running_s()
        while True:
            woken = self._wake.wait(LISTEN_S)
            self._wake.clear()
            if self._over.is_set():
                return
            try:
                called = self._client.called()
                silences, answered_at = 0, running_s()
            except SilentError:
                silences += 1
                if silences > 1 and running_s() - answered_at >= CUT_OFF_S:
                    self._cut_off()
                    return
                continue
            with self._lock:
                # Break off at once if a connection has ended during a wait. Otherwise only when the same rendezvous is seen twice: by then
                # a worker that just had to finish its computation has noticed by itself.
                lost = called is not None and called == self._attempt and (woken or called == heard)
                if lost and self._group is not None:
                    self._group.break_off()
            heard = called
