"""Promoting a checkpoint of a run: steps up to it are taken again, and only then it is registered under a name in MLflow's model registry."""

from __future__ import annotations

import hashlib
import math
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.calls import problems
from lockstep.calls.attestation import Attested, attest
from lockstep.calls.named_runs import NAME
from lockstep.calls.verify import verify
from lockstep.checkpoint.errors import BadCheckpointError, LostFileError
from lockstep.checkpoint.layout import step_folder
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.reader import checkpoint_at
from lockstep.checkpoint.reader import verify as verify_files
from lockstep.checkpoint.runs.pins import ALIAS, pin
from lockstep.checkpoint.runs.run_folder import RunFolder
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.driver.options import RunOptions
from lockstep.errors import SpecError, evidence_and_remedy
from lockstep.proof.recorded_run import RecordedRun, recorded_run
from lockstep.proof.step_spans import STEPS
from lockstep.proof.verification import Verified
from lockstep.record.mirror.mlflow import registry
from lockstep.record.mirror.stores import find_copies, keep_files
from lockstep.spec.fields import KeepBest
from lockstep.spec.locations import RECORD_OFF, tracking_uri

FOLDER = "attestation"
"""Where the statement is among the run's files in its store."""


@dataclass(frozen=True, slots=True)
class Promoted:
    """A checkpoint that is registered. `previous` is the version that the alias pointed to before, `statement` a file of the run in its store; None if there is none."""

    run_id: str
    step: int
    name: str
    alias: str
    version: str
    previous: str | None
    model_id: str
    verified: str
    statement: str | None
    tags: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def promote(
    run_id: str,
    target: str,
    *,
    best: bool = False,
    step: int | None = None,
    steps: int = STEPS,
    key: Path | None = None,
    uri: str | None = None,
    storage: str | Path = "runs",
    options: RunOptions | None = None,
) -> Promoted:
    """Register a checkpoint as `target`, NAME@ALIAS: the newest one, the `best` by the run's own rule, or that of `step`.

    The last `steps` steps up to it, with those since the checkpoint before, are taken again and compared first. A finished run is attested
    too, with the private `key` if one is given. SpecError where a choice is wrong, RecordError where a bit differs or MLflow refuses; the registry is then as it was.
    """
    name, alias = _parsed(target)
    store, folder = tracking_uri(uri), Path(storage).absolute()
    if store == RECORD_OFF:
        raise problems.PROMOTION_STORE()
    if best and step is not None:
        raise problems.PROMOTION_CHOICES()
    run = recorded_run(run_id, store, folder)
    chosen = _best(run) if best else _step(run, step)
    options = options or RunOptions(local=True)
    _pin(run, chosen)
    with tempfile.TemporaryDirectory(prefix="lockstep-promote-") as aside:
        manifest, facts = _checkpoint_facts(run, chosen, Path(aside))
        verified = _verified(run, chosen, steps, store, folder, options)
        statement, reason = _attested(run, key, Path(aside), store, folder)
        tags = {
            "lockstep.run": run_id,
            "lockstep.step": str(chosen),
            **facts,
            "lockstep.verified": verified,
            "lockstep.attestation": reason,
        }
        path = None
        if statement is not None:
            file = Path(statement.path)
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            path = f"{FOLDER}/{file.name}"
            keep_files(store, run_id, [file], FOLDER)
            tags |= {"lockstep.attestation": f"sha256:{digest} {path}", "lockstep.ledger": statement.chain}
            if statement.signed_by is not None:
                tags["lockstep.signed_by"] = statement.signed_by
        location = run.spec.checkpoint.storage
        checkpoint = f"{location.rstrip('/')}/{run_id}/{step_folder(chosen)}"
        local = Path(location, run_id, step_folder(chosen))
        registered = registry.promote(
            store, run_id, chosen, checkpoint, local if local.is_dir() else None, name=name, alias=alias, tags=tags,
            check=partial(_check_copy, store, run_id, chosen, manifest),
        )  # fmt: skip
    return Promoted(
        run_id, chosen, name, alias, registered.version, registered.previous, registered.model_id, verified, path, tags
    )  # fmt: skip


def _parsed(target: str) -> tuple[str, str]:
    name, _, alias = target.rpartition("@")
    if not re.fullmatch(NAME, name) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]{0,99}", alias):
        raise problems.PROMOTION_NAME(got=target)
    if re.fullmatch(r"[vV]\d+", alias) or alias.lower() == "latest":  # MLflow's own names of versions
        raise problems.PROMOTION_NAME(got=target)
    return name, alias


def _step(run: RecordedRun, step: int | None) -> int:
    available = run.checkpoints
    if step is None and available:
        return available[-1]
    if step not in available:
        shown = ", ".join(map(str, available)) or "none"
        raise problems.PROMOTION_STEP(run=run.run_id, got="any step" if step is None else step, wanted=shown)
    return step


