"""What the record of a finished run says beside its steps, checked without training anything: its files against their seal, its folder against its journal, and
what follows from the spec and the identity against these.

What nothing proves is named in `TOLD`: facts of the machine, times, and what was noted on the way. A seal keeps them from being changed alone, and a signed
statement from being changed at all after it was signed; that they were true when they were written is the word of who recorded the run.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError, first_line
from lockstep.job.identity import DELAY, deciding_sections, forked_step
from lockstep.parsing import MOST_BYTES, json_document
from lockstep.paths import read_beneath
from lockstep.proof.recorded_run import RecordedRun
from lockstep.proof.summary_checks import DIGEST_OF, Disagreement
from lockstep.randomness import seeds
from lockstep.record.events.union import Delivered, InputsFound, Opened, Recorded, SetAside, Started
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.journal_file import NAME as JOURNAL
from lockstep.record.mirror.folder import run_in_folder
from lockstep.record.mirror.projection import Projection
from lockstep.record.mirror.seal import SEAL, Sealed, broken, sealed_files
from lockstep.record.mirror.stores import find_files
from lockstep.record.redaction import redacted_fields
from lockstep.record.runs.record_differences import check_folder, check_ledger
from lockstep.record.runs.state_differences import is_placement, projected_state
from lockstep.spec.fields import PLACEMENT, PLACEMENT_FIELDS, Spec
from lockstep.spec.id_ranges import described
from lockstep.spec.locations import RECORD_OFF

TOLD: Mapping[str, Sequence[str]] = {
    "spec.yaml": (*sorted(PLACEMENT), *(f"{section}.{name}" for section, name in PLACEMENT_FIELDS.items())),
    "environment.json": ("*",),
    "summary.json": ("workers", "checkpoint", "unsaved", "signal", "reused_from", "tested_at", "first_step_at", "steps_per_s", "samples_per_s", "data_wait_share"),
    "ledger.parquet": ("data_wait_s", "step_s", "wall_clock", "attempt"),
    "evaluations.parquet": ("seconds", "wall_clock"),
    "observations.parquet": ("*",),
    "run.json": ("name", "status", "started", "params of placement", "tags of its recorder"),
    "journal.jsonl": ("all but steps, evaluations, identity, seeds and result",),
    **dict.fromkeys((
        "git.diff", "log.txt", "logs/*", "memory.json", "precision.json", "compile.json", "attempts.json", "diagnosis.json", "alerts.json",
        "figures/*", "evaluations/*", "model/*", "memory-*", "not-finite.json", "stacks-*", "error.txt",
    ), ("*",)),
}  # fmt: skip
"""What of each document, by a pattern of its name, is told and not proven; `*` is all of it."""

_WEIGHTS = "weights"

_DELIVERY = (Opened, SetAside, Delivered)
"""What a recorder may add to the journal of a run that has finished."""

_OF_IDENTITY = {
    "python": "version.python",
    "lockstep": "version.lockstep-train",
    "torch": "version.torch",
    "numpy": "version.numpy",
    "threads": "setting.torch.set_num_threads",
    "deterministic_algorithms": "setting.torch.use_deterministic_algorithms",
    "cudnn_benchmark": "setting.torch.backends.cudnn.benchmark",
    "MKL_CBWR": "setting.MKL_CBWR",
}
"""The facts of an environment that are fields of the identity too."""

_PROVEN_OF_SUMMARY = (
    "identity", "step", "epoch", "samples", "skipped", "stopped", "metrics", "weights_digest", "ema_digest", "best_digest", "best_step", "beside",
    "test", "tested", "tested_step",
)  # fmt: skip
"""What of a summary follows from the steps, or from how the run ended."""

_FROM_ELSEWHERE = {"initial_weights", "fork", DELAY}
"""Fields of a spec of which the identity has something else: what lies there, and the delay only where it decides."""

_TOLD_TAGS = {"lockstep.note", "lockstep.record_error", "lockstep.folder", "lockstep.job"}
"""Tags that are for people, or say where the run was recorded."""


def told_of(run: RecordedRun, aside: Path) -> dict[str, Sequence[str]]:
    """What of a finished run's record is told and not proven, by the documents that it has; of one without a seal, whichever it may have."""
    if not run.ended:
        return {}  # nothing but its steps is compared
    told = dict(TOLD)
    with suppress(OSError, ValueError):
        folder, sealed = documents_of(run, aside)
        if sealed is not None:
            names = [*sealed, *(["run.json"] if (folder / "run.json").exists() else [])]
            told = {name: fields for name, fields in TOLD.items() if any(fnmatch(n, name) for n in names)}
    if origin := [name for name, value in _origin(run.spec) if value is not None]:
        # The identity has the digest of what lay there.
        told["spec.yaml"] = (*told.get("spec.yaml", ()), *origin)
    if hidden := redacted_fields(run.fields):
        # The digest of the fields can be computed only with the secrets.
        told["fields.json"] = (*hidden, "and with them the identity")
    return told


