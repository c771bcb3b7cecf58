"""The run of a sweep in its store: the space, the table of trials, the best spec, figures. Each of its trials is a run below it.

All of it is a function of the table, which is told by the rows that changed: what an outage has kept back is said by the next
call, and the last one is repeated until it is heard. What one call costs does not grow with the trials: the documents, which
have all rows, are written now and then, and at the end.
"""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from lockstep.errors import RecordError
from lockstep.files import encoded, write_bytes
from lockstep.record.errors import UnavailableError
from lockstep.record.events.metrics import Point
from lockstep.record.events.union import Failed
from lockstep.record.mirror import documents
from lockstep.record.mirror.run_store import SWEEP_FILE, Status
from lockstep.record.mirror.stores import find_run, reader, store_for
from lockstep.record.problems import CANNOT_WRITE
from lockstep.record.redaction import redacted_document
from lockstep.record.runs.heartbeat import process_tags
from lockstep.spec.sweep import SweepSpec
from lockstep.sweeps import sweep_plots
from lockstep.sweeps.trial_standings import Standing, TrialRow, best_of

PATIENCE_S = 60.0
"""How long a store that does not answer is asked again at the end."""

DOCUMENTS_S = 10.0
"""How often the table's documents are written while the sweep lasts: of a thousand trials they are 0.3 MB."""

SEEN = 1000
"""How many of the newest runs are looked through for those that a killed driver has left."""

_LIVES = {"lockstep.error": "", "lockstep.vanished": ""}
"""Takes back what a reader has marked that had heard nothing of the sweep for a while."""

Trials = Sequence[TrialRow]


class SweepRecord:
    """One sweep: a new one, or where `sweep_id` is given the one that goes on. RecordError where it cannot be opened.

    `source` are the files of a job of `__main__`, without which the sweep could not be resumed.
    """

    def __init__(
        self, sweep: SweepSpec, sweep_id: str | None, source: Mapping[str, bytes] | None = None
    ) -> None:
        self._sweep = sweep
        base = sweep.base
        self._store = store_for(base.model_copy(update={"name": sweep.name}), time.time())
        self.run_id = self._store.open(sweep_id)
        self.folder = base.folder / self.run_id
        self.url = self._store.url()
        self._sent = max(self._store.last_steps().values(), default=0)
        self._best = ""
        self._standing = Standing(sweep.mode)
        self._counted: tuple[int, TrialRow | None] = 0, None
        """How many ends were looked at for points, and the best of those trials."""
        self._written_at = -math.inf
        self._store.set_status("RUNNING")
        if sweep_id is not None:  # runs that a killed driver has left RUNNING are marked where they are read
            reader(base.record.uri or "", base.folder).runs(None, SEEN)
        for path, content in (source or {}).items():
            self._document(f"source/{path}", content)
        self._document(SWEEP_FILE, documents.as_yaml(self._shown()))
        self._store.log_params(
            documents.flat({name: v for name, v in self._shown().items() if name != "spec"})
        )
        self._store.set_tags(
            {
                "lockstep.kind": "sweep",
                "lockstep.folder": str(self.folder),
                "lockstep.note": documents.note(
                    documents.Verdict("RUNNING", f" · {sweep.name}: {sweep.total} trials"), {}
                ),
                **_LIVES,
                **process_tags(time.time()),
            }
        )

    def _shown(self) -> dict[str, Any]:
        document: dict[str, Any] = redacted_document(self._sweep.document())
        return document

    def update(self, trials: Trials) -> RecordError | None:
        """Say how the sweep stands, of which these trials have changed. What could not be said, which the next call says again."""
        for trial in trials:
            self._standing.take(trial)

        def say() -> None:
            self._store.set_status("RUNNING")  # a hasty reader may have set another
            self._say()

        return self._try(say)

    def end(self, trials: Trials, status: Status, verdict: str) -> RecordError | None:
        """Say the last of it, of all trials. What could not be said within a minute."""
        for trial in trials:
            self._standing.take(trial)

        def say() -> None:
            self._written_at = -math.inf
            self._say()
            undrawn: list[str] = []
            for path in sweep_plots.draw(self._sweep, trials, self.folder, undrawn.append):
                self._store.log_file(path, path.parent.name)
            best = best_of(trials, self._sweep.mode)
            shown = (
                []
                if best is None
                else [f"{self._sweep.metric} {best['metric']:.6g}", f"trial {best['trial']}"]
            )
            drawn = [f"figures/{path.name}" for path in sorted((self.folder / "figures").glob("*.png"))]
            details = {} if best is None else {**best["fields"], "best run": best["run_id"]}
            details |= {"figures": "; ".join(undrawn)} if undrawn else {}
            headline = documents.Verdict(status, " · ".join([f" {verdict}", *shown]))
            text = documents.note(headline, details, drawn, self.run_id)
            self._store.set_tags({"lockstep.note": text})
            self._store.set_status(status)

        until = time.monotonic() + PATIENCE_S
        while isinstance(failure := self._try(say), UnavailableError) and time.monotonic() < until:
            time.sleep(1.0)
        return failure

    def _try(self, say: Callable[[], None]) -> RecordError | None:
        try:
            say()
        except RecordError as error:
            return error
        except OSError as error:  # of a figure
            return self._unwritten(error)
        return None

    def _unwritten(self, error: OSError) -> UnavailableError:
        return CANNOT_WRITE(path=self.folder, got=error.strerror or error).as_kind(UnavailableError)

    def _say(self) -> None:
        self._store.set_tags(_LIVES | process_tags(time.time()))
        best, counts = self._standing.best, self._standing.counts
        if time.monotonic() - self._written_at >= DOCUMENTS_S:
            trials = [self._standing.rows[number] for number in sorted(self._standing.rows)]
            columns, rows = table(trials, list(self._sweep.space))
            document = documents.without_nan({"columns": columns, "data": rows})
            self._document("trials.json", json.dumps(document, default=str, allow_nan=False) + "\n")
            self._document("trials.csv", _csv(columns, rows))
            self._written_at = time.monotonic()
        tags = {
            "lockstep.trials": ", ".join(f"{count} {status}" for status, count in sorted(counts.items())),
            "mlflow.loggedArtifacts": json.dumps([{"path": "trials.json", "type": "table"}]),
        }
        if best is not None:
            self._keep_best(best["run_id"])
            tags |= {"lockstep.best_trial": str(best["trial"]), "lockstep.best_run": best["run_id"]}
        self._store.set_tags(tags)
        self._say_points()

    def _say_points(self) -> None:
        """The best value after each trial that ended since the last call, in the order of their ends."""
        points, (count, best) = [], self._counted
        while (trial := self._standing.ended.get(count)) is not None:
            count, best = count + 1, best_of([*filter(None, [best]), trial], self._sweep.mode)
            if best is not None and count > self._sent:
                at = int(1000 * trial["ended"])
                points.append(Point(f"best/{self._sweep.metric}", best["metric"], at, count))
        self._store.log_metrics(points)
        self._counted = count, best

    def _keep_best(self, run_id: str) -> None:
        """The spec that the best trial has on record: a member of a population has a fork in it."""
        if run_id != self._best:
            base = self._sweep.base
            stored_run = find_run(base.record.uri or "", run_id, base.folder)
            self._document("best.yaml", documents.as_yaml(stored_run.spec))
            self._best = run_id

    def _document(self, name: str, content: str | bytes) -> None:
        try:
            write_bytes(self.folder / name, encoded(content) if isinstance(content, str) else content)
        except OSError as error:
            raise self._unwritten(error) from error
        below = str(PurePosixPath(name).parent)
        self._store.log_file(self.folder / name, "" if below == "." else below)


