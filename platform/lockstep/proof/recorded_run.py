"""A recorded run as a proof needs it: its spec, rows, identity fields, source and checkpoints. It is only read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.checkpoint.errors import BadCheckpointError, LostFileError
from lockstep.checkpoint.layout import OWNER, file_name, step_folder
from lockstep.checkpoint.reader import (
    Checkpoint,
    Loaded,
    checkpoint_at,
    checkpoints,
    checkpoints_of,
    load,
    load_step,
    verify,
)
from lockstep.checkpoint.runs.run_checkpoints import adopt, steps_of
from lockstep.checkpoint.runs.run_folder import RunFolder
from lockstep.checkpoint.storage.interface import PIECE
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.errors import NoSuchRunError, RecordError, SpecError
from lockstep.files import as_bytes
from lockstep.job.identity import forked_step
from lockstep.job.inputs.external_facts import MOVED
from lockstep.job.source import MAIN_MODULE
from lockstep.parsing import MOST_BYTES, json_document
from lockstep.paths import OutsideError, beneath, component, moved, read_beneath
from lockstep.proof import problems
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.journal_file import NAME
from lockstep.record.ledger.rows import EvaluationRow, StepRow
from lockstep.record.mirror.run_store import SWEEP_FILE, CheckpointCopy, StoredRun
from lockstep.record.mirror.stores import find_copies, find_history, find_run, reader
from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec
from lockstep.spec.locations import RECORD_OFF

SOURCE = "source/"


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """What is recorded of a run. `steps` and `evaluations` are by step."""

    run_id: str
    spec: Spec
    steps: Mapping[int, StepRow]
    evaluations: Mapping[int, EvaluationRow]
    fields: Mapping[str, Any]
    """The fields of its identity."""
    source: Mapping[str, bytes]
    """Its job's files, by their paths below a source root."""
    saved: Sequence[int]
    """The steps whose checkpoints are in its storage, in order."""
    copies: Sequence[CheckpointCopy]
    """Copies in its store."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """What it says that it ended with; nothing where it has not finished."""
    folder: Path | None = None
    """Where the files of its weights are; those of a trial that another run stands for are with that one."""
    own_folder: Path | None = None
    """The run's own, where another run stands for it: files of weights in it are looked at too."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What its job took from outside itself and its identity has not."""

    @property
    def ended(self) -> int:
        """The step with which it says that it finished; 0 where it has not."""
        step = self.summary.get("step")
        return step if isinstance(step, int) else 0

    @property
    def forked_at(self) -> int:
        """The step of another run from which it goes on; 0 for a run with a beginning of its own."""
        fork = self.spec.fork
        return 0 if fork is None else forked_step(self.fields) or fork.step or min(self.steps) - 1

    @property
    def last_step(self) -> int:
        """Its last step, whether or not the ledger still has it."""
        return max(*self.steps, self.ended)

    @property
    def placed_alike(self) -> int | None:
        """The attempt whose rows were recorded under `spec` as it is, the newest: a resume may change the placement. None where the rows are another run's."""
        return None if self.summary.get("reused_from") else self.steps[max(self.steps)].attempt

    def check_step(self, step: int, option: str) -> None:
        """SpecError where the run has no such step; `option` is the option that asked for it."""
        if not self.forked_at < step <= self.last_step:
            available = (
                f"{self.forked_at + 1} to {self.last_step}: it is a fork"
                if self.forked_at
                else f"{self.last_step}"
            )
            raise problems.NO_SUCH_STEP(option=option, got=step, wanted=available)

    @property
    def checkpoints(self) -> list[int]:
        """The steps that have a checkpoint somewhere, in order."""
        return sorted({*self.saved, *(copy.step for copy in self.copies)})

    def checkpoint(self, step: int, aside: Path) -> tuple[str, Loaded]:
        """The storage and the content of the checkpoint of `step`; a copy is downloaded into `aside`.

        BadCheckpointError where it is not whole.
        """
        if step in self.saved:
            storage = self.spec.checkpoint.storage
            try:
                return storage, load_step(RunFolder.open(open_storage(storage), self.run_id), step)
            except LostFileError as error:
                raise error.as_kind(BadCheckpointError) from error
        if step not in steps_of(str(aside), self.run_id):
            copy = next(copy for copy in self.copies if copy.step == step)
            folder = aside / f"copy-{self.run_id}-{step}"
            folder.mkdir(parents=True)
            copy.download(folder)
            load(checkpoint_at(str(folder)))
            adopt(str(aside), self.run_id, step, folder)
        return str(aside), load_step(RunFolder.open(open_storage(str(aside)), self.run_id), step)


