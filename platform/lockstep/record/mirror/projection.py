"""A run's page: parameters, tags, the note, documents, figures and the ledger, as a fold over the run's events.

What an event changes becomes calls to the store. Every document is first written to the run's folder and sent from there.
"""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, assert_never

from lockstep.errors import RecordError, first_line
from lockstep.files import as_bytes, encoded, write_bytes
from lockstep.job.source import job_sources
from lockstep.parsing import MOST_BYTES, conforms, json_value
from lockstep.paths import OutsideError, beneath, read_beneath
from lockstep.record.events.union import (
    SOURCE,
    AttemptsSummarised,
    CheckpointRow,
    Corrupted,
    Delivered,
    Diagnosed,
    Document,
    EvaluationRow,
    Failed,
    Finished,
    InputsFound,
    Mended,
    Observation,
    Opened,
    PeakMemory,
    Recorded,
    ResumeChecked,
    Sampled,
    SetAside,
    Started,
    StepRow,
    Straggling,
    TakenOver,
    Warned,
)
from lockstep.record.figures import run_figures
from lockstep.record.ledger import final_tables
from lockstep.record.ledger.journal import Journal
from lockstep.record.mirror import documents
from lockstep.record.mirror.checkpoint_copies import Copies
from lockstep.record.mirror.data_sets import data_sets
from lockstep.record.mirror.final_model_files import FinalModel, model_folder
from lockstep.record.mirror.run_store import RunStore, Status
from lockstep.record.mirror.run_texts import LOG, Texts
from lockstep.record.mirror.sync_queue import Send
from lockstep.record.redaction import redacted_document
from lockstep.spec.fields import Spec
from lockstep.spec.locations import RECORD_OFF

_DOCUMENTS = ("plan", "git", "environment")
"""Facts that are mappings, each with its own form."""

_ENVIRONMENT_TAGS = ("lockstep", "python", "torch", "device_kind", "device_name")
"""Facts of the environment by which people search for runs; all facts are in environment.json."""