def _best(run: RecordedRun) -> int:
    """The checkpoint with the best metric by the run's own rule, the earliest of several."""
    rule = run.spec.checkpoint.keep_best or run.spec.early_stop or KeepBest()
    values = {
        step: row.metrics[rule.metric]
        for step in run.checkpoints
        if (row := run.evaluations.get(step)) is not None and rule.metric in row.metrics
    }
    values = {step: value for step, value in values.items() if not math.isnan(value)}
    if not values:
        available = ", ".join(map(str, run.checkpoints)) or "no checkpoint"
        raise problems.PROMOTION_BEST(run=run.run_id, wanted=rule.metric, got=available)
    return min(values, key=lambda step: (rule.cost(values[step]), step))


def _pin(run: RecordedRun, step: int) -> None:
    """Keep retention away from the checkpoint.

    A promotion that fails leaves the pin, which another one of the same checkpoint may rely on: the run's next save takes away those without an alias.
    """
    with suppress(LostFileError):  # only its store has copies
        pin(RunFolder.open(open_storage(run.spec.checkpoint.storage), run.run_id), step, ALIAS)


def _check_copy(store: str, run_id: str, step: int, wanted: Manifest) -> None:
    """RecordError where what the store has of the checkpoint is not what was verified: the copy may be an older one, or the files have changed since."""
    copy = next((copy for copy in find_copies(store, run_id) if copy.step == step), None)
    if copy is None:  # it has a reference
        return
    with tempfile.TemporaryDirectory(prefix="lockstep-promote-") as folder:
        copy.download(Path(folder))
        try:
            manifest = verify_files(checkpoint_at(folder))
        except (BadCheckpointError, LostFileError) as error:
            raise problems.PROMOTION_COPY(run=run_id, step=step, got=error) from error
    if manifest != wanted:
        raise problems.PROMOTION_COPY(run=run_id, step=step, got="it has another manifest")


def _checkpoint_facts(run: RecordedRun, step: int, aside: Path) -> tuple[Manifest, dict[str, str]]:
    """The manifest of a checkpoint, whose files are all read and compared with their hashes, and its identity and digests."""
    _, loaded = run.checkpoint(step, aside)
    check, row = loaded.sections.get("check"), run.steps.get(step)
    digest = check.get("weights_digest") if isinstance(check, dict) else None
    recorded = None if row is None or row.digests is None else f"{row.digests.weights:016x}"
    if digest is not None and recorded is not None and digest != recorded:
        raise problems.PROMOTION_REFUSED(
            run=run.run_id, step=step, quantity="weights_digest", wanted=recorded, got=digest
        )  # fmt: skip
    tags = {"lockstep.identity": loaded.manifest.facts.identity}
    return loaded.manifest, tags if digest is None else {**tags, "lockstep.weights_digest": str(digest)}


def _verified(run: RecordedRun, step: int, steps: int, store: str, folder: Path, options: RunOptions) -> str:
    """What was taken again, in one line. RecordError where a bit differs.

    Behind a checkpoint in the middle of a run its next step is taken from it as well, which shows that it is the state that the run had.
    """
    first = max(run.forked_at + 1, step - steps + 1)
    spans = [(first, step - first + 1)] + ([(step + 1, 1)] if step < run.last_step else [])
    results = []
    for begin, count in spans:
        result = verify(
            run.run_id, from_step=begin, steps=count, uri=store, storage=folder, options=options,
            local=options.local, address=options.address,
        )  # fmt: skip
        if result.first_difference is not None:
            difference = result.first_difference.as_dict()
            raise problems.PROMOTION_REFUSED(
                run=run.run_id, step=difference["step"], quantity=difference["quantity"],
                wanted=difference["recorded"], got=difference["found"],
            )  # fmt: skip
        results.append(result)
    return _in_words(results)


def _in_words(results: list[Verified]) -> str:
    spans = [f"{span.start + 1} to {span.until}" for result in results for span in result.spans]
    exact = all(result.same_bits for result in results)
    tolerance = max((result.tolerance or 0.0 for result in results), default=0.0)
    return f"steps {', '.join(spans)}: " + ("every bit is equal" if exact else f"equal within {tolerance:g}")


def _attested(
    run: RecordedRun, key: Path | None, aside: Path, store: str, folder: Path
) -> tuple[Attested | None, str]:
    """The statement of the run, or None and why there is none. SpecError where the record contradicts itself, or a key was given."""
    try:
        out = aside / f"{run.run_id[:8]}.intoto.json"
        return attest(run.run_id, key=key, out=out, uri=store, storage=folder), ""
    except SpecError as error:
        if key is not None or error.code == problems.RECORD_CONTRADICTS.code:
            raise
        return None, f"none: {evidence_and_remedy(str(error))[0]}"
