"""The recorder as a Ray actor on the driver's node: it fetches a run's events from the mailbox and writes them down."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.attempts.mailbox import (
    ANSWER_S,
    BEGUN,
    EVENTS_PER_FETCH,
    LOOK_S,
    Fetched,
    look_every_s,
    on_this_node,
)
from lockstep.checkpoint.runs.run_checkpoints import pin_aliased, read_shared
from lockstep.clusters.bounded_calls import answer_of
from lockstep.errors import RecordError
from lockstep.process import collect_seldom
from lockstep.record.events.union import Event, Started
from lockstep.record.ledger.rows import StepRow
from lockstep.record.mirror.run_store import RunStore
from lockstep.record.mirror.stores import store_for, warm_up
from lockstep.record.recorder import Recorder
from lockstep.spec.fields import Spec

OPENING_LOOK_S = 0.05
"""How often the mailbox is looked into while the run is created: the workers wait for its id."""


class RecorderActor:
    """Records one run from its mailbox until that is closed.

    The run is created with the first facts that a worker tells, just before the first step: what is found before, in the job
    or its data, leaves nothing behind. What that needs is imported meanwhile.
    """

    def __init__(self, spec: Spec, run_id: str | None, mailbox: Any, source: str, path: list[str]) -> None:
        collect_seldom()
        sys.path += [folder for folder in path if folder not in sys.path]  # where the driver finds the job
        # Both threads import the same modules, of which some import each other: the second one would find halves of them.
        self._importing = threading.Thread(
            target=_import_ahead, args=(spec,), name="lockstep-import", daemon=True
        )
        self._recorder = Recorder(
            spec,
            partial(self._store, time.time()),
            run_id=run_id,
            on_aliases=partial(pin_aliased, spec.checkpoint.storage),
            fetch=partial(read_shared, spec.checkpoint.storage),
            source=Path(source),
        )
        self._mailbox = mailbox
        self._exists = run_id is not None
        """The run is there already: of an earlier attempt, or of a recorder that was lost."""
        self._named_at: float | None = None
        """When the mailbox was first told the run's id, in Unix seconds."""
        self._done = self._sent = 0
        self._total_steps: int | None = None
        self._ends = False
        """Whether the mailbox is being closed, or the last step is told."""
        self._called = threading.Event()
        """There is something in the mailbox that is waited for."""
        self._importing.start()

    def _store(self, started_at: float, spec: Spec) -> RunStore:
        self._importing.join()
        return store_for(spec, started_at)

    def record(self) -> RecordError | None:
        """Until the mailbox is closed and all of it is written. Returns, rather than raises, what could not be: Ray would wrap it."""
        while not (fetched := self._fetch()).closed:
            if len(fetched.events) < EVENTS_PER_FETCH:
                self._pause()
        if not self._recorder.started:
            return None
        failures: list[RecordError] = []
        closing = threading.Thread(target=self._close, args=(failures,), name="lockstep-close")
        closing.start()
        while (
            closing.is_alive()
        ):  # drawing, uploading, and waiting for a store: the driver sees that it goes on
            closing.join(LOOK_S)
            self._fetch()
        return failures[0] if failures else None

    def look(self) -> None:
        """Look into the mailbox now: the run begins."""
        self._called.set()

    def end(self) -> None:
        """The mailbox is being closed: look into it now, and often."""
        self._ends = True
        self._called.set()

    def _pause(self) -> None:
        if self._ends:
            pause_s = LOOK_S
        elif self._named_at is None:
            pause_s = OPENING_LOOK_S if self._recorder.started else LOOK_S
        else:
            pause_s = look_every_s(self._named_at)
        self._called.wait(pause_s)
        self._called.clear()

    def _fetch(self) -> Fetched:
        state = self._recorder.state
        done = self._done + state.journaled
        if state.run_id is not None and self._named_at is None:
            self._named_at = time.time()
        ref = self._mailbox.fetch.remote(done, self._sent, state)
        fetched: Fetched = answer_of(ref, "the run's mailbox", ANSWER_S)
        if not self._sent:
            self._done = fetched.last - len(fetched.events)  # what the recorder before this one has written
        self._sent = fetched.last
        if fetched.events and (self._exists or any(isinstance(event, BEGUN) for event in fetched.events)):
            self._start()
        self._tell(fetched.events)
        if any(self._is_last(event) for event in fetched.events):
            self._ends = True
        return fetched

    def _is_last(self, event: Event) -> bool:
        """Whether this is the run's last step: what follows is looked for often, for the command waits for it."""
        if isinstance(event, Started):
            self._total_steps = event.facts.get("plan", {}).get("total_steps")
        return isinstance(event, StepRow) and event.step == self._total_steps

    def _tell(self, events: list[Event]) -> None:
        if events:
            self._recorder.tell(*events)

    def _start(self) -> None:
        if not self._recorder.started:
            self._recorder.start()

    def _close(self, failures: list[RecordError]) -> None:
        try:
            self._recorder.close()
        except RecordError as error:
            failures.append(error)


def _import_ahead(spec: Spec) -> None:
    with suppress(Exception):  # whatever is wrong with it is told when the store is opened
        warm_up(spec.record.uri)


def start_recorder(spec: Spec, environment: dict[str, str], run_id: str | None, mailbox: Any) -> Any:
    """A recorder actor on this node; it takes no CPU from the workers."""
    actor = on_this_node(RecorderActor, environment, max_concurrency=2)
    return actor.remote(spec, run_id, mailbox, str(Path.cwd()), list(sys.path))
