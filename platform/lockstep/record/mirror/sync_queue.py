"""The calls still to be made to a store: a queue and a thread for each kind, so that no kind waits for another's trouble.

The result of a call decides what follows:

* success: the next call.
* UnavailableError (an outage, 429, 5xx, a timeout): the call is repeated with growing pauses, and its kind waits behind it. But
if the call after it is answered, the call is at fault and not the store.
* DeniedError (401, 403, a proxy's 404): the same with longer pauses, and reported at once.
* any other error: the call is set aside, reported at once, and noted in the journal for `lockstep record sync`; the next call is made.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, get_args

from lockstep.errors import RecordError, first_line
from lockstep.record.events.union import SetAside
from lockstep.record.mirror.run_store import DeniedError, UnavailableError

Kind = Literal["status", "facts", "points", "files"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S, _LONGEST_DENIED_S = 0.25, 5.0, 20.0
_TRIES, _PROBED_AFTER_S = 3, 10.0
"""After so many tries and seconds the second call is tried: if that is answered, the first is set aside."""


class _Call(NamedTuple):
    what: str
    make: Callable[[], None]
    later: bool
    """Whether it may be made after later calls of its kind: a file is read when it is sent, but a tag would be outdated."""


class _Outage(NamedTuple):
    """The store has not answered since `since` (monotonic seconds), in `tries` tries."""

    since: float
    tries: int
    error: UnavailableError


Note = Callable[[SetAside], None]
"""Notes a call that is set aside in the journal; RecordError where the disk refuses."""


class Lane:
    """The calls of one kind, in order. Any thread may add to it."""

    def __init__(self, kind: Kind, note: Note) -> None:
        self.kind = kind
        self._note = note
        self._calls: deque[_Call] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._again: list[_Call] = []
        self.set_aside: dict[str, RecordError] = {}
        """What the store does not have, and why."""
        self.outage: _Outage | None = None
        self.delivered = 0
        self.moved_at = 0.0
        """When a call last began or succeeded, in monotonic seconds."""

    def __len__(self) -> int:
        return len(self._calls)

    def send(self, call: _Call) -> None:
        with self._changed:
            if not self._calls:
                self.moved_at = time.monotonic()
            self._calls.append(call)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"lockstep-record-{self.kind}", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def stop(self) -> None:
        """Begin no more calls."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def retry(self) -> bool:
        """Repeat the set-aside calls that may be repeated. Returns whether there are any."""
        again, self._again = self._again, []
        for call in again:
            self.send(call)
        return bool(again)

    @property
    def why_waiting(self) -> str:
        """Why the first call is still waiting: the store's last answer to it, if there was one."""
        if self.outage:
            return str(self.outage.error)
        with self._changed:
            last_error = self.set_aside.get(self._calls[0].what) if self._calls else None
        return str(last_error or "record: the store keeps a call waiting")

    def aside(self, what: str, error: Exception) -> None:
        """Set something aside. UnavailableError if the journal cannot note it now."""
        refusal = error if isinstance(error, RecordError) else RecordError(f"record: {first_line(error)}")
        if what not in self.set_aside:
            try:
                self._note(SetAside(what, str(refusal)))
            except RecordError as disk:
                raise UnavailableError(str(disk)) from disk
            self.set_aside[what] = refusal

    # --- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._calls and not self._stopped:
                    self._changed.wait()
                if self._stopped:
                    return
                waiting = bool(self._calls)
            if waiting and not self._try_first():
                with self._changed:
                    if not self._stopped:
                        self._changed.wait(self._pause_s())

    def _try_first(self) -> bool:
        """Make the first call. Returns whether it is done with."""
        call = self._calls[0]
        self.moved_at = time.monotonic()
        try:
            try:
                call.make()
                self.set_aside.pop(call.what, None)  # set by an earlier try
            except UnavailableError as error:
                if not self._probed(error):
                    raise
                self._put_aside(call, error)
            except Exception as error:  # noqa: BLE001 - a failure of one call must not prevent the calls behind it
                self._put_aside(call, error)
        except UnavailableError as error:
            outage = self.outage or _Outage(time.monotonic(), 0, error)
            self.outage = outage._replace(tries=outage.tries + 1, error=error)
            return False
        self._over(call)
        return True

    def _put_aside(self, call: _Call, error: Exception) -> None:
        self.aside(call.what, error)
        if call.later:
            self._again.append(call)

    def _probed(self, error: UnavailableError) -> bool:
        """Whether the store answers the second call, though not the first. That call is then done."""
        outage = self.outage
        if outage is None or len(self._calls) < 2:
            return False
        if outage.tries < _TRIES or time.monotonic() - outage.since < _PROBED_AFTER_S:
            return False
        second = self._calls[1]
        try:
            second.make()
        except Exception:  # noqa: BLE001 - it will be tried again in its turn
            return False
        self._over(second)
        return True

    def _over(self, call: _Call) -> None:
        self.outage, self.moved_at = None, time.monotonic()
        with self._changed:
            self._calls.remove(call)
            self.delivered += 1

    def _pause_s(self) -> float:
        if self.outage is None:
            return 0.0
        longest = _LONGEST_DENIED_S if isinstance(self.outage.error, DeniedError) else _LONGEST_PAUSE_S
        return float(min(_SHORTEST_PAUSE_S * 2 ** min(self.outage.tries - 1, 10), longest))


