"""Comparing, and mending, what is kept of a run: its journal, its ledger, its checkpoints, and its store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from lockstep.calls.lost_files import refuse_lost, weight_differences
from lockstep.checkpoint.errors import LostFileError
from lockstep.checkpoint.reader import load_newest, shared_files
from lockstep.checkpoint.runs.run_folder import RunFolder
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.errors import NoSuchRunError, RecordError, StorageError, evidence_and_remedy
from lockstep.record.events.union import Finished
from lockstep.record.ledger.history import History
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.journal_end import lost_end
from lockstep.record.ledger.journal_file import NAME as JOURNAL
from lockstep.record.ledger.tables import Rows
from lockstep.record.mirror.folder import run_in_folder, write_run
from lockstep.record.mirror.mlflow import in_mlflow, stored_values
from lockstep.record.mirror.stores import find_history, find_observations, find_run
from lockstep.record.mirror.sync import FOLDER, refuse_strangers, require_journal, spec_of, sync
from lockstep.record.problems import RUN_JSON
from lockstep.record.runs.record_differences import (
    COPIED,
    InStore,
    RecordDifference,
    check_folder,
    check_journal,
    check_ledger,
    check_seal,
    check_store,
)
from lockstep.record.runs.state_differences import State, projected_state, state_differences
from lockstep.spec.fields import Spec
from lockstep.spec.locations import RECORD_OFF


def check_record(folder: Path, uri: str | None, *, repair: bool) -> list[RecordDifference]:
    """What is not as it should be of the run in `folder`, and with `repair` what of it is mended now.

    SpecError where the folder has no journal, and with `repair` where the run was continued in another folder. RecordError where another process records the run or the store does not answer,
    and with `repair` where files are lost or changed of which nothing in the folder has the right content.
    """
    folder = folder.absolute()  # the store is told of it
    require_journal(folder)
    spec = spec_of(folder, uri)
    problems: list[RecordDifference] = []
    history = _history(spec, folder.name, problems)
    journal = Journal(folder, read_only=not repair)
    try:
        if repair:
            refuse_strangers(folder, journal, spec)
        problems += check_journal(journal, history, repair=repair)
        complete, store = not journal.missing_steps(), _store(spec, folder)
        if complete and isinstance(store, InStore):
            problems += _check_end(spec, folder, journal, store, repair=repair)
            if lost_end(journal.events, store.status, store.process):
                return problems  # the tables and the store have more than the journal
        differences = _differences(spec, folder, journal, store, is_whole=not problems)
        if repair:
            refuse_lost(spec, folder, journal, differences)
        if repair and _is_off(spec) and (not isinstance(store, InStore) or _keeps_others(differences)):
            write_run(folder, spec.name, journal)
    finally:
        journal.close()
    if not (repair and (differences or any(difference.mended for difference in problems))):
        return [*problems, *differences]
    try:
        sync(folder, uri, again=True)
    except RecordError as error:
        problems.append(RecordDifference("store", str(error)))
    journal = Journal(folder, read_only=True)
    try:
        remaining = _differences(spec, folder, journal, _store(spec, folder), is_whole=True)
    finally:
        journal.close()
    return [
        *problems,
        *(difference._replace(mended=difference not in remaining) for difference in differences),
    ]


def _is_off(spec: Spec) -> bool:
    """Whether the run is recorded in its folder alone."""
    return (spec.record.uri or RECORD_OFF) == RECORD_OFF


def _keeps_others(differences: Sequence[RecordDifference]) -> bool:
    """Whether a run.json has other parameters than it should: a store keeps those that it has."""
    return any(difference.what.startswith("run.json has another parameter") for difference in differences)


def _store(spec: Spec, folder: Path) -> InStore | RecordDifference:
    """What the store has of the run; what is wrong with its run.json where it is recorded in its folder alone."""
    if not _is_off(spec):
        return in_mlflow(spec.record.uri or "", folder.name, COPIED)
    try:
        run = run_in_folder(folder.parent, folder.name)
    except NoSuchRunError:
        raise
    except RecordError as error:
        if error.code != RUN_JSON.code:
            return RecordDifference("folder", evidence_and_remedy(str(error))[0])
        return RecordDifference("folder", f"run.json in {error.facts['folder']!r} {error.facts['got']}")
    return InStore(run["status"], {}, {}, State(run["params"], run["tags"]))


def _check_end(
    spec: Spec, folder: Path, journal: Journal, store: InStore, *, repair: bool
) -> Iterator[RecordDifference]:
    """An end that the journal has lost; `repair` adds it, and the rows before it, from the summary and the tables that were written then."""
    if not lost_end(journal.events, store.status, store.process):
        return
    if repair:
        with suppress(RecordError, StorageError):
            _add_end(spec.record.uri or RECORD_OFF, folder, journal, store)
    mended = not lost_end(journal.events, store.status, store.process)
    yield RecordDifference("journal", f"has lost the run's end: the run is {store.status}", mended)


def _add_end(uri: str, folder: Path, journal: Journal, store: InStore) -> None:
    """Nothing is added where a step before the end is lost everywhere."""
    where = uri, folder.name, folder.parent
    summary, history, observations = find_run(*where).summary, find_history(*where), find_observations(*where)
    end = Finished(summary, sorted((folder / "weights").glob("*.safetensors")))
    last = max(journal.last_step, *(row.step for row in history.steps[-1:]))
    if end.status != store.status or summary.get("step") != last:
        return
    journal.add([row for row in history.steps if not journal.has_step(row.step)])
    journal.add([row for row in history.evaluations if journal.evaluation(row.step) is None])
    journal.add([row for row in observations if not journal.has_observation(row.step)])
    if not journal.missing_steps():
        journal.add([end])


def _differences(
    spec: Spec, folder: Path, journal: Journal, store: InStore | RecordDifference, *, is_whole: bool
) -> list[RecordDifference]:
    """How the tables, the files and the store differ from the journal, and the files from their seal; a journal that is not `is_whole` is told by itself."""
    complete = not journal.missing_steps()
    unreadable = [] if isinstance(store, InStore) else [store]
    if not complete:
        return unreadable
    in_store = store if isinstance(store, InStore) else None
    of_folder = list(check_folder(folder, journal, in_store if _is_off(spec) else None, spec))
    told = {*_names(of_folder), *(() if is_whole else (JOURNAL,))}
    for check in (weight_differences(folder, journal), check_seal(folder, spec, journal)):
        more = [difference for difference in check if not told & _names([difference])]
        of_folder += more
        told |= _names(more)
    differences = [*unreadable, *check_ledger(folder, journal), *of_folder]
    if in_store is not None and not _is_off(spec):
        differences += check_store(folder, journal, in_store, scaled=spec.precision == "fp16")
    return [*differences, *(_of_state(spec, folder, journal, in_store) if in_store is not None else ())]


def _names(differences: Sequence[RecordDifference]) -> set[str]:
    """The files that differences are of."""
    return {difference.what.partition(" ")[0] for difference in differences}


def _of_state(spec: Spec, folder: Path, journal: Journal, store: InStore) -> Iterator[RecordDifference]:
    """In what the parameters and tags of a store, or of the run.json of a run that is recorded in its folder alone, are not those that its journal projects to."""
    try:
        expected = projected_state(spec, folder, journal)
    except (OSError, ValueError):
        return  # the spec.yaml, which is told by itself
    if not _is_off(spec):
        expected = State(stored_values("params", expected.params), stored_values("tags", expected.tags))
    recorded_folder = store.state.tags.get(FOLDER)
    if recorded_folder and (_is_off(spec) or Path(recorded_folder).resolve() == folder.resolve()):
        # The run.json of a folder that was moved is still that of its run, and a path may have several names.
        expected = expected._replace(tags={**expected.tags, FOLDER: recorded_folder})
    where, prefix = ("folder", "run.json ") if _is_off(spec) else ("store", "")
    for what in state_differences(store.state, expected, journal):
        yield RecordDifference(where, f"{prefix}{what}")


def _history(spec: Spec, run_id: str, differences: list[RecordDifference]) -> Rows | None:
    """The rows that the newest good checkpoint has; those that are passed over are told."""
    storage = open_storage(spec.checkpoint.storage)
    try:
        run = RunFolder.open(storage, run_id)
    except LostFileError:
        return None

    def tell(text: str) -> None:
        differences.append(RecordDifference("checkpoint", text))

    newest = load_newest(run, tell)
    if newest is None:
        return None
    return History.whole(newest.sections, shared_files(newest, tell))
