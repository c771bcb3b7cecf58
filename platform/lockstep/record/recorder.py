"""The recorder: it writes down what a run reports, in a thread or a process of its own.

Only `run_id`, `run_folder` and `close` wait for anything: the thread that trains or drives only puts values
into a queue. The recorder is the run's only writer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lockstep.record import problems
from lockstep.record.events.union import Event
from lockstep.record.mirror.run_store import RunStore
from lockstep.record.mirror.stores import store_for
from lockstep.record.opening import Fetch, no_fetch
from lockstep.record.recorder_state import RecorderState
from lockstep.record.writer import Aliases, Writer
from lockstep.record.writer_process import WriterProcess
from lockstep.spec.fields import Spec

OPEN_S = 900.0
"""How long a store may take to open. One that does not answer is given up after seconds; this limit is for one that answers slowly."""


def no_aliases(run_id: str, steps: frozenset[int]) -> None:
    """The `Aliases` callback of callers that need no aliases."""


class Recorder:
    """Records one run: a new one or, with `run_id`, one that is resumed.

    Call `start`, then `tell` any number of times, and always `close` at the end. A store that does not answer is
    tried again until `close`; the state reports it once that has lasted `patience_s`. `on_aliases` is called, in the recorder's thread and
    after each checkpoint, with the run's id and the steps whose checkpoints have an alias in the store's registry. The git state of
    the folder `source` is recorded with each start. `fetch` reads a file that the run's checkpoints share. With `replay` the recorder
    reports the content of the run's journal again. With `apart` a process of its own writes, rather than a thread; the callables must then
    survive pickling.
    """

    def __init__(
        self,
        spec: Spec,
        store_factory: Callable[[Spec], RunStore] | None = None,
        run_id: str | None = None,
        *,
        patience_s: float = 60.0,
        on_aliases: Aliases = no_aliases,
        source: Path | None = None,
        replay: bool = False,
        apart: bool = False,
        fetch: Fetch = no_fetch,
    ) -> None:
        make_store = store_factory or partial(store_for, started_at=time.time())
        writer = WriterProcess if apart else Writer
        self._writer = writer(spec, make_store, run_id, patience_s, on_aliases, source, replay, fetch)
        self.apart = apart
        self.started = False
        """Whether `start` was called. Before that, nothing of the run exists anywhere."""

    def warm_up(self) -> None:
        """Start the separate process and let it import what the store needs; nothing is created. Does nothing for a thread, which would be in the way."""
        if isinstance(self._writer, WriterProcess):
            self._writer.warm_up()

    def start(self) -> None:
        """Start the thread; it opens the store and creates the run."""
        self.started = True
        self._writer.start()

    def tell(self, *events: Event) -> None:
        """Record events, in order. Rows that are already recorded are compared, not added again. Never waits."""
        self._writer.tell(events)

    def run_id(self) -> str:
        """Wait until the run exists, and return its id. RecordError where the store could not be opened, or not within OPEN_S."""
        if not self._writer.opened.wait(OPEN_S):
            raise problems.SLOW_STORE(what="the creation of the run", waited_s=f"{OPEN_S:.0f}")
        state = self._writer.state
        if state.run_id is None:
            raise state.failure or problems.OTHER(got="the run was not created")
        return state.run_id

    def run_folder(self) -> Path:
        """Wait until the run exists, and return its folder. RecordError as in `run_id`."""
        self.run_id()
        return Path(self._writer.state.folder)

    @property
    def lost(self) -> bool:
        """Whether its process has ended by itself: nothing more can be recorded."""
        return isinstance(self._writer, WriterProcess) and self._writer.lost

    @property
    def state(self) -> RecorderState:
        """How the record stands. Never waits."""
        return self._writer.state

    def close(self, timeout_s: float = 60.0) -> None:
        """Write what is left, for up to `timeout_s`. RecordError where something could not be written.

        A run without a `Finished` or `Failed` event is marked FAILED.
        """
        self._writer.close(timeout_s)
        failure = self._writer.state.failure
        if failure:
            raise failure
