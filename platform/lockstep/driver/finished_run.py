"""Whether a run that its store calls finished is one: what its ledger and weights say, and no tag or status, which anyone may write."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.driver import problems
from lockstep.errors import LockstepError
from lockstep.job.inputs.external_facts import MOVED, UNKNOWN, changed_facts
from lockstep.parsing import MOST_BYTES, json_document
from lockstep.paths import read_bounded
from lockstep.proof.summary_checks import (
    DIGEST_OF,
    Disagreement,
    file_disagreements,
    identity_disagreement,
    lacking_digests,
    metric_disagreements,
    plan_of,
)
from lockstep.record.ledger.tables import Rows, read_history
from lockstep.record.mirror.run_store import StoredRun
from lockstep.record.mirror.stores import find_files, find_finished
from lockstep.spec.loading import load_spec

_FILES = ("ledger.parquet", "evaluations.parquet", "fields.json")
_WEIGHTS = "weights"
_ENVIRONMENT = "environment.json"


def find_proven(
    uri: str,
    identity: str,
    folder: Path,
    plan: Mapping[str, Any],
    *,
    early_stop: bool,
    environment: Mapping[str, Any] | None = None,
) -> StoredRun | None:
    """The newest finished run of this identity whose record bears it out, or None.

    `plan` and `environment` are those of the run which it is to stand for. A run that took something else from outside does not, nor one of which
    nothing tells what it took.
    """
    for candidate in find_finished(uri, identity, folder):
        steps = None if early_stop else plan.get("total_steps")
        if candidate.summary.get("identity") != identity or doubt(candidate, uri, folder, steps):
            continue
        if environment is None or _took_the_same(candidate, uri, folder, environment):
            return candidate
    return None


def _took_the_same(stored_run: StoredRun, uri: str, folder: Path, environment: Mapping[str, Any]) -> bool:
    """Whether a run read the same from outside as one with this environment does, as far as both record it."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            find_files(uri, stored_run.run_id, (_ENVIRONMENT,), folder, Path(scratch))
            recorded = json_document(read_bounded(Path(scratch) / _ENVIRONMENT, MOST_BYTES))
        except (LockstepError, OSError, ValueError):
            return False
    unknown = recorded.get(UNKNOWN) or environment.get(UNKNOWN)
    return not unknown and not changed_facts(recorded.get(MOVED) or {}, environment.get(MOVED) or {})


def doubt(stored_run: StoredRun, uri: str, folder: Path, steps: int | None = None) -> str:
    """Why a run does not count as finished; empty if its record bears it out.

    Its ledger has every step up to the one that the summary says, which is `steps` where given, and the evaluation and metrics that the
    summary has; the final weights have the digest of the summary and that of the ledger's last row, which has one where its spec wants
    one; the identity is that of its fields. One that another run stands for has that one's weights.
    """
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        try:
            find_files(uri, stored_run.run_id, _FILES, folder, scratch)
            owner = str(stored_run.summary.get("reused_from") or stored_run.run_id)
            find_files(uri, owner, (_WEIGHTS,), folder, scratch)
            return _doubt(stored_run, scratch, steps)
        except (LockstepError, OSError, ValueError, TypeError) as error:
            return f"its record cannot be read: {error}"


def refuse_doubtful(stored_run: StoredRun, uri: str, folder: Path) -> None:
    """RecordError where a run that is called finished is not borne out by its record."""
    if reason := doubt(stored_run, uri, folder):
        raise problems.DOUBTFUL(run=stored_run.run_id, got=reason)


def _doubt(stored_run: StoredRun, folder: Path, steps: int | None) -> str:
    summary, history = stored_run.summary, read_history(folder)
    last = summary.get("step")
    numbers = [row.step for row in history.steps]
    if not numbers or numbers != list(range(numbers[0], numbers[0] + len(numbers))) or numbers[-1] != last:
        return f"its ledger has not the steps up to {last}"
    if steps is not None and last != steps:
        return f"it ended after step {last} of {steps}"
    fields = json_document(read_bounded(folder / "fields.json", MOST_BYTES))
    wrong = _doubt_of_end(stored_run, history, fields, folder) or identity_disagreement(summary, fields)
    return "" if wrong is None else f"{wrong.what} is {wrong.stated} and was found as {wrong.found}"


def _doubt_of_end(
    stored_run: StoredRun, history: Rows, fields: Mapping[str, Any], folder: Path
) -> Disagreement | None:
    """The first thing in which its summary, its last rows and its weights are not the same."""
    spec, row = load_spec(stored_run.spec), history.steps[-1]
    plan = plan_of(spec, fields)
    if not stored_run.summary.get("reused_from") and plan is not None:
        lacks = lacking_digests(spec, plan, row)
        if lacks is not None:
            return Disagreement("the ledger's last row", f"one with {lacks}", "one without them")
    rows = (
        {entry.step: entry for entry in history.steps},
        {entry.step: entry for entry in history.evaluations},
    )
    weights = folder / "weights" / "final.safetensors"
    if not stored_run.summary.get(DIGEST_OF["final"]) or not weights.is_file():
        return Disagreement("the final weights", "there, with their digest in the summary", None)
    return next(
        metric_disagreements(stored_run.summary, *rows, fields, forked=spec.fork is not None), None
    ) or next(file_disagreements(stored_run.summary, folder, row), None)