def _origin(spec: Spec) -> Iterator[tuple[str, str | None]]:
    """Where a run's first state was taken from, by the names of the fields."""
    yield "initial_weights", spec.initial_weights
    if spec.fork is not None:
        yield "fork.run", spec.fork.run
        yield "fork.storage", spec.fork.storage


def documents_of(run: RecordedRun, aside: Path) -> tuple[Path, dict[str, Sealed] | None]:
    """The folder with the documents of a run, and its seal, or None where it has none. Documents that are in its store alone are copied into `aside`."""
    folder = run.own_folder
    if folder is None or not (folder / "spec.yaml").is_file():
        folder = aside / "documents"
        folder.mkdir(exist_ok=True)
        uri, nowhere = run.spec.record.uri or RECORD_OFF, aside / "nowhere"
        find_files(uri, run.run_id, (SEAL,), nowhere, folder)
        if (folder / SEAL).is_file():
            names = dict.fromkeys(name.partition("/")[0] for name in in_store(sealed_files(folder)))
            find_files(uri, run.run_id, [*names], nowhere, folder)
    try:
        return folder, sealed_files(folder)
    except FileNotFoundError:
        return folder, None


def in_store(sealed: Mapping[str, Sealed]) -> dict[str, Sealed]:
    """The sealed documents that a store has as they are: no journal, the model in another form, and weights, which may be large, by themselves."""
    return {
        name: file
        for name, file in sealed.items()
        if name != JOURNAL and not name.startswith(("model/", f"{_WEIGHTS}/"))
    }


def weights_folders(run: RecordedRun, aside: Path) -> tuple[list[Path], str]:
    """The folders with weights of a finished run, and why some could not be looked at, or nothing.

    Those of a run whose folder is gone are copied from its store into `aside`: beside its documents, so that their seal covers them as well.
    """
    uri = run.spec.record.uri or RECORD_OFF
    owner = str(run.summary.get("reused_from") or run.run_id)
    documents = aside / "documents"
    copies = {owner: (run.folder, aside / "reused"), run.run_id: (run.own_folder, documents)}
    folders, failure = [], ""
    for run_id, (folder, copy) in copies.items():
        if folder is not None:
            folders.append(folder)
            if uri == RECORD_OFF or (folder / "spec.yaml").is_file():
                continue
        # It stays empty where the store has none, and the seal tells what is lacking.
        (copy / _WEIGHTS).mkdir(parents=True, exist_ok=True)
        try:
            find_files(uri, run_id, (_WEIGHTS,), aside / "nowhere", copy)
        except (LockstepError, OSError) as error:
            shutil.rmtree(copy / _WEIGHTS, ignore_errors=True)
            failure = first_line(error)
        else:
            folders.append(copy)
    return folders, failure


def record_disagreements(run: RecordedRun, aside: Path) -> Iterator[Disagreement]:
    """In what the record of a finished run is not as it was written, or contradicts itself; nothing for a run that has not finished."""
    if not run.ended:
        return
    try:
        folder, sealed = documents_of(run, aside)
    except (OSError, ValueError) as error:
        yield Disagreement(SEAL, "the seal of a finished run", str(error))
        return
    if sealed is None:
        yield Disagreement(SEAL, "the seal of a finished run", None)
        return
    if JOURNAL not in sealed:
        yield Disagreement(JOURNAL, "sealed", None)
    if folder != run.own_folder:
        weights = {name: file for name, file in sealed.items() if name.startswith(f"{_WEIGHTS}/")}
        sealed = in_store(sealed) | (weights if (folder / _WEIGHTS).is_dir() else {})
    for name, stated, found in broken(folder, sealed):
        yield Disagreement(name, stated, found)
    yield from _of_spec(run, folder)
    if (folder / JOURNAL).is_file():
        yield from _of_journal(run, folder, sealed.get(JOURNAL))