class Send(Protocol):
    """The signature of `SyncQueue.send`."""

    def __call__(
        self, kind: Kind, what: str, call: Callable[..., None], /, *arguments: Any, later: bool = False
    ) -> None: ...


class SyncQueue:
    """The lanes of one run. `patience_s` is how long the store may be silent before `failure` reports it."""

    def __init__(self, patience_s: float, note: Note) -> None:
        self._patience_s = patience_s
        self._refused: RecordError | None = None
        self.lanes = {kind: Lane(kind, note) for kind in KINDS}
        self.advice = "`lockstep record sync RUN` sends it again"
        """The advice to a person about a call that was set aside."""

    def send(
        self, kind: Kind, what: str, call: Callable[..., None], /, *arguments: Any, later: bool = False
    ) -> None:
        """Queue a call behind the waiting ones of its kind. `what` names its content in reports of failure."""
        self.lanes[kind].send(_Call(what, partial(call, *arguments), later or kind == "files"))

    @property
    def delivered(self) -> int:
        """The number of successful calls, which shows that work goes on."""
        return sum(lane.delivered for lane in self.lanes.values())

    def refuse(self, error: Exception) -> None:
        """Note what cannot be recorded. The first error is kept: the others mostly follow from it."""
        refusal = error if isinstance(error, RecordError) else RecordError(f"record: {first_line(error)}")
        self._refused = self._refused or refusal

    def idle(self, kinds: Sequence[Kind]) -> bool:
        """Whether no call of these kinds is waiting."""
        return not any(len(self.lanes[kind]) for kind in kinds)

    def settled(self, kinds: Sequence[Kind], closing_at: float, asked_at: float, patience_s: float) -> bool:
        """Whether no call of these kinds is waiting, except calls that have waited too long.

        Too long is `patience_s` for a store that does not answer, from `closing_at` or the start of the outage; and as much for a
        call that neither ends nor fails, from `asked_at` or its own start (monotonic seconds).
        """

        def since(lane: Lane) -> float:
            return max(closing_at, lane.outage.since) if lane.outage else max(asked_at, lane.moved_at)

        lanes = [self.lanes[kind] for kind in kinds]
        return all(not len(lane) or time.monotonic() > since(lane) + patience_s for lane in lanes)

    def retry(self) -> bool:
        """Repeat the set-aside calls. Returns whether there are any."""
        return sum(lane.retry() for lane in self.lanes.values()) > 0  # a sum, so that every lane is asked

    def give_up(self, kept: str, kinds: Sequence[Kind] = KINDS) -> None:
        """Stop trying these kinds; `kept` says where the recorded content is all the same."""
        for lane in (self.lanes[kind] for kind in kinds):
            lane.stop()
            if count := len(lane):
                self.refuse(RecordError(f"{lane.why_waiting}; calls not made: {count}; {kept}"))

    @property
    def away(self) -> str:
        """The error of the current outage, if some kind of call is not answered; else empty."""
        return next((str(outage.error) for outage in self._away()), "")

    @property
    def away_since(self) -> float:
        """When the newest outage began, in monotonic seconds; 0 if there is none."""
        return max((outage.since for outage in self._away()), default=0.0)

    def _away(self) -> list[_Outage]:
        return [outage for lane in self.lanes.values() if (outage := lane.outage) is not None]

    def failure(self) -> RecordError | None:
        """What was refused for good or set aside; else a denied call, or an outage longer than the patience; else None."""
        if self._refused is not None:
            return self._refused
        for lane in self.lanes.values():
            for what, error in list(lane.set_aside.items()):
                others = sum(len(each_lane.set_aside) for each_lane in self.lanes.values()) - 1
                more = f" (and {others} more)" if others else ""
                return RecordError(f"{error}; not recorded: {what}{more}; {self.advice}")
        for lane in self.lanes.values():
            outage = lane.outage
            if outage is not None and (
                isinstance(outage.error, DeniedError) or time.monotonic() - outage.since > self._patience_s
            ):
                return outage.error
        return None