class Page:
    """One run's page. `send` queues a call to the store."""

    def __init__(
        self,
        spec: Spec,
        folder: Path,
        journal: Journal,
        store: RunStore,
        send: Send,
    ) -> None:
        self._spec = spec
        self._folder = folder
        self._journal = journal
        self._store = store
        self._send = send
        self._facts: dict[str, Any] = {}
        self._violation = ""
        self._trouble = ""
        self._texts = Texts(folder)
        self._verdict: tuple[documents.Verdict, Mapping[str, Any]] = (documents.Verdict(""), {})
        self.figures = final_tables.Figures(journal, folder, scaled=spec.precision == "fp16", log=self.log)
        self._stragglers: list[str] = []
        self.working = False
        self.came_to: Status | None = None
        """The final status of the run, until its store has it."""
        self.ended_at: float | None = None
        """When the run ended, Unix seconds; None if nothing tells."""
        self._copies = Copies(store, self._copied, _checkpoint_tags, spec.record.copy_mb_per_s)
        self.lost = ""
        """Steps of an earlier attempt that cannot be read anywhere, and why."""
        self.not_whole = ""
        """What the ledger of a run that reached its end lacks."""
        for event in journal.events:  # of an earlier recorder
            if isinstance(event, Started):
                self._facts = _single_facts(event.facts)

    def take(self, event: Recorded) -> None:
        """Update the page for an event that is in the journal."""
        match event:
            case Started():
                self._started(event.facts)
            case InputsFound():
                self._inputs(event)
            case CheckpointRow():
                self._checkpoint(event)
            case AttemptsSummarised():
                self._attempts(event.attempts)
            case PeakMemory():
                self._tag({"peak_memory_mb": [round(size / 1e6) for size in event.bytes_by_rank]})
            case Document():
                self._document(event.name, event.text)
            case Finished():
                self._finished(event)
            case Failed():
                self._failed(event)
            case TakenOver():
                self.log(event.message)
                self._tables()
                self._keep(self._folder / LOG)
            case Diagnosed():
                self._diagnosed()
                self.log(str(event))
            case Warned() | Straggling():
                self.log(f"warning: {event.text}")
            case Corrupted():
                self.log(str(event))
                self._tag({"corrupted": str(event)})
            case ResumeChecked():
                self.log(
                    f"the checkpoint of step {event.step} was taken up by a process of its own: the next step has the same bits"
                )
                self._tag({"resumed_step": event.step})
            case Mended():
                self.log(f"the journal is mended: {event.how}")
            case StepRow() | EvaluationRow() | Observation() | Sampled():
                pass  # they become points; the ledger is written when the run ends
            case Opened() | Delivered() | SetAside():
                pass
            case _:
                assert_never(event)

    def keep_spec(self) -> None:
        """Store the spec, without which a run cannot be resumed."""
        self._document("spec.yaml", documents.as_yaml(redacted_document(self._spec.document())))

    def describe(self, *, resumed: bool) -> None:
        """Show what else is known of a run before it does anything: its parameters and its job's source."""
        document = redacted_document(self._spec.document())
        self._send("facts", "parameters", self._store.log_params, documents.flat(document), later=True)
        self._tag({"job": self._spec.job.use, "folder": str(self._folder)})
        self._note(documents.Verdict("RUNNING", f" · {self._spec.name}"), {})
        if resumed:
            self._tag({"error": ""})  # that of the previous attempt
        for name, path in sorted(job_sources(self._spec.job.use).items()):
            below = name.replace(".", "/") + ("/__init__.py" if path.name == "__init__.py" else ".py")
            self._document(f"source/{below}", path.read_bytes())

    def _started(self, facts: Mapping[str, Any]) -> None:
        """Show the facts of an attempt."""
        self.log(f"training begins on {facts.get('workers', '?')} workers")
        plan, git, environment = (facts.get(name) or {} for name in _DOCUMENTS)
        other_facts = {name: value for name, value in facts.items() if name not in {*_DOCUMENTS, SOURCE}}
        self._send("facts", "parameters", self._store.log_params, documents.flat({"plan": plan}), later=True)
        if facts.get("fields"):
            data = data_sets(self._spec, facts["fields"])
            self._send("facts", "data sets", self._store.log_data, data, later=True)
        self._tag({f"git_{name}": value for name, value in git.items() if name != "diff"})
        self._tag(
            {f"environment.{name}": environment[name] for name in _ENVIRONMENT_TAGS if name in environment}
        )
        self._facts = _single_facts(facts)
        self._tag(self._facts)
        if git.get("diff"):
            self._document("git.diff", as_bytes(git["diff"]))
        for path, text in (facts.get(SOURCE) or {}).items():
            self._document(f"source/{path}", as_bytes(text))
        for name, value in {"environment": environment, **other_facts}.items():
            if value and name not in self._facts:
                self._document(f"{name}.json", documents.as_json(value))

    def _inputs(self, found: InputsFound) -> None:
        """Show the identity that the run has since inputs were found after its start."""
        self.log(
            f"step {found.step}: an input of the job was found; the identity is {found.identity} from here on"
        )
        self._facts["identity"] = found.identity
        self._tag({"identity": found.identity})
        for path, text in found.source.items():
            self._document(f"source/{path}", text)
        self._document("fields.json", documents.as_json(dict(found.fields)))

    def _attempts(self, attempts: Sequence[Mapping[str, Any]]) -> None:
        """Show what is known of each attempt so far; those of an earlier driver stay as it left them."""
        by_number = {attempt["attempt"]: attempt for attempt in [*self._earlier_attempts(), *attempts]}
        self._stragglers = [line for attempt in by_number.values() for line in attempt.get("stragglers", ())]
        self._tag({"attempts": len(by_number), "stragglers": "; ".join(self._stragglers[-3:])})
        self._document(
            "attempts.json", documents.as_json([by_number[number] for number in sorted(by_number)])
        )

    def _diagnosed(self) -> None:
        """Show everything that the run has shown to be wrong with it."""
        diagnoses = [event for event in self._journal.events if isinstance(event, Diagnosed)]
        self._tag({"diagnosed": "; ".join(dict.fromkeys(event.rule for event in diagnoses))})
        self._document("diagnosis.json", documents.as_json([asdict(event) for event in diagnoses]))

    def _earlier_attempts(self) -> list[dict[str, Any]]:
        try:
            text = read_beneath(self._folder, "attempts.json", MOST_BYTES)
        except FileNotFoundError:
            return []
        except ValueError as error:
            raise RecordError(
                f"run {self._folder.name}: its attempts.json cannot be read: {error}"
            ) from error
        return attempts_in(text)

    def _checkpoint(self, row: CheckpointRow) -> None:
        """Show a checkpoint that was saved or given up."""
        if row.uri is None:
            self._tag({"checkpoint_error": f"step {row.step}: {row.error}"})
            self.log(f"no checkpoint of step {row.step}: {row.error}")
            return
        self._tag({"checkpoint": row.uri, "checkpoint_step": row.step, "checkpoint_error": ""})
        if self._keeps_copies(row):
            return
        tags = _checkpoint_tags(row.uri)
        self._send("files", f"checkpoint {row.step}", self._store.log_checkpoint, row.step, tags, None)
        for step in row.deleted:
            self._send("files", f"checkpoint {step}", self._store.delete_checkpoint, step)

    def take_up_copies(self) -> None:
        """Continue the copies that an earlier recorder may not have finished."""
        rows = [row for row in self._journal.events if isinstance(row, CheckpointRow) and row.uri]
        if rows:
            self._keeps_copies(rows[-1], {step for row in rows for step in (row.step, *row.deleted)})

    def _keeps_copies(self, row: CheckpointRow, known: Iterable[int] = ()) -> bool:
        """Copy the checkpoints that the store should have whole after this save. False if the store only gets references to them."""
        uri = row.uri or ""
        if (
            self._spec.record.checkpoints == "reference"
            or self._spec.record.uri == RECORD_OFF
            or "://" in uri
        ):
            return False
        essential = row.essential or [(row.step, uri)]
        self._copies.keep(essential, [*known, row.step, *row.deleted])
        return True

    def close(self, deadline: float) -> bool:
        """Finish what is sent beside the sync queue, up to `deadline`. Returns whether it was finished."""
        self.working = True
        try:
            return self._copies.close(deadline)
        finally:
            self.working = False

    def _copied(self, step: int, failure: str | None) -> None:
        """Called by the thread that makes copies."""
        if failure is None:
            tags = {"copied_step": str(step), "copy_error": ""}
        else:
            self.log(f"no copy of the checkpoint of step {step}: {failure}")
            tags = {"copy_error": f"step {step}: {failure}"}
        with suppress(RecordError):  # the log has it, and the copy itself is found as a model
            self._store.set_tags({f"lockstep.{name}": text for name, text in tags.items()})

    def violated(self, violation: str) -> None:
        """Show that the run's promise is broken."""
        self._violation = violation
        self._tag({"violation": violation})
        self.log(f"determinism violation: {violation}")

    def trouble(self, text: str) -> None:
        """Show what the store does not have; empty when all is recorded again."""
        self._trouble = text
        self.log(f"not recorded: {text}" if text else "all is recorded again")
        self._note(*self._verdict)

    def _finished(self, end: Finished) -> None:
        """Show the end of a run that ended by itself, or by a signal that it obeyed.

        A run whose ledger lacks steps, or whose last checkpoint could not be saved, has not finished.
        """
        self.not_whole = self._missing(int(end.summary.get("step") or 0))
        if self.not_whole:
            self._failed(Failed(self.not_whole, at=end.at))
            return
        summary, files = end.summary, end.files
        self._tables()
        model = model_folder(files)
        for path in files:
            if path.parent != model:
                self._keep(path)
        self._document("summary.json", documents.as_json(summary))
        values = documents.single_values(
            {name: summary[name] for name in summary if name not in {"run_id", "status", "unsaved"}}
        )
        self._tag(values)
        metrics = documents.single_values(summary.get("metrics") or {})
        error, status = end.error, end.status
        if error:
            self._document("error.txt", f"{error}\n")
        killer = f" by {signal.Signals(summary['signal']).name}" if summary.get("signal") else ""
        self._tag({"vanished": "", "error": error})  # a reader may have set it since the last beat
        if model is not None:
            self._send("files", "final model", self._log_model, model, int(summary.get("step", 0)))
        verdict = [
            f"{killer} at step {summary.get('step', '?')}" + (f": {error}" if error else ""),
            *map(
                documents.reading,
                sorted(metrics.items(), key=lambda metric: not metric[0].startswith("eval/")),
            ),
        ]
        self._end(status, " · ".join(verdict[:5]), {**values, **metrics, **self._facts}, end.at)

    def _missing(self, last: int) -> str:
        """What the ledger of a run that ended after step `last` lacks; empty if nothing."""
        if self.lost:
            return f"the record is not whole: its ledger lacks {self.lost}"
        if self._journal.is_deleted:
            return (
                f"the record is not whole: the run's folder, {str(self._folder)!r}, was deleted while it trained; keep what "
                "deletes there, such as a clean-up script, away from runs that go on, and begin the run again"
            )
        missing = self._journal.missing_steps()
        if not missing and 0 < self._journal.last_step < last:
            missing = range(self._journal.last_step + 1, last + 1)
        if missing:
            return _not_whole(missing)
        if self._journal.damage:
            contents = ", ".join(damage.held for damage in self._journal.damage[:5])
            return f"the record is not whole: lines of its journal are damaged ({contents}); {_REMEDY}"
        return ""

    def _failed(self, end: Failed) -> None:
        """Show any other end."""
        self._tag({"error": end.message})
        reached = (
            f"after step {self._journal.last_step}" if self._journal.last_step else "before the first step"
        )
        try:
            self._document("error.txt", f"{end.message}\n\n{end.details}".rstrip() + "\n")
            self._tables()
        finally:  # a run whose folder is not writable has failed too
            self._end(end.status, f" {reached}: {end.message}", self._facts, end.at)

    def log(self, text: str) -> None:
        """Add a line to log.txt, with its time. Any thread may call it."""
        self._texts.log(text)

    def output(self, name: str, text: str) -> None:
        """Store what a worker has printed."""
        self._texts.output(name, text)

    def keep_output(self) -> None:
        """Send what the workers have printed; the last of it comes after the run's end."""
        for path in self._texts.end():
            self._keep(path)

    def _end(self, status: Status, text: str, details: Mapping[str, Any], at: float | None) -> None:
        verdict = documents.Verdict(status, text)
        self._note(verdict, details)
        self.log(str(verdict))
        self._keep(self._folder / LOG)
        self.came_to, self.ended_at = status, at

    def _note(self, verdict: documents.Verdict, details: Mapping[str, Any]) -> None:
        self._verdict = verdict, details
        wrong = {"not exact": self._violation, "not recorded": self._trouble}
        troubles = [f"{what}: {text}" for what, text in wrong.items() if text]
        if self._stragglers:
            details = {"straggler": self._stragglers[-1], **details}
        shown = [f"{run_figures.FOLDER}/{path.name}" for path in self.figures.drawn]
        self._tag(
            {"note": documents.note(verdict._replace(troubles=troubles), details, shown, self._folder.name)}
        )

    def _log_model(self, folder: Path, step: int) -> None:
        self.working = True
        try:
            model = FinalModel.read(folder)
            reason = model.error
            if not reason:
                self._store.log_final_model(folder, model, step)
        except RecordError:
            raise
        except Exception as error:  # noqa: BLE001 - missing files or a changed format: the run still has its weights
            reason = first_line(error)[:500]
        finally:
            self.working = False
        if reason:
            self.log(f"no model for MLflow: {reason}")
            self._store.set_tags({"lockstep.model_error": reason})

    def _tables(self) -> None:
        """Write and send the final tables and the figures, which the run's note names."""
        for path in final_tables.write(self._journal, self._folder):
            self._keep(path)
        self.figures.draw(written=True)
        for path in self.figures.drawn:
            self._keep(path)

    def _keep(self, path: Path) -> None:
        """Send a file to the store, under its folder within the run's folder."""
        try:
            name = path.relative_to(self._folder).as_posix()
            beneath(self._folder, name)
        except ValueError as error:
            self.log(f"not recorded: {error}")
            return
        inside = Path(name).parent
        folder = "" if inside == Path() else inside.as_posix()
        self._send("files", f"artifact {inside / path.name}", self._store.log_file, path, folder)

    def _document(self, name: str, content: str | bytes) -> None:
        """Write a text, or a file as it is, to the run's folder and send it. RecordError for a name that leads out of it."""
        try:
            path = beneath(self._folder, name)
        except OutsideError as error:
            raise RecordError(f"run {self._folder.name}: a document is not recorded: {error}") from error
        write_bytes(path, encoded(content) if isinstance(content, str) else content)
        self._keep(path)

    def _tag(self, facts: Mapping[str, Any]) -> None:
        tags = {f"lockstep.{name}": documents.as_value(value) for name, value in facts.items()}
        if tags:
            self._send("facts", f"tags {', '.join(sorted(tags)[:5])}", self._store.set_tags, tags)


