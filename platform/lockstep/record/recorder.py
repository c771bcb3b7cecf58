"""The recorder: it writes down what is told of a run, in a thread or a process of its own.

Only `run_id`, `url`, `run_folder` and `close` wait for anything: the thread that trains or drives only puts values
into a queue. The recorder is the run's only writer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lockstep.errors import RecordError, StorageError
from lockstep.record.events import Event
from lockstep.record.opening import Fetch, no_fetch
from lockstep.record.run_store import RunStore
from lockstep.record.stores import store_for
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
    tried again until `close`; `failure` reports it once that has lasted `patience_s`. `on_aliases` is called, in the recorder's thread and
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
            raise RecordError(
                f"record: the store has kept the creation of the run waiting for {OPEN_S:.0f} s"
            )
        if self._writer.run_id is None:
            raise self._writer.failure() or RecordError("record: the run was not created")
        return self._writer.run_id

    def url(self) -> str:
        """Wait until the run exists, and return the link to its page; empty if the store has no pages."""
        self.run_id()
        return self._writer.url

    def run_folder(self) -> Path:
        """Wait until the run exists, create its folder and return it. StorageError where that fails."""
        folder = self._writer.spec.folder / self.run_id()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"record.folder: cannot create {str(folder)!r}: {error.strerror or error}"
            ) from error
        return folder

    def failure(self) -> RecordError | None:
        """What could not be recorded so far, or None. Never waits."""
        return self._writer.failure()

    @property
    def violation(self) -> str:
        """The first step or evaluation that gave other bits when it was repeated; else empty. Never waits."""
        return self._writer.violation

    @property
    def diagnosed(self) -> tuple[str, ...]:
        """What the run has shown to be wrong with it since it was opened here, one line each. Never waits."""
        return self._writer.diagnosed

    @property
    def opened(self) -> bool:
        """Whether the run exists in its store. Never waits."""
        return self._writer.run_id is not None

    @property
    def journaled(self) -> int:
        """How many of the told events no longer depend on this process. Never waits."""
        return self._writer.journaled

    def close(self, timeout_s: float = 60.0) -> None:
        """Write what is left, for up to `timeout_s`. RecordError where something could not be written.

        A run without a `Finished` or `Failed` event is marked FAILED.
        """
        self._writer.close(timeout_s)
        failure = self._writer.failure()
        if failure:
            raise failure