def end_abandoned(sweep: SweepSpec, sweep_id: str, failed: Failed) -> bool:
    """Say of a sweep that nobody records any more how it ended: its status, its note and error.txt. False where its store has an end of it.

    Its table stays as it was told last. RecordError where the store refuses.
    """
    base = sweep.base
    stored_run = reader(base.record.uri or "", base.folder).run(sweep_id)
    if stored_run.status != "RUNNING" and not stored_run.tags.get(
        "lockstep.vanished"
    ):  # a mark that a reader has made
        return False
    store = store_for(base.model_copy(update={"name": sweep.name}), time.time())
    store.open(sweep_id)
    path = base.folder / sweep_id / "error.txt"
    write_bytes(path, encoded(f"{failed.message}\n\n{failed.details}".rstrip() + "\n"))
    store.log_file(path, "")
    text = documents.note(documents.Verdict(failed.status, f" · {failed.message}"), {})
    store.set_tags({"lockstep.error": failed.message, "lockstep.note": text, "lockstep.vanished": ""})
    store.set_status(failed.status, failed.at)
    return True


def table(trials: Trials, fields: Sequence[str]) -> tuple[list[str], list[list[Any]]]:
    """The trials as columns and rows."""
    columns = ["trial", "status", *fields, "metric", "step", "run_id", "reason"]
    rows = [
        [
            t["trial"],
            t["status"],
            *(t["fields"].get(f) for f in fields),
            t["metric"],
            t["step"],
            t["run_id"],
            t["reason"],
        ]
        for t in trials
    ]
    return columns, rows


def _csv(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows([columns, *rows])
    return text.getvalue()
