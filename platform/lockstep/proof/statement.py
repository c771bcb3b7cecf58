"""What a run is said to be, in the form of an in-toto Statement (v1): its identity, source, data, ledger, digests and weights.

A statement is made from a run's record, and compared with it by making it again. The ledger's segments form a chain: each
hash covers the one before it, so the last one covers every row.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from lockstep.errors import SpecError
from lockstep.job.identity import identity_digest
from lockstep.job.recorded_source import source_digest
from lockstep.proof.recorded_run import RecordedRun
from lockstep.record.events import EvaluationRow, StepRow
from lockstep.record.ledger import DETERMINISTIC
from lockstep.record.segments import SEGMENT_STEPS
from lockstep.training.digest import weights_digest
from lockstep.training.digests import Digester, model_digest

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "urn:lockstep-train:run:v1"
"""The type of what is said; docs/attest.md describes it."""

DIGEST_OF = {"final": "weights_digest", "ema": "ema_digest", "best": "best_digest"}
"""Which digest of a run's summary belongs to which file of weights."""


class Disagreement(NamedTuple):
    """The first thing in which a statement and a record are not the same."""

    what: str
    stated: Any
    found: Any


def statement(run: RecordedRun, summary: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The statement of a finished run whose `summary` and `folder` these are. SpecError where its weights are not there."""
    files = {
        name: folder / "weights" / f"{name}.safetensors" for name in DIGEST_OF if summary.get(DIGEST_OF[name])
    }
    for path in files.values():
        if not path.is_file():
            raise SpecError(
                f"attest: run {run.run_id} has no file {str(path)!r}; the weights that it ended with are stated"
            )
    last = run.steps[max(run.steps)].digests
    return {
        "_type": STATEMENT,
        "subject": [
            {"name": f"{run.run_id}/weights/{path.name}", "digest": {"sha256": _sha256(path.read_bytes())}}
            for path in files.values()
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
            "weights": {name: weights_digest(load_file(path)) for name, path in files.items()},
        },
    }


def plain(value: Mapping[str, Any]) -> bytes:
    """A statement as it is written and signed."""
    return json.dumps(value, sort_keys=True, indent=1, default=str).encode() + b"\n"


def parsed(payload: bytes) -> dict[str, Any]:
    """A statement that was written. SpecError where it is none of a run."""
    try:
        value = json.loads(payload)
        kinds = value["_type"], value["predicateType"]
        str(value["predicate"]["run"])
    except (ValueError, KeyError, TypeError) as error:
        raise SpecError(
            f"statement: wanted one that lockstep attest wrote; it cannot be read ({error!r})"
        ) from error
    if kinds != (STATEMENT, PREDICATE):
        raise SpecError(f"statement: got one of {kinds[1]} in {kinds[0]}, wanted {PREDICATE} in {STATEMENT}")
    return dict(value)


def disagreements(stated: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[Disagreement]:
    """In what a statement differs from the one that the record gives now."""
    yield from _differing("", json.loads(plain(stated)), json.loads(plain(found)))


def contradictions(
    run: RecordedRun, summary: Mapping[str, Any], found: Mapping[str, Any]
) -> Iterator[Disagreement]:
    """In what a record contradicts itself: its identity and source against its fields, its steps and weights against its summary and its ledger."""
    identity = identity_digest(run.fields)
    if identity != summary["identity"]:
        yield Disagreement("identity", summary["identity"], identity)
    if source_digest(run.source) != run.fields.get("job.source"):
        yield Disagreement("source", run.fields.get("job.source"), source_digest(run.source))
    every = range(min(run.steps), run.last_step + 1)
    lacking = next((step for step in every if step not in run.steps), None)
    if lacking is not None:
        yield Disagreement("ledger", f"{run.last_step} steps", f"one without step {lacking}")
    for name, digest in found["predicate"]["weights"].items():
        if digest != summary[DIGEST_OF[name]]:
            yield Disagreement(f"weights/{name}", summary[DIGEST_OF[name]], digest)


def final_weights(run: RecordedRun, folder: Path) -> Disagreement | None:
    """Whether the file of the final weights has what the ledger's last row says; None where it does, or the row has no digests."""
    row = run.steps[max(run.steps)]
    if row.digests is None:
        return None
    held = model_digest(Digester(torch.device("cpu")), load_file(folder / "weights" / "final.safetensors"))
    if held == row.digests.weights:
        return None
    return Disagreement(
        "weights/final in the ledger's last row", f"{row.digests.weights:016x}", f"{held:016x}"
    )


def _differing(where: str, stated: Any, found: Any) -> Iterator[Disagreement]:
    if isinstance(stated, dict) and isinstance(found, dict):
        for name in sorted({*stated, *found}):
            yield from _differing(f"{where}.{name}" if where else name, stated.get(name), found.get(name))
    elif isinstance(stated, list) and isinstance(found, list) and len(stated) == len(found):
        for i, pair in enumerate(zip(stated, found, strict=True)):
            yield from _differing(f"{where}[{i}]", *pair)
    elif stated != found:
        yield Disagreement(where, stated, found)


def _chain(steps: Mapping[int, StepRow]) -> Iterator[dict[str, Any]]:
    """The ledger's segments: their steps, and a hash over the hash before and their deterministic columns."""
    before = ""
    for _, numbers in groupby(sorted(steps), key=lambda step: (step - 1) // SEGMENT_STEPS):
        rows = [steps[number] for number in numbers]
        before = _sha256((before + "".join(map(_step, rows))).encode())
        yield {"first": rows[0].step, "last": rows[-1].step, "sha256": before}


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
    return [_bits(one) for one in value] if isinstance(value, list | tuple) else value


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
