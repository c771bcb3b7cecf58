"""Makes a run's folder, and then its store, have what the run's log says.

The same call while a run goes on, after an outage, at a resume, in `lockstep record sync` and in a repair: the desired state is compared with
what is there, and the differences are pushed. What the store has is known from the log: if its last line says that everything was
delivered, that; otherwise nothing, and all of it is pushed again, which changes nothing where it is there.

The status has a lane of its own: the process shows there that it lives, and last of all how the run ended, once the store has everything
else or knows what it lacks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from lockstep.errors import RecordError, first_line
from lockstep.record import problems
from lockstep.record.errors import DeniedError
from lockstep.record.events.union import SetAside
from lockstep.record.ledger.journal import Journal
from lockstep.record.mirror.checkpoint_copies import Copies, checkpoint_tags
from lockstep.record.mirror.delivery_lanes import Call, Lane, Outage, Part
from lockstep.record.mirror.final_model_files import FinalModel
from lockstep.record.mirror.metric_batches import Evaluations, MetricCursor
from lockstep.record.mirror.projection import Ending, Projection
from lockstep.record.mirror.run_files import RunFiles
from lockstep.record.mirror.run_store import RunStore, Status
from lockstep.record.mirror.run_texts import LOG
from lockstep.record.runs.heartbeat import BEAT_S, process_tags
from lockstep.spec.fields import Spec

_ERROR, _VANISHED = "lockstep.error", "lockstep.vanished"
_TROUBLE, _NOTE = "lockstep.record_error", "lockstep.note"


class Reconciler:
    """Reconciles one run, whose `journal` and `store` are open.

    `doubted` says that the store may lack what it was sent; `thorough`, that it may lack points before those that it has. Of a run that does not go on
    (`goes_on`) the store's status stays until its end is pushed. `on_save` is called in a lane after each checkpoint. One thread calls.
    """

    def __init__(
        self,
        spec: Spec,
        projection: Projection,
        files: RunFiles,
        journal: Journal,
        store: RunStore,
        *,
        patience_s: float,
        doubted: bool,
        thorough: bool,
        goes_on: bool,
        on_save: Callable[[], None],
    ) -> None:
        self._projection, self._files, self._store = projection, files, store
        self._patience_s = patience_s
        self._advice = f"`lockstep record sync {files.folder.name}` sends it again"

        def note(label: str, error: RecordError) -> None:
            journal.add([SetAside(label, str(error))])

        self._status, self._facts, self._points, self._uploads = (
            Lane(name, note) for name in ("status", "facts", "points", "files")
        )
        self._content = (self._facts, self._points, self._uploads)
        """What the store must have before it learns that the run has ended."""
        self._lanes = (self._status, *self._content)
        self._final_status = Part(self._status, "status", self._send_status)
        _Beats(self._status, partial(self._beat, goes_on=goes_on), self._final_status)
        self._params = Part(self._facts, "parameters", store.log_params, together=True)
        self._data = Part(self._facts, "data sets", lambda d: store.log_data(list(d.values())), together=True)
        self._tags = Part(self._facts, "tags", store.set_tags, together=True)
        scaled = spec.precision == "fp16"
        cursor = MetricCursor(journal, store, self._points, scaled=scaled, thorough=thorough)
        self._evaluations = Evaluations(cursor, self._points, store)
        self._artifacts = Part(self._uploads, "artifact", self._send_file)
        self._references = Part(
            self._uploads, "checkpoint", self._send_reference, delete=store.delete_checkpoint
        )
        self._model = Part(self._uploads, "final model", self._send_model)
        self._saves = Part(self._uploads, "aliases of checkpoints", lambda _: on_save())
        self._copies = Copies(store, self._copied, spec.record.copy_mb_per_s)
        self._published: dict[int, int] = {}
        """How often a reference was published, by step."""
        self._final_step: int | None = None
        """The step of the final model, once the store has it."""
        self._findings: dict[str, str] = {}
        """Tags that say what became of the pushing itself."""
        self._kept: dict[int, str] = {}
        """The checkpoints of which the store should have a copy or a reference."""
        self._error: RecordError | None = None
        self._trouble, self._is_away = "", False
        self._end: Ending | None = None
        """The end of the run that its folder shows."""
        self._sends_model = False
        """Whether the final model is being sent, which takes as long as its library does."""
        if doubted and not projection.makes_copies:
            self._references.actual = dict.fromkeys(projection.known_steps)
        elif not doubted:
            self._confirm()

    def _confirm(self) -> None:
        """Take what the log says so far for what folder and store have, but for what an end or its recorder adds."""
        self._files.written, self._files.names = (
            dict(self._projection.documents),
            dict(self._projection.documents),
        )
        self._published = dict.fromkeys(self._projection.references, 0)
        self._set_desired()
        for part in (
            self._params, self._data, self._tags, self._artifacts, self._references, self._evaluations, self._saves
        ):  # fmt: skip
            part.confirm()
        for name in (_ERROR, _TROUBLE, _NOTE):
            del self._tags.actual[name]

    # --- the call -------------------------------------------------------------------------------------------

    def reconcile(self) -> None:
        """Make the folder have what the log says, and let the lanes push what the store lacks. Never waits for the store.

        Raises OSError, StorageError or RecordError where the disk refuses: then call it again.
        """
        try:
            self._reconcile_folder()
        finally:
            self.push()

    def _reconcile_folder(self) -> None:
        projection, files, end = self._projection, self._files, self._projection.end
        for impossible in files.write(projection.documents):
            self.refuse(impossible)
        if end is not None and end is not self._end:
            for impossible in files.write(end.documents):
                self.refuse(impossible)
            files.write_tables()
            for path in end.files:
                files.keep(path)
            self.seal()
            self._show_end()
            files.keep(files.folder / LOG)

    def seal(self) -> None:
        """Seal the folder of a run that has finished: before its store learns of the end, and once more when nothing is added to it. Raises OSError."""
        end = self._projection.end
        if end is not None and end.status == "FINISHED":
            self._files.seal()

    def end_without_files(self) -> None:
        """Show the run's end although the disk refuses its files."""
        self._show_end()
        self.push()

    def _show_end(self) -> None:
        self._end = self._projection.end
        self._forget_error()
        if self._end and self._end.status:
            self._files.log(str(self._end.verdict))

    def _forget_error(self) -> None:
        """Send these tags again: a reader who took the run for dead may have set them."""
        for name in (_ERROR, _VANISHED):
            self._tags.actual.pop(name, None)

    @property
    def _shows_end(self) -> bool:
        return self._end is not None and self._end is self._projection.end

    def push(self) -> None:
        """Let the lanes push what the store lacks, and report what it does not have."""
        self._report()
        self._set_desired()
        if self._shows_end and self.failure() is None and all(lane.idle for lane in self._content):
            self._allow_end()
        for lane in self._lanes:
            if not lane.idle:
                lane.wake()

    def _set_desired(self) -> None:
        """Set the desired state of the store."""
        projection = self._projection
        tags = projection.tags(
            trouble=self._trouble, figures=self._files.figures.drawn, ended=self._shows_end
        )
        self._params.desired, self._data.desired = dict(projection.params), dict(projection.data)
        self._tags.desired = {**tags, **dict(self._findings), _TROUBLE: self._trouble}
        self._artifacts.desired = dict(self._files.names)
        self._saves.desired = {"": projection.saves} if projection.saves else {}
        self._model.desired = {"": self._end.model} if self._end and self._end.model else {}
        if not projection.makes_copies:
            self._references.desired = dict(projection.references)
        elif self._kept != projection.references or self._copies.desired != projection.copies:
            self._kept = dict(projection.references)
            self._copies.keep(projection.copies, projection.known_steps, self._kept)
        published = self._copies.published if projection.makes_copies else self._published
        final = self._final_step
        steps = [*projection.references, *([] if final is None else [final])]
        self._evaluations.desired = {
            step: (measured, (published.get(step), step == final))
            for step in steps
            if (step in published or step == final) and (measured := projection.measured(step))
        }

    # --- what is pushed -------------------------------------------------------------------------------------

    def _send_file(self, items: Mapping[str, Any]) -> None:
        for name in items:
            below = str(PurePosixPath(name).parent)
            self._store.log_file(self._files.folder / name, "" if below == "." else below)

    def _send_reference(self, items: Mapping[int, str]) -> None:
        for step, uri in items.items():
            self._store.keep_reference(step, checkpoint_tags(uri))
            self._published[step] = self._published.get(step, 0) + 1

    def _send_model(self, items: Mapping[str, tuple[Path, int]]) -> None:
        ((folder, step),) = items.values()
        self._sends_model = True
        try:
            model = FinalModel.read(folder)
            reason = model.error
            if not reason:
                self._store.log_final_model(folder, model, step)
                self._final_step = step
        except RecordError:
            raise
        except Exception as error:  # noqa: BLE001 - missing files or a changed format: the run still has its weights
            reason = first_line(error)[:500]
        finally:
            self._sends_model = False
        if reason:
            self._files.log(f"no model for MLflow: {reason}")
            self._findings["lockstep.model_error"] = reason

    def _copied(self, step: int, failure: str | None) -> None:
        """Called by the lane of copies."""
        if failure is None:
            self._findings |= {"lockstep.copied_step": str(step), "lockstep.copy_error": ""}
        else:
            self._files.log(f"no copy of the checkpoint of step {step}: {failure}")
            self._findings["lockstep.copy_error"] = f"step {step}: {failure}"

    def _beat(self, items: Mapping[str, int], *, goes_on: bool) -> None:
        """Report that this process lives. This also clears what a hasty reader may have set, and restores RUNNING."""
        if goes_on:
            self._store.set_status("RUNNING")
        self._store.set_tags(process_tags(time.time()) | {_VANISHED: ""})
        self._tags.actual.pop(_ERROR, None)

    def _send_status(self, items: Mapping[Status, float | None]) -> None:
        for status, at in items.items():
            self._store.set_status(status, at)

    # --- the end --------------------------------------------------------------------------------------------

    def await_file(self, name: str, timeout_s: float) -> None:
        """Wait until the store has a file, unless it does not answer or refuses something. No points are pushed yet: to read them would slow the start."""
        until = time.monotonic() + timeout_s
        uploads = self._uploads
        self._set_desired()
        for lane in (self._status, self._facts, uploads):
            lane.wake()
        while name not in self._artifacts.actual and time.monotonic() < until:
            if uploads.outage or uploads.refused:
                return
            time.sleep(0.002)

    def finish(self, closing_at: float, patience_s: float) -> bool:
        """Push what is left, then the run's end; no more events follow. Returns whether the store has all copies of checkpoints.

        A silent store is waited for up to `patience_s` after `closing_at` (monotonic seconds).
        """
        folder = self._files.folder
        advice = f"what was recorded up to its end is in {str(folder)!r}; `lockstep record sync {folder.name}` sends it"

        def settle(*lanes: Lane) -> None:
            asked_at = time.monotonic()
            self.push()
            while self._sends_model or not all(
                lane.has_waited(closing_at, asked_at, patience_s) for lane in lanes
            ):
                time.sleep(0.01)
                self.push()

        settle(*self._content)
        if sum(lane.retry() for lane in self._content):
            settle(*self._content)
        away_since = max((outage.since for outage in self._outages()), default=0.0)
        copied = self._copies.close(max(closing_at, away_since) + patience_s)
        settle(self._points)  # the evaluations of the last copies
        self._give_up((self._points, self._uploads), advice)
        end = self._projection.end
        # A reader takes FINISHED for a whole history: it waits for `record sync` where points were neither sent nor refused.
        lacks_points = end is not None and end.status == "FINISHED" and not self._points.idle
        if self._final_status.desired or (self._is_informed(settle) and not lacks_points):
            self._allow_end()
        elif end and end.status:  # with it, readers would believe the record complete
            self.refuse(problems.END_UNTOLD(remedy=advice))
        settle(self._facts, self._status)
        self._give_up(self._lanes, advice)
        return copied

    def _allow_end(self) -> None:
        """Let the store learn how the run ended, if it has."""
        end = self._projection.end
        if end and end.status:
            self._final_status.desired = {end.status: end.at}

    def _is_informed(self, settle: Callable[[Lane], None]) -> bool:
        """Whether the store knows what it lacks, and lacks nothing else."""
        for _ in range(3):  # the report itself may be refused
            settle(self._facts)
            if self._facts.idle and self._tags.actual.get(_TROUBLE) == str(self.failure() or ""):
                return True
        return False

    def _give_up(self, lanes: Sequence[Lane], kept: str) -> None:
        """Stop trying these kinds; `kept` says where the recorded content is all the same."""
        for lane in lanes:
            lane.stop()
            if count := sum(1 for _ in lane.calls()):
                self.refuse(problems.NOT_SENT(got=lane.why_waiting, count=count, remedy=kept))

    def stop(self) -> None:
        """Push nothing more."""
        for lane in self._lanes:
            lane.stop()

    # --- what went wrong ------------------------------------------------------------------------------------

    def refuse(self, error: Exception) -> None:
        """Note what cannot be recorded. The first error is kept: the others mostly follow from it."""
        self._error = self._error or problems.as_record_error(error)

    def failure(self) -> RecordError | None:
        """What cannot be recorded or was refused; else a denied call, or an outage longer than the patience; else None."""
        if self._error is not None:
            return self._error
        refused = [item for lane in self._lanes for item in lane.refused.items()]
        for label, error in refused[:1]:
            more = f" (and {len(refused) - 1} more)" if refused[1:] else ""
            return problems.NOT_RECORDED(got=error, what=f"{label}{more}", remedy=self._advice)
        for outage in self._outages():
            silent_s = time.monotonic() - outage.since
            if isinstance(outage.error, DeniedError) or silent_s > self._patience_s:
                return outage.error
        return None

    def _outages(self) -> list[Outage]:
        return [outage for lane in self._lanes if (outage := lane.outage) is not None]

    def _report(self) -> None:
        """Log what the store does not have, when that changes."""
        away = next((str(outage.error) for outage in self._outages()), "")
        if bool(away) != self._is_away:
            self._is_away = bool(away)
            self._files.log(f"the store is away: {away}" if away else "the store is back")
        trouble = str(self.failure() or "")
        if trouble != self._trouble:
            self._trouble = trouble
            self._files.log(f"not recorded: {trouble}" if trouble else "all is recorded again")


class _Beats(Part):
    """The signs of life of this process, one every BEAT_S, until the final status of the run is known."""

    def __init__(self, lane: Lane, send: Callable[[Mapping[str, int]], object], final_status: Part) -> None:
        super().__init__(lane, "heartbeat", send)
        self._final_status = final_status
        lane.next_s = lambda: BEAT_S - time.monotonic() % BEAT_S

    def calls(self) -> Iterator[Call]:
        # Not set by the writer's thread: drawing or a slow disk keeps it busy for longer than a beat.
        self.desired = {} if self._final_status.desired else {"": int(time.monotonic() // BEAT_S)}
        return super().calls()
