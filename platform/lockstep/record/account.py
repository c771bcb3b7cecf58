"""What a run's page says: parameters, tags, the note, documents, figures, the ledger, as calls for the store.

Every document is written to the run's folder first and sent from there.
"""

from __future__ import annotations

import hashlib
import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import RecordError, first_line
from lockstep.job.source import job_sources
from lockstep.record import documents, figures, ledger
from lockstep.record.data_sets import data_sets
from lockstep.record.files import append_bounded, write_text
from lockstep.record.journal import Journal
from lockstep.record.ledger import CheckpointRow
from lockstep.record.run_store import RunStore, Status
from lockstep.record.uploads import Uploads
from lockstep.spec.fields import Spec

LOGS = "logs"
"""The folder of what workers have printed."""

_ENVIRONMENT_TAGS = ("lockstep", "python", "torch", "device_kind", "device_name")
"""Facts of the environment that are worth searching runs by; all of them are in environment.json."""


class Account:
    """One run's account. `send` makes a call of the store in its turn."""

    def __init__(
        self, spec: Spec, folder: Path, journal: Journal, store: RunStore, send: Callable[..., None]
    ) -> None:
        self._spec = spec
        self._folder = folder
        self._journal = journal
        self._store = store
        self._send = send
        self._facts: dict[str, Any] = {}
        self._violation = ""
        self._figures: list[str] = []
        self._stragglers: list[str] = []
        self.working = False
        self._uploads = Uploads(store, self._not_copied)

    def keep_spec(self) -> None:
        """The one document without which a run cannot be resumed."""
        self.document("spec.yaml", documents.as_yaml(documents.spec_document(self._spec)))

    def describe(self, *, resumed: bool) -> None:
        """What else is known of a run before it does anything: its parameters and its job's source."""
        document = documents.spec_document(self._spec)
        self._send(self._store.log_params, documents.flat(document))
        self._tag({"job": self._spec.job.use, "folder": str(self._folder)})
        self._note(f"**RUNNING** · {self._spec.name}", {})
        if resumed:
            self._tag({"error": ""})  # that of the attempt before
        for name, path in sorted(job_sources(self._spec.job.use).items()):
            below = name.replace(".", "/") + ("/__init__.py" if path.name == "__init__.py" else ".py")
            self.document(f"source/{below}", path.read_text(encoding="utf-8", errors="replace"))

    def started(self, facts: Mapping[str, Any]) -> None:
        """The facts of an attempt."""
        self.log(f"training begins on {facts.get('workers', '?')} workers")
        rest = dict(facts)
        plan, git, environment = (rest.pop(name, None) or {} for name in ("plan", "git", "environment"))
        self._send(self._store.log_params, documents.flat({"plan": plan}))
        if facts.get("fields"):
            self._send(self._store.log_data, data_sets(self._spec, facts["fields"]))
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

    def attempts(self, attempts: Sequence[Mapping[str, Any]]) -> None:
        """What is known of each attempt so far; those of an earlier driver stay as it left them."""
        told = {attempt["attempt"]: attempt for attempt in [*self._earlier_attempts(), *attempts]}
        self._stragglers = [line for attempt in told.values() for line in attempt.get("stragglers", ())]
        self._tag({"attempts": len(told), "stragglers": "; ".join(self._stragglers[-3:])})
        self.document("attempts.json", documents.as_json([told[number] for number in sorted(told)]))

    def _earlier_attempts(self) -> list[dict[str, Any]]:
        path = self._folder / "attempts.json"
        found: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
        return found

    def checkpoint(self, row: CheckpointRow) -> None:
        """A checkpoint was saved, or given up."""
        if row.uri is None:
            self._tag({"checkpoint_error": f"step {row.step}: {row.error}"})
            self.log(f"no checkpoint of step {row.step}: {row.error}")
            return
        self._tag({"checkpoint": row.uri, "checkpoint_step": row.step, "checkpoint_error": ""})
        folder = Path(row.uri)
        tags = {"lockstep.uri": row.uri, **_manifest(folder)}
        if self._spec.record.checkpoints == "artifact" and "://" not in row.uri:
            self._uploads.send(row.step, folder, tags)
        else:
            self._send(self._store.log_checkpoint, row.step, tags, None)
        for step in row.deleted:
            if self._spec.record.checkpoints == "artifact":
                self._uploads.delete(step)
            else:
                self._send(self._store.delete_checkpoint, step)

    def replay_checkpoints(self, rows: Sequence[CheckpointRow]) -> None:
        """The checkpoints of a run whose process has gone, as far as they are left."""
        deleted = {step for row in rows for step in row.deleted}
        for row in rows:
            if row.step not in deleted:
                self.checkpoint(row._replace(deleted=()))
        for step in sorted(deleted):
            self._send(self._store.delete_checkpoint, step)

    def close(self, deadline: float) -> None:
        """Let what is sent beside the outbox come to its end."""
        self._uploads.close(deadline)

    def _not_copied(self, step: int, reason: str) -> None:
        self.log(f"no copy of the checkpoint of step {step}: {reason}")

    def violated(self, violation: str) -> None:
        """The run's promise is broken."""
        self._violation = violation
        self._tag({"violation": violation})
        self.log(f"determinism violation: {violation}")

    def finished(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        """The end that a run came to by itself, or by a signal that it heeded."""
        self._ledger()
        for path in files:
            self._keep(path)
        self.document("summary.json", documents.as_json(summary))
        values = documents.single_values(
            {name: summary[name] for name in summary if name not in {"run_id", "status"}}
        )
        self._tag(values)
        metrics = documents.single_values(summary.get("metrics") or {})
        status: Status = "KILLED" if summary.get("stopped") else "FINISHED"
        killer = f" by {signal.Signals(summary['signal']).name}" if summary.get("signal") else ""
        self._final_model(status, files, summary)
        verdict = [
            f"**{status}**{killer} at step {summary.get('step', '?')}",
            *map(documents.reading, sorted(metrics.items(), key=lambda one: not one[0].startswith("eval/"))),
        ]
        self._end(status, " · ".join(verdict[:5]), {**values, **metrics, **self._facts})

    def failed(self, message: str, details: str, status: Status) -> None:
        """Any other end."""
        self._tag({"error": message})
        reached = (
            f"after step {self._journal.last_step}" if self._journal.last_step else "before the first step"
        )
        try:
            self.document("error.txt", f"{message}\n\n{details}".rstrip() + "\n")
            self._ledger()
        finally:  # a run whose folder cannot be written has failed as well
            self._end(status, f"**{status}** {reached}: {message}", self._facts)

    def log(self, text: str) -> None:
        """Add a line to log.txt, with its time."""
        with (self._folder / "log.txt").open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def output(self, name: str, text: str) -> None:
        """Keep what a worker has printed."""
        append_bounded(self._folder / LOGS / f"{name}.txt", text)

    def keep_output(self) -> None:
        """Send what the workers have printed: the last of it comes after the run's end was told."""
        for path in sorted((self._folder / LOGS).glob("*.txt")):
            self._keep(path)

    def _end(self, status: Status, verdict: str, details: Mapping[str, Any]) -> None:
        self._note(verdict, details)
        self.log(verdict.replace("**", ""))
        self._keep(self._folder / "log.txt")
        self._send(self._store.set_status, status)

    def _note(self, verdict: str, details: Mapping[str, Any]) -> None:
        broken = f" · **not exact: {self._violation}**" if self._violation else ""
        if self._stragglers:
            details = {"straggler": self._stragglers[-1], **details}
        shown = [f"{figures.FOLDER}/{name}" for name in self._figures]
        self._tag({"note": documents.note(verdict + broken, details, shown, self._folder.name)})

    def _final_model(self, status: Status, files: Sequence[Path], summary: Mapping[str, Any]) -> None:
        """Of a run that came to its end: one that is stopped has no time to lose."""
        weights = [path for path in files if path.name == "final.safetensors"]
        if status == "FINISHED" and weights:
            self._send(self._log_model, weights[0], int(summary.get("step", 0)))

    def _log_model(self, weights: Path, step: int) -> None:
        self.working = True
        try:
            self._store.log_final_model(self._spec, weights, step)
        except RecordError:
            raise
        except Exception as error:  # noqa: BLE001 - the job's own model, traced: it may raise anything, and the run has its weights
            reason = first_line(error)[:500]
            self.log(f"no model for MLflow: {reason}")
            self._store.set_tags({"lockstep.model_error": reason})
        finally:
            self.working = False

    def _ledger(self) -> None:
        steps, evaluations = self._folder / "ledger.parquet", self._folder / "evaluations.parquet"
        if self._journal.last_step:
            rows = list(self._journal.steps())
            ledger.write_parquet(rows, steps)
            self._keep(steps)
            for figure in figures.draw(
                rows, self._journal.evaluations(), self._folder, scaled=self._spec.precision == "fp16"
            ):
                self._figures.append(figure.name)
                self._keep(figure)
        if self._journal.evaluations():
            ledger.write_evaluations(self._journal.evaluations(), evaluations)
            self._keep(evaluations)

    def _keep(self, path: Path) -> None:
        """Send a file to the store, under the folder that it has within the run's folder."""
        inside = path.parent.relative_to(self._folder) if path.is_relative_to(self._folder) else Path()
        self._send(self._store.log_file, path, "" if inside == Path() else inside.as_posix())

    def document(self, name: str, text: str) -> None:
        """Keep a text in the run's folder and with the run."""
        write_text(self._folder / name, text)
        self._keep(self._folder / name)

    def _tag(self, facts: Mapping[str, Any]) -> None:
        tags = {f"lockstep.{name}": documents.as_value(value) for name, value in facts.items()}
        if tags:
            self._send(self._store.set_tags, tags)


def _manifest(folder: Path) -> dict[str, str]:
    """The digest of a checkpoint's manifest, which has those of its files; nothing where this machine does not see it."""
    manifest = folder / "manifest.json"
    try:
        return {"lockstep.manifest": f"sha256:{hashlib.sha256(manifest.read_bytes()).hexdigest()}"}
    except OSError:
        return {}
