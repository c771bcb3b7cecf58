"""The thread that writes a run's record: the only one that touches the store, the ledger and their files.

* What happened arrives in the inbox, in order; the store calls made of it wait in the outbox, in order.
* A step that the ledger has is not added again, and a point at or below the highest step recorded of its key is not
  sent again: an attempt that replays steps leaves no trace in either.
* Nothing here stops training: a failure is kept, to be read by `failure` and raised by `Recorder.close`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import RecordError
from lockstep.record import documents, ledger
from lockstep.record.files import write_text
from lockstep.record.ledger import CheckpointRow, EvaluationRow, StepRow
from lockstep.record.outbox import Outbox
from lockstep.record.points import Point, checkpoint_points, evaluation_points, step_points
from lockstep.record.run_store import POINTS_PER_CALL, RunStore, Status, UnavailableError
from lockstep.spec import Spec

FLUSH_S = 1.0
"""How long points are gathered before they are sent."""
OPENING_PATIENCE_S = 10.0
"""How long a store that does not answer may keep a run from starting."""
_ENVIRONMENT_TAGS = ("lockstep", "python", "torch", "device_kind", "device_name")
"""Facts of the environment that are worth searching runs by; all of them are in environment.json."""


class Writer:
    """One run's record in the making. `started` to `failed` run in the thread, told by `Recorder` through `tell`."""

    def __init__(
        self, spec: Spec, make_store: Callable[[Spec], RunStore], run_id: str | None, patience_s: float
    ) -> None:
        self.spec = spec
        self.opened = threading.Event()
        self.run_id: str | None = None
        self.url = ""
        self._resumed = run_id
        self._make_store = make_store
        self._patience_s = patience_s
        self._store: RunStore
        self._folder: Path
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outbox = Outbox(patience_s)
        self._points: list[Point] = []
        self._last_steps: dict[str, int] = {}
        self._steps: list[StepRow] = []
        self._evaluations: list[EvaluationRow] = []
        self._facts: dict[str, Any] = {}
        self._wake = (
            threading.Event()
        )  # not the inbox: a thread that wakes for each step slows every step by 10 %
        self._ended = False
        self._closing = False
        self._deadline = float("inf")
        self._thread = threading.Thread(target=self._run, name="lockstep-record", daemon=True)

    # --- called by other threads --------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def tell(self, happened: Callable[[], None]) -> None:
        """Have `happened` called in the thread, after everything told before. Returns at once."""
        if self.run_id is not None or not self.opened.is_set():  # where opening failed nobody reads the inbox
            self._inbox.put(happened)

    def failure(self) -> RecordError | None:
        """What could not be recorded so far."""
        return self._outbox.failure()

    def close(self, timeout_s: float) -> None:
        """Write what is left, for up to `timeout_s`, and end the thread."""
        if self._thread.ident is None:
            return  # never started: nothing was given that could be lost
        self._deadline = time.monotonic() + timeout_s
        self.tell(self._close)
        self._wake.set()
        self._thread.join(timeout_s + 0.5)
        if self._thread.is_alive():
            self._outbox.refuse(
                RecordError(f"record: the store has kept a call waiting for {timeout_s:.0f} s")
            )

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
            self._outbox.deliver()
            if self._closing and (not self._outbox or time.monotonic() > self._deadline):
                break
            self._receive()
            self._flush()
        self._outbox.give_up(f"what was recorded up to its end is in {str(self._folder)!r}")

    def _open(self) -> None:
        self._store = self._make_store(self.spec)
        run_id = self._open_store()
        try:
            self._begin(run_id)
        except Exception:
            with contextlib.suppress(
                RecordError
            ):  # the cause is raised; that the run stays RUNNING comes second
                self._store.set_status("FAILED")
            raise
        self.run_id = run_id

    def _begin(self, run_id: str) -> None:
        self._last_steps = dict(self._store.last_steps())
        self._folder = self.spec.folder / run_id
        if self._resumed:
            self._read_ledger()
        self._describe()
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
            time.sleep(max(0.0, min(self._outbox.pause_s(), self._deadline - time.monotonic())))
        else:
            self._wake.wait(self._outbox.pause_s() or FLUSH_S)
        while True:
            try:
                happened = self._inbox.get_nowait()
            except queue.Empty:
                return
            try:
                happened()
            except Exception as error:  # noqa: BLE001 - a fact that cannot be recorded must not cost the others
                self._outbox.refuse(error)

    def _flush(self) -> None:
        for start in range(0, len(self._points), POINTS_PER_CALL):
            self._outbox.send(self._store.log_metrics, self._points[start : start + POINTS_PER_CALL])
        self._points = []

    def _close(self) -> None:
        self._closing = True
        if not self._ended:
            failure = self._outbox.failure()
            self.failed(f"the run ended without a result{f' ({failure})' if failure else ''}", "", "FAILED")

    # --- what happened ------------------------------------------------------------------------------------

    def started(self, facts: Mapping[str, Any]) -> None:
        rest = dict(facts)
        plan, git, environment = (rest.pop(name, None) or {} for name in ("plan", "git", "environment"))
        self._outbox.send(self._store.log_params, documents.flat({"plan": plan}))
        self._tag({f"git_{name}": value for name, value in git.items() if name != "diff"})
        self._tag(
            {f"environment.{name}": environment[name] for name in _ENVIRONMENT_TAGS if name in environment}
        )
        self._facts = documents.single_values(rest)
        self._tag(self._facts)
        if git.get("diff"):
            self.document("git.diff", git["diff"])
        for name, value in {"environment": environment, **rest}.items():
            if value and name not in self._facts:
                self.document(f"{name}.json", documents.as_json(value))

    def steps(self, rows: Sequence[StepRow]) -> None:
        for row in rows:
            before = self._steps[-1] if self._steps else None
            self._gather(step_points(row, before, scaled=self.spec.precision == "fp16"))
            if before is None or row.step > before.step:
                self._steps.append(row)

    def evaluation(self, row: EvaluationRow) -> None:
        self._gather(evaluation_points(row))
        if not self._evaluations or row.step > self._evaluations[-1].step:
            self._evaluations.append(row)

    def attempts(self, attempts: Sequence[Mapping[str, Any]]) -> None:
        self._tag({"attempts": len(attempts)})
        self.document("attempts.json", documents.as_json(list(attempts)))

    def checkpoint(self, row: CheckpointRow) -> None:
        if row.uri is None:
            self._tag({"checkpoint_error": f"step {row.step}: {row.error}"})
            return
        self._tag({"checkpoint": row.uri, "checkpoint_step": row.step, "checkpoint_error": ""})
        self._gather(checkpoint_points(row))

    def _gather(self, points: Iterable[Point]) -> None:
        for point in points:
            if point.step > self._last_steps.get(point.key, -1):
                self._last_steps[point.key] = point.step
                self._points.append(point)

    def finished(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        self._write_ledger()
        for path in files:
            self._keep(path)
        self.document("summary.json", documents.as_json(summary))
        values = documents.single_values(
            {name: summary[name] for name in summary if name not in {"run_id", "status"}}
        )
        self._tag(values)
        metrics = documents.single_values(summary.get("metrics") or {})
        status: Status = "KILLED" if summary.get("stopped") else "FINISHED"
        verdict = [
            f"**{status}** at step {summary.get('step', '?')}",
            *map(documents.reading, metrics.items()),
        ]
        self._end(status, " · ".join(verdict[:5]), {**values, **metrics, **self._facts})

    def failed(self, message: str, details: str, status: Status) -> None:
        self._tag({"error": message})
        reached = f"after step {self._steps[-1].step}" if self._steps else "before the first step"
        try:
            self.document("error.txt", f"{message}\n\n{details}".rstrip() + "\n")
            self._write_ledger()
        finally:  # a run whose folder cannot be written has failed as well
            self._end(status, f"**{status}** {reached}: {message}", self._facts)

    def _end(self, status: Status, verdict: str, details: Mapping[str, Any]) -> None:
        self._ended = True
        self._tag({"note": documents.note(verdict, details)})
        self._outbox.send(self._store.set_status, status)

    # --- files and tags -----------------------------------------------------------------------------------

    def _describe(self) -> None:
        """What is known of a run before it does anything: its spec."""
        document = documents.spec_document(self.spec)
        self._outbox.send(self._store.log_params, documents.flat(document))
        self._tag({"job": self.spec.job.use, "note": documents.note(f"**RUNNING** · {self.spec.name}", {})})
        if self._resumed:
            self._tag({"error": ""})  # that of the attempt before
        self.document("spec.yaml", documents.as_yaml(document))

    def _read_ledger(self) -> None:
        steps, evaluations = self._folder / "ledger.parquet", self._folder / "evaluations.parquet"
        self._steps = ledger.read_parquet(steps) if steps.exists() else []
        self._evaluations = ledger.read_evaluations(evaluations) if evaluations.exists() else []

    def _write_ledger(self) -> None:
        self._flush()
        steps, evaluations = self._folder / "ledger.parquet", self._folder / "evaluations.parquet"
        if self._steps:
            ledger.write_parquet(self._steps, steps)
            self._keep(steps)
        if self._evaluations:
            ledger.write_evaluations(self._evaluations, evaluations)
            self._keep(evaluations)

    def _keep(self, path: Path) -> None:
        """Send a file to the store, under the folder that it has within the run's folder."""
        inside = path.parent.relative_to(self._folder) if path.is_relative_to(self._folder) else Path()
        self._outbox.send(self._store.log_file, path, "" if inside == Path() else inside.as_posix())

    def document(self, name: str, text: str) -> None:
        write_text(self._folder / name, text)
        self._keep(self._folder / name)

    def _tag(self, facts: Mapping[str, Any]) -> None:
        tags = {f"lockstep.{name}": documents.as_value(value) for name, value in facts.items()}
        if tags:
            self._outbox.send(self._store.set_tags, tags)
