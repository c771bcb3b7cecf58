"""The recorder: what the driver tells of a run, written down by a thread or a process of its own.

No call but `run_id`, `run_folder` and `close` waits for anything: the thread that trains or drives pays for putting a
value into a queue. The recorder is the run's only writer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lockstep.errors import RecordError, StorageError
from lockstep.record.ledger import CheckpointRow, EvaluationRow, History, StepRow
from lockstep.record.run_store import RunStore
from lockstep.record.stores import store_for
from lockstep.record.writer import Writer
from lockstep.record.writer_process import WriterProcess
from lockstep.spec.fields import Spec

__all__ = ["Latest", "Recorder", "RunStore"]


def no_aliases(run_id: str, steps: frozenset[int]) -> None:
    """For whoever does not care for aliases."""


class Latest(NamedTuple):
    """The newest rows that a recorder was given, for a line of progress."""

    step: StepRow | None
    evaluation: EvaluationRow | None


class Recorder:
    """Records one run: a new one, or where `run_id` is given the one that goes on.

    Call `start`, then any of the others, and `close` at the end in every case. A store that does not answer is tried
    again until `close`; `failure` tells of it once it has lasted `patience_s`. `on_aliases` is told, in the thread and
    after each checkpoint, the run's id and the steps whose checkpoints have an alias in the store's registry. With `apart` a
    process of its own writes, rather than a thread; the callables must then survive pickling.
    """

    def __init__(
        self,
        spec: Spec,
        store_factory: Callable[[Spec], RunStore] | None = None,
        run_id: str | None = None,
        *,
        patience_s: float = 60.0,
        on_aliases: Callable[[str, frozenset[int]], None] = no_aliases,
        apart: bool = False,
    ) -> None:
        make_store = store_factory or partial(store_for, started_at=time.time())
        self._writer = (WriterProcess if apart else Writer)(spec, make_store, run_id, patience_s, on_aliases)
        self._step: StepRow | None = None
        self._evaluation: EvaluationRow | None = None

    def start(self) -> None:
        """Start the thread; it opens the store and creates the run."""
        self._writer.start()

    def run_id(self) -> str:
        """Wait until the run exists; its id. RecordError where the store could not be opened."""
        self._writer.opened.wait()
        if self._writer.run_id is None:
            raise self._writer.failure() or RecordError("record: the run was not created")
        return self._writer.run_id

    def url(self) -> str:
        """Wait until the run exists; the link of its page, or nothing where the store has no pages."""
        self.run_id()
        return self._writer.url

    def run_folder(self) -> Path:
        """Wait until the run exists; its folder, created."""
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
        """The first step or evaluation that gave other bits when it was done again, or nothing. Never waits."""
        return self._writer.violation

    @property
    def opened(self) -> bool:
        """Whether the run exists in its store. Never waits."""
        return self._writer.run_id is not None

    @property
    def latest(self) -> Latest:
        """The newest rows that were given. Never waits."""
        return Latest(self._step, self._evaluation)

    def started(self, facts: Mapping[str, Any]) -> None:
        """Facts that are known when training begins; may be told again, by each attempt.

        `plan` (a mapping) becomes parameters, `environment` environment.json and some tags, `git` (see `git_state`) tags
        and git.diff. Of the others a single value becomes the tag `lockstep.<name>` and anything else `<name>.json`.
        """
        self._writer.tell("started", dict(facts))

    def steps(self, rows: Sequence[StepRow]) -> None:
        """Steps that were done, in order. Steps that are recorded already are passed over."""
        if rows:
            self._step = rows[-1]
            self._writer.tell("steps", tuple(rows))

    def evaluation(self, row: EvaluationRow) -> None:
        """An evaluation, after the step that it belongs to."""
        self._evaluation = row
        self._writer.tell("evaluation", row)

    def system(self, node: str, values: Mapping[str, float]) -> None:
        """What a node is busy with at this moment (see `system.sampled`)."""
        self._writer.tell("system", node, dict(values), time.time())

    def restored(self, history: History) -> None:
        """The rows up to the checkpoint that an attempt starts from. What is recorded already is passed over."""
        self.steps(history.steps)
        for row in history.evaluations:
            self.evaluation(row)

    def document(self, name: str, text: str) -> None:
        """Keep a text under the name of a file."""
        self._writer.tell("document", name, text)

    def output(self, name: str, text: str) -> None:
        """What a worker has printed since the last call of this `name`: it is kept in `logs/<name>.txt`, the newest part of it."""
        self._writer.tell("output", name, text)

    def attempts(self, attempts: Sequence[Mapping[str, Any]]) -> None:
        """What is known of each attempt of the run; told again whenever one ends."""
        self._writer.tell("attempts", tuple(attempts))

    def checkpoint(self, row: CheckpointRow) -> None:
        """A checkpoint was saved, or given up."""
        self._writer.tell("checkpoint", row)

    def finished(self, summary: Mapping[str, Any], files: Sequence[Path] = ()) -> None:
        """The run is done: keep the ledger, the summary, and `files` that lie in the run's folder.

        Its status is FINISHED, or KILLED where the summary has `stopped`, by the `signal` of that number if it has one.

        Single values of the summary become tags `lockstep.<name>`, all of it is summary.json.
        """
        self._writer.tell("finished", dict(summary), tuple(files))

    def failed(self, message: str, details: str = "", status: Literal["FAILED", "KILLED"] = "FAILED") -> None:
        """The run has ended early: `message` is the one line, `details` the traceback. The ledger is kept as well."""
        self._writer.tell("failed", message, details, status)

    def replay(self) -> None:
        """Say again what the journal of the run has, instead of going on with it."""
        self._writer.tell("replay")

    def close(self, timeout_s: float = 60.0) -> None:
        """Write what is left, for up to `timeout_s`. RecordError where something given could not be written.

        A run that was told neither `finished` nor `failed` is marked FAILED.
        """
        self._writer.close(timeout_s)
        failure = self._writer.failure()
        if failure:
            raise failure
