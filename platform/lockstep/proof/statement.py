"""What a run is said to be, in the form of an in-toto Statement (v1): its identity, source, data, ledger, digests and weights.

A statement is made from a run's record, and compared with it by making it again. The ledger's segments form a chain: each
hash covers the one before it, so the last one covers every row.
"""

from __future__ import annotations

import hashlib
import json
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from lockstep.job.inputs.imports import recorded_beside
from lockstep.job.recorded_source import source_digest
from lockstep.parsing import json_document, one_line
from lockstep.paths import component, shown
from lockstep.proof import problems
from lockstep.proof.record_checks import record_disagreements
from lockstep.proof.recorded_run import RecordedRun
from lockstep.proof.summary_checks import (
    DIGEST_OF,
    Disagreement,
    file_disagreements,
    files_beside,
    identity_disagreement,
    lacking_digests,
    metric_disagreements,
    plan_of,
    read_weights,
    same_in_json,
)
from lockstep.record.ledger.rows import VERSION, EvaluationRow, StepRow
from lockstep.record.ledger.segments import SEGMENT_STEPS
from lockstep.record.ledger.tables import DETERMINISTIC
from lockstep.record.mirror.seal import Sealed, sealed_files
from lockstep.training.auxiliary_state import beside_path, load_beside
from lockstep.training.integrity.state_digest import tree_digest, weights_digest

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = f"urn:lockstep-train:run:v{VERSION}"
"""The type of what is said; docs/attest.md describes it."""


