"""Threads that push content to a store, one for each kind, so that no kind waits for another's trouble.

A lane holds no queue. Before each call it asks its parts what is due now, so after an outage the store gets the newest
content, once. The result of a call decides what follows:

* success: the next call.
* UnavailableError (an outage, 429, 5xx, a timeout): the lane tries again with growing pauses. But if the call after it is answered,
the call is at fault and not the store.
* DeniedError (401, 403, a proxy's 404): the same with longer pauses, and reported at once.
* any other error: the content is refused. That is reported at once, and noted in the journal for `lockstep record sync`; the content is due
again when it changes, or at the run's end.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from lockstep.errors import RecordError
from lockstep.record import problems
from lockstep.record.errors import DeniedError, RejectedError, UnavailableError

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S, _LONGEST_DENIED_S = 0.25, 5.0, 20.0
_TRIES, _PROBED_AFTER_S = 3, 10.0
"""After so many tries and seconds the second call is tried: if that is answered, the first is refused."""
_MOST_HALVED = 16
"""After so many refusals among the items of one call, its rest is no longer searched for good ones."""
_NICER = 10
"""How much later than the thread that starts it a lane beside training has its turn."""
_NOTHING, _DELETED = object(), object()


class Call(NamedTuple):
    """One call that is due. `make` raises UnavailableError if it must be repeated; after `refuse` it is not due any more."""

    make: Callable[[], None]
    refuse: Callable[[Exception], None]


Note = Callable[[str, RecordError], None]
"""Notes refused content in the journal; RecordError where the disk refuses."""


class Outage(NamedTuple):
    """The store has not answered since `since` (monotonic seconds), in `tries` tries."""

    since: float
    tries: int
    error: UnavailableError


class Lane:
    """The thread of one kind of content, which `wake` starts. `low` gives it a low priority."""

    def __init__(self, name: str, note: Note, *, low: bool = False) -> None:
        self.parts: list[Part] = []
        self.next_s: Callable[[], float] = lambda: math.inf
        """In how many seconds something is due by itself."""
        self._note, self._low = note, low
        self._changed = threading.Condition()
        self._awake = self._stopped = False
        self._thread = threading.Thread(target=self._run, name=f"lockstep-record-{name}", daemon=True)
        self._again_at = 0.0
        self.outage: Outage | None = None
        self.moved_at = 0.0
        """When a call last began, moved on or succeeded, in monotonic seconds."""

    def wake(self) -> None:
        """Look for what is due; the first time, start the thread."""
        with self._changed:
            self._awake = True
            if self._thread.ident is None:
                self._thread.start()
            self._changed.notify_all()

    def hasten(self) -> None:
        """Make the calls after the one under way at the priority of the process. A thread may not raise its own: another one takes over."""
        with self._changed:
            if not self._low or self._thread.ident is None:
                return
            self._low, self._awake = False, True
            self._thread = threading.Thread(
                target=self._take_over, args=(self._thread,), name=self._thread.name, daemon=True
            )
            self._thread.start()
            self._changed.notify_all()

    def stop(self) -> None:
        """Begin no more calls."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def calls(self) -> Iterator[Call]:
        """The calls that are due now."""
        return (call for part in self.parts for call in part.calls())

    @property
    def idle(self) -> bool:
        """Whether nothing is due."""
        return next(self.calls(), None) is None

    @property
    def why_waiting(self) -> str:
        """Why something is still due: the store's last answer, if there was one."""
        outage, refusals = self.outage, list(self.refused.values())
        last_error = outage.error if outage else refusals[0] if refusals else None
        return str(last_error or "record: the store keeps a call waiting")

    @property
    def refused(self) -> dict[str, RecordError]:
        """What the store does not have, and why."""
        return {label: error for part in self.parts for label, error in dict(part.refused).items()}

    def retry(self) -> bool:
        """Make refused content due again. Returns whether there is any."""
        return sum(part.retry() for part in self.parts) > 0  # a sum, so that every part is asked

    def has_waited(self, closing_at: float, asked_at: float, patience_s: float) -> bool:
        """Whether the end of a run need not wait for this lane: nothing is due, or it has waited too long.

        Too long is `patience_s` for a store that does not answer, from `closing_at` or the start of the outage; and as much for a
        call that neither ends nor fails, from `asked_at` or its own start (monotonic seconds).
        """
        outage = self.outage
        since = max(closing_at, outage.since) if outage else max(asked_at, self.moved_at)
        return self.idle or time.monotonic() > since + patience_s

    def note(self, label: str, error: RecordError) -> None:
        """Note a refusal in the journal. UnavailableError if that is impossible now."""
        try:
            self._note(label, error)
        except RecordError as disk:
            raise disk.as_kind(UnavailableError) from disk

    # --- the thread -----------------------------------------------------------------------------------------

    def _take_over(self, former: threading.Thread) -> None:
        former.join()
        self._run()

    @property
    def _goes_on(self) -> bool:
        return not self._stopped and threading.current_thread() is self._thread

    def _run(self) -> None:
        if self._low and sys.platform == "linux":  # on Linux each thread has its own priority
            thread = threading.get_native_id()
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICER)
        while self._is_due():
            first, second = [*islice(self.calls(), 2), None, None][:2]
            if first is None:
                continue
            self._awake = True  # there may be more
            try:
                self._make(first, second)
            except UnavailableError as error:
                outage = self.outage or Outage(time.monotonic(), 0, error)
                self.outage = outage._replace(tries=outage.tries + 1, error=error)
                self._again_at = time.monotonic() + self._pause_s()

    def _is_due(self) -> bool:
        """Wait until there may be something to do. Returns False once the lane is stopped, or has another thread."""
        with self._changed:
            while self._goes_on:
                pause_s = 0.0 if self._awake else self.next_s()
                if self.outage:
                    pause_s = self._again_at - time.monotonic()
                if pause_s <= 0.0 or not self._changed.wait(None if pause_s == math.inf else pause_s):
                    break
            if not self._goes_on:
                return False
            self._awake = False
            return True

    def _make(self, call: Call, second: Call | None) -> None:
        self.moved_at = time.monotonic()
        try:
            call.make()
        except UnavailableError as error:
            if second is None or not self._answers(second):
                raise
            call.refuse(error)
        except Exception as error:  # noqa: BLE001 - a failure of one call must not prevent the calls behind it
            call.refuse(error)
        self.answered()

    def _answers(self, second: Call) -> bool:
        """Whether the store has long not answered a call, and answers the second one, which is then made."""
        outage = self.outage
        if outage is None or outage.tries < _TRIES or time.monotonic() - outage.since < _PROBED_AFTER_S:
            return False
        try:
            second.make()
        except Exception:  # noqa: BLE001 - it will be tried again in its turn
            return False
        self.answered()
        return True

    def answered(self) -> None:
        """The store took a part of the call that is being made: an outage is over, and the call is not silent.

        A backlog of points is one call of hundreds of requests. Without this, each failure among them would lengthen the next pause though the
        store answers the others, and the end of a run would take a slow store for a silent one.
        """
        self.outage, self.moved_at = None, time.monotonic()

    def _pause_s(self) -> float:
        assert self.outage is not None
        longest = _LONGEST_DENIED_S if isinstance(self.outage.error, DeniedError) else _LONGEST_PAUSE_S
        return float(min(_SHORTEST_PAUSE_S * 2 ** min(self.outage.tries - 1, 10), longest))