_REMEDY = "resume the run, or `lockstep record check RUN --repair`: what is missing is taken from its newest checkpoint"


def attempts_in(text: bytes) -> list[dict[str, Any]]:
    """The attempts of an attempts.json, each a mapping with its number; none if the file is not as it was written, and another is made."""
    with suppress(ValueError):
        attempts = json_value(text)
        if conforms(attempts, Sequence[Mapping[str, Any]]):
            return [attempt for attempt in attempts if isinstance(attempt.get("attempt"), int)]
    return []


def _single_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that are one value: they become tags of the run and rows of its note."""
    return documents.single_values({name: facts[name] for name in facts if name not in {*_DOCUMENTS, SOURCE}})


def _checkpoint_tags(uri: str) -> dict[str, str]:
    return {"lockstep.uri": uri, **_manifest(Path(uri))}


def _manifest(folder: Path) -> dict[str, str]:
    """The digest of a checkpoint's manifest, which has the digests of its files; empty if this machine cannot see it."""
    manifest = folder / "manifest.json"
    try:
        return {"lockstep.manifest": f"sha256:{hashlib.sha256(manifest.read_bytes()).hexdigest()}"}
    except OSError:
        return {}


def _not_whole(missing: range) -> str:
    steps = f"step {missing.start}" if len(missing) == 1 else f"steps {missing.start} to {missing.stop - 1}"
    return f"the record is not whole: its ledger lacks {steps}; {_REMEDY}"