def statement(run: RecordedRun, summary: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The statement of a finished run whose `summary` and `folder` these are. SpecError where its weights are not there, StorageError where they cannot be read."""
    files = {
        name: folder / "weights" / f"{name}.safetensors" for name in DIGEST_OF if summary.get(DIGEST_OF[name])
    }
    beside_files = files_beside(summary, folder)
    for path in [*files.values(), *map(beside_path, beside_files.values())]:
        if not path.is_file():
            raise problems.NO_WEIGHTS(run=run.run_id, file=path)
    last = run.steps[max(run.steps)].digests
    return {
        "_type": STATEMENT,
        "subject": [
            {"name": f"{run.run_id}/weights/{path.name}", "digest": {"sha256": _sha256(path.read_bytes())}}
            for path in [*files.values(), *map(beside_path, beside_files.values())]
        ],
        "predicateType": PREDICATE,
        "predicate": {
            "run": run.run_id,
            "identity": summary["identity"],
            "fields": dict(run.fields),
            "source": {path: _sha256(content) for path, content in sorted(run.source.items())},
            "data": {name: value for name, value in run.fields.items() if name.startswith("data.")},
            "ledger": {
                "steps": len(run.steps),
                "last": max(run.steps),
                "segments": list(_chain(run.steps)),
                "evaluations": _sha256("".join(map(_evaluation, sorted(run.evaluations.values()))).encode()),
            },
            "digests": None
            if last is None
            else {
                name: f"{value:016x}"
                for name, value in (
                    ("weights", last.weights),
                    ("optimizer", last.optimizer),
                    ("ema", last.average),
                )
                if value is not None
            },
            "files": {name: asdict(file) for name, file in _sealed(run).items()},
            "weights": {name: weights_digest(read_weights(path)) for name, path in files.items()},
            **(
                {"beside": {name: tree_digest(load_beside(path)) for name, path in beside_files.items()}}
                if beside_files
                else {}
            ),
        },
    }


def _sealed(run: RecordedRun) -> dict[str, Sealed]:
    """The seal of a run's folder; nothing where it has none, which is a contradiction."""
    try:
        return sealed_files(run.own_folder) if run.own_folder is not None else {}
    except (OSError, ValueError):
        return {}


def plain(value: Mapping[str, Any]) -> bytes:
    """A statement as it is written and signed."""
    return json.dumps(value, sort_keys=True, indent=1, default=str).encode() + b"\n"


def parsed(payload: bytes) -> dict[str, Any]:
    """A statement that was written. SpecError where it is none of a run."""
    try:
        value = json_document(payload)
        kinds = value["_type"], value["predicateType"]
        component(value["predicate"]["run"])
    except (ValueError, KeyError, TypeError) as error:
        raise problems.NO_STATEMENT(got=f"{type(error).__name__}: {one_line(error)}") from error
    if kinds != (STATEMENT, PREDICATE):
        raise problems.OTHER_KIND(
            got=f"{shown(kinds[1])} in {shown(kinds[0])}", wanted=f"{PREDICATE} in {STATEMENT}"
        )
    return dict(value)


def disagreements(stated: Mapping[str, Any], recomputed: Mapping[str, Any]) -> Iterator[Disagreement]:
    """In what a statement differs from the one that the record gives now (`recomputed`)."""
    yield from _differing("", json.loads(plain(stated)), json.loads(plain(recomputed)))


def contradictions(run: RecordedRun, summary: Mapping[str, Any], folder: Path) -> Iterator[Disagreement]:
    """In what a record contradicts itself: its identity and source against its fields, its rows, summary and weights against each other, its files against its seal and journal."""
    if wrong := identity_disagreement(summary, run.fields):
        yield wrong
    beside_digests = recorded_beside(run.fields)
    source = source_digest(
        {path: content for path, content in run.source.items() if path not in beside_digests}
    )
    if source != run.fields.get("job.source"):
        yield Disagreement("source", run.fields.get("job.source"), source)
    for path, digest in beside_digests.items():
        actual = hashlib.sha256(run.source[path]).hexdigest() if path in run.source else None
        if actual != digest:
            yield Disagreement(f"source/{path}", digest, actual)
    yield from _rows(run)
    yield from metric_disagreements(
        summary, run.steps, run.evaluations, run.fields, forked=run.spec.fork is not None
    )
    yield from file_disagreements(summary, folder, run.steps[max(run.steps)])
    with tempfile.TemporaryDirectory(prefix="lockstep-attest-") as aside:
        yield from record_disagreements(run, Path(aside))


def _rows(run: RecordedRun) -> Iterator[Disagreement]:
    """In what the rows are not those of the steps that the run took, or lack the digests that they have to have."""
    every = range(run.forked_at + 1, (run.ended or run.last_step) + 1)
    lacking = next((step for step in every if step not in run.steps), None)
    if lacking is not None:
        yield Disagreement("ledger", f"{every.stop - 1} steps", f"one without step {lacking}")
    for table, steps in {"ledger": run.steps, "evaluations": run.evaluations}.items():
        outside = next((step for step in sorted(steps) if step not in every), None)
        if outside is not None:
            yield Disagreement(
                table, f"of steps {every.start} to {every.stop - 1}", f"one with step {outside}"
            )
    plan, attempt = plan_of(run.spec, run.fields), run.placed_alike
    if plan is None:
        return
    for step in sorted(run.steps):
        row = run.steps[step]
        if row.attempt == attempt and (lacks := lacking_digests(run.spec, plan, row)) is not None:
            yield Disagreement(
                "ledger", f"one whose row of step {step} has {lacks}", "one whose row has none"
            )
            return


def _differing(where: str, stated: Any, recomputed: Any) -> Iterator[Disagreement]:
    if isinstance(stated, dict) and isinstance(recomputed, dict):
        for name in sorted({*stated, *recomputed}):
            yield from _differing(
                f"{where}.{name}" if where else name, stated.get(name), recomputed.get(name)
            )
    elif isinstance(stated, list) and isinstance(recomputed, list) and len(stated) == len(recomputed):
        for i, pair in enumerate(zip(stated, recomputed, strict=True)):
            yield from _differing(f"{where}[{i}]", *pair)
    elif not same_in_json(stated, recomputed):
        yield Disagreement(where, stated, recomputed)


def _chain(steps: Mapping[int, StepRow]) -> Iterator[dict[str, Any]]:
    """The ledger's segments: their steps, and a hash over the hash before and their deterministic columns."""
    digest = ""
    for _, numbers in groupby(sorted(steps), key=lambda step: (step - 1) // SEGMENT_STEPS):
        rows = [steps[number] for number in numbers]
        digest = _sha256((digest + "".join(map(_step, rows))).encode())
        yield {"first": rows[0].step, "last": rows[-1].step, "sha256": digest}


def _step(row: StepRow) -> str:
    return _line([getattr(row, name) for name in DETERMINISTIC])


def _evaluation(row: EvaluationRow) -> str:
    return _line([row.step, row.epoch, row.metrics])


def _line(values: Sequence[Any]) -> str:
    return json.dumps(_bits(values)) + "\n"


def _bits(value: Any) -> Any:
    """A value with its floats as 16 hexadecimal digits, NaN with its payload."""
    if isinstance(value, float):
        return struct.pack(">d", value).hex()
    if isinstance(value, Mapping):
        return {name: _bits(value[name]) for name in sorted(value)}
    return [_bits(item) for item in value] if isinstance(value, list | tuple) else value


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
