"""The thread that writes a run's record: the only one that touches the journal, the store, the ledger and their files.

* What happened arrives in the inbox, in order, and is in the journal before a store hears of it.
* The store calls made of it wait in the outbox, in order; metric points wait in the journal, not in memory.
* A step that the journal has is not added again but compared with it: with `determinism: strict` and
  `reduction: exact` a replayed step has the same bits, or the run's promise is broken, which is told.
* Nothing here stops training: a failure is kept, to be read by `failure` and raised by `Recorder.close`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError, RecordError
from lockstep.record.account import Account
from lockstep.record.comparison import evaluation_difference, step_difference
from lockstep.record.delivery import Delivery
from lockstep.record.journal import Journal
from lockstep.record.ledger import CheckpointRow, EvaluationRow, StepRow
from lockstep.record.liveness import BEAT_S, process_tags
from lockstep.record.outbox import Outbox
from lockstep.record.run_store import RunStore, Status, UnavailableError
from lockstep.spec.fields import Spec

FLUSH_S = 1.0
"""How long points are gathered before they are sent."""
OPENING_PATIENCE_S = 10.0
"""How long a store that does not answer may keep a run from starting."""


class Writer:
    """One run's record in the making. `started` to `replay` run in the thread, told by `Recorder` through `tell`."""

    def __init__(
        self,
        spec: Spec,
        make_store: Callable[[Spec], RunStore],
        run_id: str | None,
        patience_s: float,
        on_aliases: Callable[[str, frozenset[int]], None],
    ) -> None:
        self.spec = spec
        self.opened = threading.Event()
        self.run_id: str | None = None
        self.url = ""
        self.violation = ""
        self._resumed = run_id
        self._make_store = make_store
        self._patience_s = patience_s
        self._on_aliases = on_aliases
        self._store: RunStore
        self._journal: Journal
        self._account: Account
        self._delivery: Delivery
        self._folder: Path
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outbox = Outbox(patience_s)
        self._sending = self._busy = False
        self._wake = (
            threading.Event()
        )  # not the inbox: a thread that wakes for each step slows every step by 10 %
        self._beat_at = 0.0
        self._ended = False
        self._closing = False
        self._closing_s = 0.0
        self._closing_at = float("inf")
        self._thread = threading.Thread(target=self._run, name="lockstep-record", daemon=True)

    # --- called by other threads --------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def tell(self, name: str, *arguments: Any) -> None:
        """Have the method of this name called in the thread, after everything told before. Returns at once."""
        if self.run_id is not None or not self.opened.is_set():  # where opening failed nobody reads the inbox
            self._inbox.put(partial(getattr(self, name), *arguments))

    def failure(self) -> RecordError | None:
        """What could not be recorded so far."""
        return self._outbox.failure()

    def close(self, timeout_s: float) -> None:
        """Write what is left and end the thread. A store that is silent is waited for up to `timeout_s`; work is, till it is done."""
        if self._thread.ident is None:
            return  # never started: nothing was given that could be lost
        self._closing_s = timeout_s
        self.tell("close_account")
        self._wake.set()
        seen, until = -1, 0.0
        while self._thread.is_alive():
            if self._outbox.delivered != seen or self._working:
                seen, until = self._outbox.delivered, time.monotonic() + timeout_s + 0.5
            elif time.monotonic() > until:
                self._outbox.refuse(
                    RecordError(f"record: the store has kept a call waiting for {timeout_s:.0f} s")
                )
                return
            self._thread.join(0.05)

    # --- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._open()
        except Exception as error:  # noqa: BLE001 - whatever it is, the driver waits to be told
            self._outbox.refuse(error)
            return
        finally:
            self.opened.set()
        while True:
            self._deliver()
            if self._closing and (not self._outbox or time.monotonic() > self._deadline()):
                break
            self._receive()
            self._flush()
            self._beat()
        self._end_journal()

    def _deliver(self) -> None:
        before = self._outbox.away
        self._outbox.deliver()
        after = self._outbox.away
        if bool(before) != bool(after):
            self._account.log(f"the store is away: {after}" if after else "the store is back")

    def _end_journal(self) -> None:
        self._account.close(self._deadline())
        self._outbox.give_up(
            f"what was recorded up to its end is in {str(self._folder)!r}; `lockstep record sync {self.run_id}` sends it"
        )
        try:
            if self._outbox.failure() is None:
                self._journal.add_event("delivered", {})
            self._journal.close()
        except (OSError, RecordError) as error:
            self._outbox.refuse(error)

    def _open(self) -> None:
        self._store = self._make_store(self.spec)
        run_id = self._open_store()
        try:
            self._begin(run_id)
        except Exception:
            if self._resumed is None:  # a run that another process records is not touched
                with contextlib.suppress(
                    RecordError
                ):  # the cause is raised; that the run stays RUNNING comes second
                    self._store.set_status("FAILED")
            raise
        self.run_id = run_id

    def _begin(self, run_id: str) -> None:
        self._folder = self.spec.folder / run_id
        self._journal = Journal(self._folder)
        self._store.set_status("RUNNING")
        self._journal.add_event("opened", {"at": time.time(), **process_tags(time.time())})
        self._account = Account(self.spec, self._folder, self._journal, self._store, self._outbox.send)
        self._delivery = Delivery(
            self._journal,
            self._store,
            dict(self._store.last_steps()),
            scaled=self.spec.precision == "fp16",
        )
        self._account.keep_spec()
        self._outbox.deliver()  # before anyone learns of the run: from here on it can be resumed from its store
        self._account.describe(resumed=self._resumed is not None)
        self._tag_process()
        self.url = self._store.url()

    def _open_store(self) -> str:
        until = time.monotonic() + min(self._patience_s, OPENING_PATIENCE_S)
        while True:
            try:
                return self._store.open(self._resumed)
            except UnavailableError:
                if time.monotonic() + 0.5 > until:
                    raise
                time.sleep(0.5)

    def _receive(self) -> None:
        """Wait while points gather or the store is away, then let all that was told happen."""
        if self._closing:  # nothing more will be told: an outage is all there is to wait for
            time.sleep(max(0.0, min(self._outbox.pause_s(), self._deadline() - time.monotonic())))
        else:
            self._wake.wait(self._outbox.pause_s() or FLUSH_S)
        while True:
            try:
                happened = self._inbox.get_nowait()
            except queue.Empty:
                return
            self._busy = True
            try:
                happened()
            except Exception as error:  # noqa: BLE001 - a fact that cannot be recorded must not cost the others
                self._outbox.refuse(error)
            finally:
                self._busy = False

    def _flush(self) -> None:
        """Have the journal's points sent, once: the call that waits sends all there are when its turn comes."""
        if self._delivery.due and not self._sending:
            self._sending = True
            self._outbox.send(self._send_points)

    def _send_points(self) -> None:
        try:
            self._delivery.send()
        except UnavailableError:
            raise  # the call stays, and is made again
        except BaseException:
            self._sending = False
            raise
        self._sending = False

    def _beat(self) -> None:
        """Say that this process lives, now and then; with it goes the RUNNING that a hasty reader may have taken away."""
        if self._ended or self._outbox or time.monotonic() - self._beat_at < BEAT_S:
            return
        self._outbox.send(self._store.set_status, "RUNNING")
        self._tag_process()

    def _tag_process(self) -> None:
        self._beat_at = time.monotonic()
        self._outbox.send(self._store.set_tags, process_tags(time.time()) | {"lockstep.vanished": ""})

    def _deadline(self) -> float:
        """Until when a silent store is waited for, in monotonic seconds."""
        return max(self._closing_at, self._outbox.away_since) + self._closing_s

    @property
    def _working(self) -> bool:
        """Whether this process itself takes its time: it draws, or traces the job's model."""
        return self._busy or (self.run_id is not None and self._account.working)

    def close_account(self) -> None:
        """Nothing more will be told."""
        self._closing, self._closing_at = True, time.monotonic()
        if not self._ended:
            failure = self._outbox.failure()
            self.failed(f"the run ended without a result{f' ({failure})' if failure else ''}", "", "FAILED")
        self._account.keep_output()

    # --- what happened ------------------------------------------------------------------------------------

    def started(self, facts: Mapping[str, Any]) -> None:
        self._journal.add_event("started", facts)
        self._account.started(facts)

    def steps(self, rows: Sequence[StepRow]) -> None:
        new: list[StepRow] = []
        last = self._journal.last_step
        for row in rows:
            if row.step > last:
                new.append(row)
                last = row.step
            else:
                self._compare(row, new)
        self._journal.add_steps(new)

    def _compare(self, row: StepRow, new: Sequence[StepRow]) -> None:
        before = self._journal.step(row.step) or next((r for r in new if r.step == row.step), None)
        if before is not None:
            self._judge(step_difference(before, row), row.step)

    def evaluation(self, row: EvaluationRow) -> None:
        before = self._journal.evaluation(row.step)
        if before is None:
            self._journal.add_evaluation(row)
        else:
            self._judge(evaluation_difference(before, row), row.step)

    def _judge(self, difference: str, step: int) -> None:
        exact = self.spec.determinism == "strict" and self.spec.reduction == "exact"
        if not difference or not exact or self.violation:
            return
        self.violation = f"step {step} gave other bits when it was done again: {difference}"
        self._account.violated(self.violation)

    def system(self, node: str, values: Mapping[str, float], at: float) -> None:
        self._journal.add_event("system", {"node": node, "at": at, "values": dict(values)})

    def attempts(self, attempts: Sequence[Mapping[str, Any]]) -> None:
        self._journal.add_event("attempts", list(attempts))
        self._account.attempts(attempts)

    def document(self, name: str, text: str) -> None:
        self._journal.add_event("document", {"name": name, "text": text})
        self._account.document(name, text)

    def checkpoint(self, row: CheckpointRow) -> None:
        self._journal.add_event("checkpoint", row._asdict())
        self._account.checkpoint(row)
        self._outbox.send(self._tell_aliases)

    def _tell_aliases(self) -> None:
        try:
            self._on_aliases(self._folder.name, self._store.aliased_steps())
        except UnavailableError:
            raise
        except LockstepError as error:  # a store without a registry, say: what is pinned stays so
            self._account.log(f"aliases of checkpoints: {error}")

    def output(self, name: str, text: str) -> None:
        self._account.output(name, text)

    def finished(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        self._journal.add_event(
            "finished", {"summary": summary, "files": [self._inside(path) for path in files]}
        )
        self._end(self._account.finished, summary, files)

    def failed(self, message: str, details: str, status: Status) -> None:
        self._journal.add_event("failed", {"message": message, "details": details, "status": status})
        self._end(self._account.failed, message, details, status)

    def replay(self) -> None:
        """Say again what the journal has of a run whose process has gone, and how that ended."""
        rows = [value for kind, value, _ in self._journal.events if kind == "checkpoint"]
        self._account.replay_checkpoints([CheckpointRow(**row) for row in rows])
        ending = None
        for kind, value, _ in self._journal.events:
            if kind == "attempts":
                self._account.attempts(value)
            elif kind == "document":
                self._account.document(**value)
            elif kind == "started":
                self._account.started(value)
                ending = None
            elif kind in {"finished", "failed"}:
                ending = kind, value
        if ending is None:
            self.failed("the process that recorded the run has gone without a word", "", "FAILED")
            return
        kind, value = ending
        if kind == "finished":
            files = [self._folder / name for name in value["files"]]
            self._end(self._account.finished, value["summary"], files)
        else:
            self._end(self._account.failed, value["message"], value["details"], value["status"])

    def _end(self, tell: Callable[..., None], *arguments: Any) -> None:
        self._ended = True
        self._flush()
        tell(*arguments)

    def _inside(self, path: Path) -> str:
        return str(path.relative_to(self._folder) if path.is_relative_to(self._folder) else path)