def copy_checkpoint(storage: str, run_id: str, step: int | None, folder: Path) -> str:
    """Copy a whole checkpoint of a run, of `step` or the newest one, into the storage `folder`, without the rows behind it. The storage.

    BadCheckpointError where there is none.
    """
    run = RunFolder.open(open_storage(storage), run_id)
    candidates = checkpoints(run) if step is None else checkpoints_of(run, step)
    for checkpoint in candidates:
        try:
            manifest = verify(checkpoint, shared=False)
        except (BadCheckpointError, LostFileError):
            continue
        assert checkpoint.step is not None
        target = folder / run_id / step_folder(checkpoint.step)
        if not target.exists():
            (folder / run_id / OWNER).unlink(missing_ok=True)
            RunFolder.create(open_storage(str(folder)), run_id)
            target.mkdir()
            for entry in manifest.files:
                _copy(checkpoint, entry.name, target / plain_name(entry.name))
            (target / checkpoint.name).write_bytes(checkpoint.storage.read(checkpoint.path(checkpoint.name)))
        return str(folder)
    raise problems.NO_WHOLE_CHECKPOINT(run=run_id, which="" if step is None else f" of step {step}")


def _copy(checkpoint: Checkpoint, name: str, target: Path) -> None:
    piece = memoryview(bytearray(PIECE))
    with checkpoint.storage.open(checkpoint.path(name)) as reading, target.open("xb") as file:
        while got := reading.readinto(piece):
            file.write(piece[:got])


def plain_name(name: str) -> str:
    """The name of a checkpoint's file. BadCheckpointError for one that leads elsewhere."""
    if file_name(name) is None:
        raise problems.FOREIGN_FILE(got=name)
    return name


def named_run(run_id: str, uri: str, folder: Path) -> StoredRun:
    """What is recorded of the run that a user names; `folder` is looked in for `off`. SpecError where there is no such run."""
    try:
        return find_run(uri, run_id, folder)
    except NoSuchRunError as error:
        if uri != RECORD_OFF or (folder / run_id / "run.json").exists():
            raise error.as_kind(SpecError) from error
        if run_id and (folder / run_id / "spec.yaml").exists():
            raise problems.RECORD_IN_STORE(run=run_id, folder=folder) from error
        raise problems.NO_RECORD(run=run_id, folder=folder) from error


def folder_of(run_id: str, spec: Spec, storage: Path) -> Path:
    """The folder of a run: below `storage`, else where its spec has it."""
    try:
        candidate = moved(storage, run_id) or beneath(storage, component(run_id))
    except OutsideError as error:
        raise problems.NO_RUN_ID(got=error) from error
    return candidate if candidate.is_dir() else spec.folder / run_id


def recorded_run(run_id: str, uri: str, folder: Path) -> RecordedRun:
    """The run of this id in the store at `uri`; `folder` is looked in for `off`. SpecError where there is none, or nothing to compare."""
    stored = named_run(run_id, uri, folder)
    document = {**stored.spec, "record": {**stored.spec.get("record", {}), "uri": uri}}
    spec = load_spec(document)
    run_folder = spec.folder / run_id
    if uri == RECORD_OFF:  # where it was found, which may be a copy of the folder that its spec names
        run_folder = folder / run_id
        if (run_folder / OWNER).exists():
            update = {"storage": str(folder)}
            spec = spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update=update)})
    steps, evaluations = _rows(uri, run_id, run_folder)
    if not steps:
        raise problems.NO_STEP(run=run_id)
    _refuse_twice(run_id, "ledger", steps)
    _refuse_twice(run_id, "record", evaluations)
    summary = stored.summary if stored.status == "FINISHED" else {}
    return RecordedRun(
        run_id,
        spec,
        {row.step: row for row in steps},
        {row.step: row for row in evaluations},
        recorded_fields(uri, run_id, run_folder),
        recorded_source(run_id, uri, run_folder),
        sorted(steps_of(spec.checkpoint.storage, run_id)),
        find_copies(uri, run_id),
        summary,
        folder_of(str(summary.get("reused_from") or run_id), spec, folder),
        folder_of(run_id, spec, folder),
        _facts(uri, run_id, run_folder),
    )