class Part:
    """One part of what a lane pushes, by name: what the store should have, and what it has as far as this process knows.

    A name is due if the two values differ, unless the store has refused that value. `send` pushes some of the desired content: one name at a time, or
    all that are due (`together`). With `delete`, the store loses what is no longer desired. `label` begins the name of the content in reports of failure.
    """

    def __init__(
        self,
        lane: Lane,
        label: str,
        send: Callable[[Mapping[Any, Any]], object],
        *,
        together: bool = False,
        delete: Callable[[Any], object] | None = None,
    ) -> None:
        lane.parts.append(self)
        self._lane, self._label, self._send = lane, label, send
        self._together, self._delete = together, delete
        self.desired: Mapping[Any, Any] = {}
        """What the store should have. Replaced as a whole by another thread, never changed."""
        self.actual: dict[Any, Any] = {}
        """What the store has."""
        self._refused: dict[Any, Any] = {}
        """The values that the store has refused."""
        self.refused: dict[str, RecordError] = {}
        """What the store does not have, and why."""
        self._lacking: dict[str, set[Any]] = {}
        """The names behind each of these reports that the store still lacks."""

    def confirm(self) -> None:
        """Take the desired content for what the store has."""
        self.actual = dict(self.desired)

    def calls(self) -> Iterator[Call]:
        """The calls that are due now, in order."""
        yield from self._pushes()
        yield from self._deletions()

    def _pushes(self) -> Iterator[Call]:
        due = [item for item in self.desired.items() if self._is_due(*item)]
        for items in ([due] if due else []) if self._together else [[item] for item in due]:
            yield Call(partial(self._push, items), partial(self.refuse, items))

    def _deletions(self) -> Iterator[Call]:
        if self._delete:
            yield from self._delete_each(name for name in list(self.actual) if name not in self.desired)

    def _delete_each(self, names: Iterable[Any]) -> Iterator[Call]:
        for name in names:
            if self._is_due(name, _DELETED):
                yield Call(partial(self._take_away, name), partial(self.refuse, [(name, _DELETED)]))

    def retry(self) -> bool:
        """Make refused content due again. Returns whether there is any."""
        again = bool(self._refused)
        self._refused.clear()
        return again

    def refuse(self, items: Sequence[tuple[Any, Any]], error: Exception) -> None:
        """Note that the store refuses this content. UnavailableError if the journal cannot note it now."""
        refusal = problems.as_record_error(error)
        title = self._title([name for name, _ in items])
        if title not in self.refused:
            self._lane.note(title, refusal)
            self.refused[title] = refusal
        self._lacking[title] = {name for name, _ in items}
        self._refused.update(items)

    def _is_due(self, name: Any, value: Any) -> bool:
        return bool(self.actual.get(name, _NOTHING) != value and self._refused.get(name, _NOTHING) != value)

    def _push(self, items: Sequence[tuple[Any, Any]]) -> None:
        def send(part: Sequence[tuple[Any, Any]]) -> None:
            self._send(dict(part))
            self.actual.update(part)
            self._accepted(part)

        send_acceptable(items, send, self.refuse)

    def _take_away(self, name: Any) -> None:
        assert self._delete is not None
        self._delete(name)
        self.actual.pop(name, None)
        self._accepted([(name, _DELETED)])

    def _accepted(self, items: Sequence[tuple[Any, Any]]) -> None:
        for title, names in list(self._lacking.items()):
            names.difference_update(name for name, _ in items)
            if not names:
                del self._lacking[title], self.refused[title]

    def _title(self, names: Sequence[Any]) -> str:
        return f"{self._label} {', '.join(sorted(map(str, names))[:5])}".rstrip()


Item = TypeVar("Item")


def send_acceptable(
    items: Sequence[Item],
    send: Callable[[Sequence[Item]], None],
    refuse: Callable[[Sequence[Item], Exception], None],
) -> None:
    """Send all items that the store accepts. One that it rejects costs no other: it is found by halving, and given to `refuse`."""
    refusals = 0

    def attempt(part: Sequence[Item]) -> None:
        nonlocal refusals
        try:
            send(part)
        except UnavailableError:
            raise
        except Exception as error:  # noqa: BLE001 - a value that cannot even be sent is refused as well
            final = isinstance(error, RecordError) and not isinstance(error, RejectedError)
            if final or len(part) == 1 or refusals >= _MOST_HALVED:
                refusals += 1
                refuse(part, error)
            else:
                half = len(part) // 2
                attempt(part[:half])
                attempt(part[half:])

    attempt(items)
