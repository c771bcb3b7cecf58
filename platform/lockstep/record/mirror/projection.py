"""What a store should have of a run, as a fold over the run's log: parameters, tags, the note, documents, checkpoints, and how it ended.

The fold reads the journal and changes nothing outside. A run that goes on, one that is resumed and one that is synced are projected by
the same events; a reconciler makes folder and store agree with the result.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, assert_never

from lockstep.errors import RecordError
from lockstep.files import as_bytes
from lockstep.record import problems
from lockstep.record.events import union
from lockstep.record.events.metrics import evaluation_points, test_points
from lockstep.record.events.union import SOURCE, Failed, Finished, Recorded, TakenOver
from lockstep.record.ledger.goodput import time_tags
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.rows import EvaluationRow, Observation, StepRow
from lockstep.record.mirror import documents
from lockstep.record.mirror.data_sets import DataSet, data_sets, measured_by
from lockstep.record.mirror.final_model_files import model_folder
from lockstep.record.mirror.run_files import Content
from lockstep.record.mirror.run_store import Measured, Status
from lockstep.record.plots import run_plots
from lockstep.record.redaction import redacted_document
from lockstep.spec.fields import Spec
from lockstep.spec.locations import RECORD_OFF

_DOCUMENTS = ("plan", "git", "environment")
"""Facts that are mappings, each with its own form."""

_ENVIRONMENT_TAGS = ("lockstep", "python", "torch", "device_kind", "device_name")
"""Facts of the environment by which people search for runs; all facts are in environment.json."""


class Ending(NamedTuple):
    """How a run ended, and what its store should have for it. Without a `status` a newer attempt decides how the run goes on."""

    status: Status | None
    at: float | None
    verdict: documents.Verdict
    details: Mapping[str, Any] = {}
    tags: Mapping[str, Any] = {}
    documents: Mapping[str, Content] = {}
    files: Sequence[Path] = ()
    model: tuple[Path, int] | None = None
    """The folder of the final model, and its step."""


class Projection:
    """The desired state of one run. One thread changes it; a mapping that a property returns is a new one each time."""

    def __init__(self, spec: Spec, folder: Path, journal: Journal) -> None:
        self._spec, self._folder, self._journal = spec, folder, journal
        self.params: dict[str, str] = {}
        self.data: dict[str, DataSet] = {}
        self.documents: dict[str, Content] = {}
        """Texts by their path below the run's folder."""
        self.references: dict[int, str] = {}
        """Where each checkpoint is that the store gets a reference to, by step."""
        self.copies: dict[int, str] = {}
        """Where each checkpoint is that the store should have whole, by step."""
        self.known_steps: set[int] = set()
        """The steps of all checkpoints that the run has saved. Only added to."""
        self.saves = 0
        self._tested: Finished | None = None
        """The end that has the test."""
        self.end: Ending | None = None
        """How the run ended; None if it goes on. An end before the last start belongs to an earlier attempt."""
        self.lack: RecordError | None = None
        """What the ledger of a run that reached its end lacks."""
        self._running = documents.Verdict("RUNNING", f" · {spec.name}")
        self.lost = ""
        """Steps of an earlier attempt that cannot be read anywhere, and why."""
        self._tags: dict[str, Any] = {}
        self._facts: dict[str, Any] = {}
        self._attempts: dict[int, Mapping[str, Any]] = {}
        self._stragglers: list[str] = []
        self._diagnoses: list[union.Diagnosed] = []
        self._time: union.TimeSpent | None = None
        """What became of the run's time up to its last end."""
        self._alerts: list[union.Alerted] = []

    def describe(self, sources: Mapping[str, bytes]) -> None:
        """Add what is known of a run before it does anything: its spec, the parameters, and its job's `sources` by path."""
        document = redacted_document(self._spec.document())
        self.params |= documents.flat(document)
        self._tags |= {"job": self._spec.job.use, "folder": str(self._folder)}
        self.documents = {"spec.yaml": documents.as_yaml(document), **self.documents}
        self.documents |= {f"source/{path}": content for path, content in sources.items()}

    def fold(self, events: Sequence[Recorded]) -> list[Exception]:
        """Take all of these events. Returns why some cannot be shown, which costs no other."""
        errors: list[Exception] = []
        for event in events:
            try:
                self.take(event)
            except Exception as error:  # noqa: BLE001 - a journal may come from a stranger
                errors.append(error)
        return errors

    def take(self, event: Recorded) -> None:
        """Take an event that is in the journal."""
        match event:
            case union.Started():
                self._start(event.facts)
            case union.InputsFound():
                self._facts["identity"] = event.identity
                self._tags["identity"] = event.identity
                self.documents |= {f"source/{path}": text for path, text in event.source.items()}
                self.documents["fields.json"] = documents.as_json(dict(event.fields))
            case union.CheckpointRow():
                self._save(event)
            case union.AttemptsSummarised():
                self._summarise(event.attempts)
            case union.PeakMemory():
                self._tags["peak_memory_mb"] = [round(size / 1e6) for size in event.bytes_by_rank]
            case union.Document():
                self.documents[event.name] = event.content
            case Finished():
                self._tested = event
                self.end = self._finished(event)
            case Failed():
                self.end = self._failed(event)
            case TakenOver():
                self.end = Ending(None, None, self._running)
            case union.Diagnosed():
                self._diagnoses.append(event)
                rules = dict.fromkeys(diagnosed.rule for diagnosed in self._diagnoses)
                self._tags["diagnosed"] = "; ".join(rules)
                self.documents["diagnosis.json"] = documents.as_json([asdict(d) for d in self._diagnoses])
            case union.Alerted():
                self._alerts.append(event)
                self._tags["alerts"] = "; ".join(f"step {alert.step}: {alert.rule}" for alert in self._alerts)
                self.documents["alerts.json"] = documents.as_json([asdict(alert) for alert in self._alerts])
            case union.Corrupted():
                self._tags["corrupted"] = str(event)
            case union.ResumeChecked():
                self._tags["resumed_step"] = event.step
            case union.TimeSpent():
                self._time = event
            case union.Violated():
                self._tags.setdefault("violation", event.text)
            case StepRow() | EvaluationRow() | Observation() | union.Sampled():
                pass  # they become points; the ledger is written when the run ends
            case (
                union.Warned()
                | union.Straggling()
                | union.Mended()
                | union.Opened()
                | union.Delivered()
                | union.SetAside()
            ):
                pass
            case _:
                assert_never(event)

    def _start(self, facts: Mapping[str, Any]) -> None:
        """An attempt begins."""
        self.end = None
        plan, git, environment = (facts.get(name) or {} for name in _DOCUMENTS)
        self._facts = documents.single_values(
            {name: facts[name] for name in facts if name not in {*_DOCUMENTS, SOURCE}}
        )
        self.params |= documents.flat({"plan": plan})
        if facts.get("fields"):
            self.data = {data.name: data for data in data_sets(self._spec, facts["fields"])}
        self._tags |= {f"git_{name}": value for name, value in git.items() if name != "diff"}
        self._tags |= {f"environment.{n}": environment[n] for n in _ENVIRONMENT_TAGS if n in environment}
        self._tags |= self._facts
        if git.get("diff"):
            self.documents["git.diff"] = as_bytes(git["diff"])
        for path, text in (facts.get(SOURCE) or {}).items():
            self.documents[f"source/{path}"] = as_bytes(text)
        for name, value in facts.items():
            if value and name not in {"plan", "git", SOURCE, *self._facts}:
                self.documents[f"{name}.json"] = documents.as_json(value)

    def _summarise(self, attempts: Sequence[Mapping[str, Any]]) -> None:
        """What is known of each attempt so far; those of an earlier driver stay as it left them."""
        self._attempts |= {
            attempt["attempt"]: attempt for attempt in attempts if isinstance(attempt.get("attempt"), int)
        }
        of_each = [self._attempts[number] for number in sorted(self._attempts)]
        self._stragglers = [line for attempt in of_each for line in attempt.get("stragglers", ())]
        self._tags |= {"attempts": len(of_each), "stragglers": "; ".join(self._stragglers[-3:])}
        self.documents["attempts.json"] = documents.as_json(of_each)

    def _save(self, row: union.CheckpointRow) -> None:
        """A checkpoint was saved, or given up."""
        self.saves += 1
        if row.uri is None:
            self._tags["checkpoint_error"] = f"step {row.step}: {row.error}"
            return
        self._tags |= {"checkpoint": row.uri, "checkpoint_step": row.step, "checkpoint_error": ""}
        self.known_steps.update((row.step, *row.deleted))
        self.references[row.step] = row.uri
        for step in row.deleted:
            self.references.pop(step, None)
        self.copies = dict(sorted(row.essential or [(row.step, row.uri)], reverse=True))

    def measured(self, step: int) -> tuple[Measured, ...]:
        """What the evaluation of a step, and the test of its weights, measured: the metrics of its checkpoint.

        NaN is left out: MLflow stores it as 0 with a model.
        """
        row = self._journal.evaluation(step)
        points = [] if row is None else [p for p in evaluation_points(row) if p.key.startswith("eval/")]
        if self._tested is not None:
            points += [point for point in test_points(self._tested) if point.step == step]
        return tuple(
            Measured(point, measured_by(point.key, self.data.values()))
            for point in points
            if not math.isnan(point.value)
        )

    @property
    def makes_copies(self) -> bool:
        """Whether the store gets whole checkpoints, rather than references to them."""
        by_spec = self._spec.record.checkpoints != "reference" and self._spec.record.uri != RECORD_OFF
        return by_spec and not any("://" in uri for uri in self.copies.values())

    def tags(self, *, trouble: str, figures: Sequence[Path], ended: bool) -> dict[str, str]:
        """The run's tags with its note, which shows `trouble` with the record and names the `figures`. The end counts only if it is `ended`."""
        tags, end = dict(self._tags), self.end if ended else None
        tags |= end.tags if end else {"error": ""}  # that of an earlier attempt, or of a hasty reader
        tags |= self._time_tags(ended=end is not None)
        wrong = {"not exact": tags.get("violation"), "not recorded": trouble}
        verdict, details = (end.verdict, end.details) if end else (self._running, {})
        verdict = verdict._replace(troubles=[f"{kind}: {text}" for kind, text in wrong.items() if text])
        if self._stragglers:
            details = {"straggler": self._stragglers[-1], **details}
        names = [f"{run_plots.FOLDER}/{path.name}" for path in figures]
        tags["note"] = documents.note(verdict, details, names, self._folder.name)
        return {f"lockstep.{name}": documents.as_value(value) for name, value in tags.items()}

    def _time_tags(self, *, ended: bool) -> dict[str, Any]:
        """What became of the run's time; empty while it goes on after an end."""
        if self._time is None:
            return {}
        tags = time_tags(self._time)
        return tags if ended else dict.fromkeys(tags, "")

    def _failed(self, end: Failed) -> Ending:
        last = self._journal.last_step
        reached = f"after step {last}" if last else "before the first step"
        return Ending(
            end.status,
            end.at,
            documents.Verdict(end.status, f" {reached}: {end.message}"),
            self._facts,
            {"error": end.message},
            {"error.txt": f"{end.message}\n\n{end.details}".rstrip() + "\n"},
        )

    def _finished(self, end: Finished) -> Ending:
        """A run that ended by itself, or by a signal that it obeyed. One whose ledger lacks steps has not finished."""
        summary = end.summary
        last_step = int(summary.get("step") or 0)
        self.lack = self._missing(last_step)
        if self.lack is not None:
            return self._failed(Failed(str(self.lack), at=end.at))
        killer = f" by {signal.Signals(summary['signal']).name}" if summary.get("signal") else ""
        metrics = documents.single_values(summary.get("metrics") or {})
        of_evaluations_first = sorted(metrics.items(), key=lambda metric: not metric[0].startswith("eval/"))
        headline = f"{killer} at step {summary.get('step', '?')}" + (f": {end.error}" if end.error else "")
        parts = [headline, *(documents.reading(metric) for metric in of_evaluations_first)]
        values = documents.single_values(
            {name: summary[name] for name in summary if name not in {"run_id", "status", "unsaved"}}
        )
        model = model_folder(end.files)
        return Ending(
            end.status,
            end.at,
            documents.Verdict(end.status, " · ".join(parts[:5])),
            {**values, **metrics, **self._facts},
            {"vanished": "", **values, "error": end.error},
            {
                "summary.json": documents.as_json(summary),
                **({"error.txt": f"{end.error}\n"} if end.error else {}),
            },
            [path for path in end.files if path.parent != model],
            None if model is None else (model, last_step),
        )

    def _missing(self, last: int) -> RecordError | None:
        """What the ledger of a run that ended after step `last` lacks; None if nothing."""
        if self.lost:
            return problems.STEPS_LOST(got=self.lost)
        if self._journal.is_deleted:
            return problems.FOLDER_DELETED(folder=self._folder)
        missing = self._journal.missing_steps()
        if not missing and 0 < self._journal.last_step < last:
            missing = range(self._journal.last_step + 1, last + 1)
        if missing:
            return _not_whole(missing)
        if self._journal.damage:
            contents = ", ".join(damage.content for damage in self._journal.damage[:5])
            return problems.NOT_WHOLE(got=f"lines of its journal are damaged ({contents})")
        return None


def _not_whole(missing: range) -> RecordError:
    steps = f"step {missing.start}" if len(missing) == 1 else f"steps {missing.start} to {missing.stop - 1}"
    return problems.NOT_WHOLE(got=f"its ledger lacks {steps}")


def log_line(event: Recorded) -> str:
    """What the run's log says of an event when it is recorded; empty for most."""
    match event:
        case union.Started():
            return f"training begins on {event.facts.get('workers', '?')} workers"
        case union.InputsFound():
            return f"step {event.step}: an input of the job was found; the identity is {event.identity} from here on"
        case union.CheckpointRow() if event.uri is None:
            return f"no checkpoint of step {event.step}: {event.error}"
        case TakenOver():
            return event.message
        case union.Violated():
            return f"determinism violation: {event.text}"
        case union.Diagnosed() | union.Corrupted() | union.Alerted():
            return str(event)
        case union.Warned() | union.Straggling():
            return f"warning: {event.text}"
        case union.ResumeChecked():
            return f"the checkpoint of step {event.step} was taken up by a process of its own: the next step has the same bits"
        case union.Mended():
            return f"the journal is mended: {event.how}"
    return ""