def recorded_source(run_id: str, uri: str, folder: Path) -> dict[str, bytes]:
    """The files of a run's job by their paths below a source root, from the run's `folder` or else from its store."""
    texts = _Texts(uri, run_id, folder)
    return {name.removeprefix(SOURCE): texts.read(name) for name in texts.below(SOURCE)}


def recorded_main(spec: Spec, run_id: str | None) -> Mapping[str, bytes] | None:
    """The recorded source of a run or sweep whose job was a class of `__main__`, for what goes on with it; None for any other."""
    if run_id is None or spec.job.use.partition(":")[0] != MAIN_MODULE:
        return None
    return recorded_source(run_id, spec.record.uri or "", spec.folder / run_id)


def recorded_fields(uri: str, run_id: str, folder: Path) -> dict[str, Any]:
    """The fields of a run's identity; empty where they are not recorded."""
    try:
        return json_document(_Texts(uri, run_id, folder).read("fields.json") or b"{}")
    except (OSError, ValueError) as error:
        raise problems.UNREADABLE(run=run_id, what="fields.json", got=error) from error


def _facts(uri: str, run_id: str, folder: Path) -> dict[str, Any]:
    """The facts of what a run's job took from outside itself; empty where they are not recorded."""
    try:
        facts = json_document(_Texts(uri, run_id, folder).read("environment.json") or b"{}").get(MOVED)
    except (OSError, ValueError) as error:
        raise problems.UNREADABLE(run=run_id, what="environment.json", got=error) from error
    return facts if isinstance(facts, dict) else {}


def _refuse_twice(run_id: str, table: str, rows: Sequence[StepRow] | Sequence[EvaluationRow]) -> None:
    """SpecError where a step, or an evaluation, is recorded twice: nothing says which one counts."""
    numbers = [row.step for row in rows]
    if len(set(numbers)) < len(numbers):
        twice = next(step for step, count in Counter(numbers).items() if count > 1)
        kind = "row" if isinstance(rows[0], StepRow) else "evaluation"
        raise problems.ROW_TWICE(run=run_id, what=table, kind=kind, step=twice)


def _rows(uri: str, run_id: str, folder: Path) -> tuple[list[StepRow], list[EvaluationRow]]:
    """The ledger's rows, and of a run that has not ended those of its journal."""
    if not (folder / "ledger.parquet").exists() and (folder / NAME).exists():
        journal = Journal(folder, read_only=True)
        try:
            return list(journal.steps()), list(journal.evaluations())
        finally:
            journal.close()
    try:
        history = find_history(uri, run_id, folder.parent)
    except RecordError as error:
        raise problems.UNREADABLE(run=run_id, what="ledger", got=error) from error
    return list(history.steps), list(history.evaluations)


class _Texts:
    """The files of a run or a sweep: from its folder, or else from its store."""

    def __init__(self, uri: str, run_id: str, folder: Path) -> None:
        self._folder, self._run_id = folder, run_id
        has_spec = any((folder / name).exists() for name in ("spec.yaml", SWEEP_FILE))
        self._reader = None if has_spec else reader(uri, folder.parent)

    def below(self, prefix: str) -> list[str]:
        if self._reader is not None:
            return [name for name in self._reader.artifacts(self._run_id) if name.startswith(prefix)]
        folder = self._folder / prefix
        return sorted(
            path.relative_to(self._folder).as_posix() for path in folder.rglob("*") if path.is_file()
        )

    def read(self, name: str) -> bytes:
        """The content of a file; empty where there is none."""
        if self._reader is not None:
            exists = name in self._reader.artifacts(self._run_id)
            return as_bytes(self._reader.text(self._run_id, name)) if exists else b""
        try:
            return read_beneath(self._folder, name, MOST_BYTES)
        except FileNotFoundError:
            return b""
        except OutsideError as error:
            raise problems.LINK(run=self._run_id, got=error) from error
