"""Tells a run's store the run's state: that its process lives, what is not recorded, and last of all how it ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep.errors import RecordError
from lockstep.record.mirror.metric_sync import Delivery
from lockstep.record.mirror.projection import Page
from lockstep.record.mirror.run_store import RunStore, Status
from lockstep.record.mirror.sync_queue import Kind, SyncQueue
from lockstep.record.runs.heartbeat import BEAT_S, process_tags

_CONTENT: tuple[Kind, ...] = ("facts", "points", "files")
"""What the store must have before it learns that the run has ended."""


class RunState:
    """The state of the run in `folder`. `failure` says what could not be recorded so far. One thread calls it; any thread may call `beat`.

    Of a run that does not go on (`goes_on`), the status that the store has stays until its end is told.
    """

    def __init__(
        self,
        folder: Path,
        page: Page,
        delivery: Delivery,
        sync_queue: SyncQueue,
        store: RunStore,
        failure: Callable[[], RecordError | None],
        *,
        goes_on: bool = True,
    ) -> None:
        self._folder, self._goes_on = folder, goes_on
        self._page, self._delivery = page, delivery
        self._sync_queue, self._store = sync_queue, store
        self._failure = failure
        self.ended = False
        """Whether the run has ended, which its page shows or will show soon. Set by `end`."""
        self._over = False
        self._telling = threading.Lock()
        self._trouble = self._trouble_sent = ""
        self._away = False
        self._beat_at = 0.0

    def begin(self, *, resumed: bool) -> None:
        """Report that this process records the run."""
        if resumed:
            self._send_trouble("")  # that of the previous attempt
        self._tag_process()

    def end(self) -> None:
        """Note that the run has ended; from now on no beat takes anything back."""
        with self._telling:
            self.ended = True

    def tend(self) -> None:
        """Report what is due. Called now and then while the run lasts."""
        self.beat()
        self._report()
        if self._page.came_to is not None and self._sync_queue.idle(_CONTENT) and self._failure() is None:
            self._tell_end()

    def finish(self, closing_at: float, patience_s: float) -> bool:
        """Send the store what is waiting, then the run's end; no more events follow. Returns whether the store has all copies.

        A silent store is waited for up to `patience_s` after `closing_at` (monotonic seconds).
        """
        advice = (
            f"what was recorded up to its end is in {str(self._folder)!r}; "
            f"`lockstep record sync {self._folder.name}` sends it"
        )

        def settle(*kinds: Kind) -> None:
            self._settle(kinds, closing_at, patience_s)

        settle(*_CONTENT)
        if self._sync_queue.retry() or self._delivery.left:
            self._delivery.flush(again=True)
            settle(*_CONTENT)
        copied = self._page.close(max(closing_at, self._sync_queue.away_since) + patience_s)
        self._sync_queue.give_up(advice, ("points", "files"))
        informed = self._is_informed(settle)
        if self._page.came_to is not None and informed:  # else readers would believe the record complete
            self._tell_end()
        elif self._page.came_to is not None:
            self._sync_queue.refuse(
                RecordError(f"record: the store was not told how the run ended; {advice}")
            )
        settle("status")
        self._sync_queue.give_up(advice)
        return copied

    def _settle(self, kinds: Sequence[Kind], closing_at: float, patience_s: float) -> None:
        """Wait until the calls of these kinds are made, or have waited as long as the end of a run may take."""
        began = time.monotonic()
        while self._page.working or not self._sync_queue.settled(kinds, closing_at, began, patience_s):
            time.sleep(0.01)
            self._delivery.flush()
            self.beat()
            self._report()

    def _is_informed(self, settle: Callable[[Kind], None]) -> bool:
        """Whether the store knows what it lacks, and lacks nothing else."""
        for _ in range(3):  # the report itself may be refused
            self._report()
            settle("facts")
            if self._sync_queue.idle(("facts",)) and self._trouble_sent == str(self._failure() or ""):
                return True
        return False

    def _tell_end(self) -> None:
        """Tell the store how the run ended, once it has everything else."""
        end, self._page.came_to = self._page.came_to, None
        assert end is not None
        with self._telling:  # so that no beat follows it
            self._over = True
            self._send_status(end, self._page.ended_at)

    def beat(self) -> None:
        """Report now and then that this process lives. This also clears what a hasty reader may have set, and restores RUNNING."""
        with self._telling:
            if (
                self._over
                or not self._sync_queue.idle(("status",))
                or time.monotonic() - self._beat_at < BEAT_S
            ):
                return
            if self._goes_on:
                self._send_status("RUNNING")
            self._tag_process()
            # Queued with the facts, so that an error of the run itself comes after it.
            if not self.ended and self._sync_queue.idle(("facts",)):
                self._sync_queue.send(
                    "facts", "tags lockstep.error", self._store.set_tags, {"lockstep.error": ""}
                )

    def _report(self) -> None:
        """Show on the run's page what is not recorded, when that changes."""
        away = self._sync_queue.away
        if bool(away) != self._away:
            self._away = bool(away)
            self._page.log(f"the store is away: {away}" if away else "the store is back")
        text = str(self._failure() or "")
        if text != self._trouble:
            self._trouble = text
            self._page.trouble(text)
            self._send_trouble(text)

    def _send_trouble(self, text: str) -> None:
        self._sync_queue.send("facts", "what is not recorded", self._tag_trouble, text)

    def _tag_trouble(self, text: str) -> None:
        self._store.set_tags({"lockstep.record_error": text})
        self._trouble_sent = text

    def _tag_process(self) -> None:
        self._beat_at = time.monotonic()
        tags = process_tags(time.time()) | {"lockstep.vanished": ""}
        self._sync_queue.send("status", "heartbeat", self._store.set_tags, tags)

    def _send_status(self, status: Status, at: float | None = None) -> None:
        self._sync_queue.send("status", f"status {status}", self._store.set_status, status, at)