def _of_spec(run: RecordedRun, folder: Path) -> Iterator[Disagreement]:
    """In what documents are not what the spec, the identity and the end of the run make them."""
    if run.summary.get("stopped"):
        yield Disagreement("stopped of the summary", run.summary["stopped"], False)
    for name in sorted(run.summary.keys() - {*_PROVEN_OF_SUMMARY, *TOLD["summary.json"]}):
        yield Disagreement(f"{name} of the summary", run.summary[name], None)
    for name in sorted((run.summary.get("beside") or {}).keys() - DIGEST_OF.keys()):
        yield Disagreement(f"beside.{name} of the summary", run.summary["beside"][name], None)
    for name, tree in deciding_sections(run.spec).items():
        if name not in _FROM_ELSEWHERE and run.fields and run.fields.get(name, tree) != tree:
            yield Disagreement(f"spec.yaml: {name}", tree, run.fields.get(name))
    yield from _of_fork(run)
    for document, expected in {"seeds.json": _seeds(run), "without.json": [_left_out(run)]}.items():
        if (recorded := _document(folder, document)) not in expected:
            yield Disagreement(document, recorded, expected[0])
    environment = _document(folder, "environment.json")
    for name, field in _OF_IDENTITY.items():
        if field in run.fields and environment.get(name) != run.fields[field]:
            yield Disagreement(f"environment.json: {name}", environment.get(name), run.fields[field])


def _of_fork(run: RecordedRun) -> Iterator[Disagreement]:
    """In what the spec says otherwise than the identity from where a fork goes on."""
    parent = str(run.fields.get("fork") or "")
    fork, step = run.spec.fork, forked_step(run.fields)
    stated = (fork is not None, fork is not None and fork.exact)
    if run.fields and stated != (bool(parent), parent.endswith(" exact")):
        yield Disagreement("spec.yaml: fork", fork and fork.model_dump(), parent)
    elif fork is not None and fork.step not in (None, step):
        yield Disagreement("spec.yaml: fork.step", fork.step, step)


def _seeds(run: RecordedRun) -> list[dict[str, str]]:
    """What the seeds of a run may be: which of them it has follows from the job's methods, which nobody has called here."""
    return [
        seeds(run.spec.seed, phases=phases, frozen=frozen)
        for phases, frozen in product((False, True), repeat=2)
    ]


def _left_out(run: RecordedRun) -> dict[str, str]:
    without = run.spec.data.without
    return {} if without is None else {"what": described(without), "ids": without}


def _document(folder: Path, name: str) -> dict[str, Any]:
    try:
        return json_document(read_beneath(folder, name, MOST_BYTES))
    except (OSError, ValueError):
        return {}


def _of_journal(run: RecordedRun, folder: Path, sealed: Sealed | None) -> Iterator[Disagreement]:
    """In what the folder is not what the run's journal makes of it."""
    try:
        with closing(Journal(folder, read_only=True)) as journal:
            for damage in journal.damage:
                yield Disagreement(
                    JOURNAL, "whole lines", f"a damaged one at byte {damage.start}: {damage.content}"
                )
            for entry in journal.read(sealed.bytes) if sealed is not None else ():
                if not isinstance(entry.event, _DELIVERY):
                    yield Disagreement(
                        JOURNAL, "nothing of the run after its end", type(entry.event).__name__
                    )
            begun_as = [identity for event in journal.events if (identity := _identity(event)) is not None]
            if begun_as[-1:] != [run.summary.get("identity")]:
                yield Disagreement(f"{JOURNAL}: identity", begun_as[-1:], [run.summary.get("identity")])
            for difference in (
                *check_ledger(folder, journal),
                *check_folder(folder, journal, None, run.spec),
            ):
                name, _, how = difference.what.partition(" ")
                yield Disagreement(name, "what the journal has", how)
            if (folder / "run.json").is_file():
                yield from _of_store(run, folder, journal)
    except LockstepError as error:
        yield Disagreement(JOURNAL, "a journal that can be read", str(error))


def _identity(event: Recorded) -> Any:
    """The identity that an event gives a run; None for most."""
    match event:
        case Started():
            return event.facts.get("identity")
        case InputsFound():
            return event.identity
    return None


def _of_store(run: RecordedRun, folder: Path, journal: Journal) -> Iterator[Disagreement]:
    """In what a run.json is not what the run's spec and journal make of it."""
    state = run_in_folder(folder.parent, folder.name)
    expected, tags = projected_state(run.spec, folder, journal), state["tags"]
    params = expected.params
    others = {name for name in state["params"] if not is_placement(name, run.fields)}
    for name in sorted({*params, *others}):
        if params.get(name) != state["params"].get(name):
            yield Disagreement(f"run.json: params.{name}", params.get(name), state["params"].get(name))
    for name in sorted(expected.tags.keys() - _TOLD_TAGS):
        if tags.get(name) != expected.tags[name]:
            yield Disagreement(f"run.json: tags.{name}", expected.tags[name], tags.get(name))
    projection = Projection(run.spec, folder, journal)
    projection.fold(journal.events)
    status, ended = projection.end[:2] if projection.end is not None else (None, None)
    if state["status"] != status or ended not in (None, state["ended"]):
        yield Disagreement("run.json: its end", [status, ended], [state["status"], state["ended"]])
