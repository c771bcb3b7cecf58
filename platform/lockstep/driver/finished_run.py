"""Whether a run that its store calls finished is one: what its ledger and weights say, and no tag or status, which anyone may write."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from lockstep.errors import LockstepError, RecordError
from lockstep.job.identity import identity_digest
from lockstep.record.ledger import read_history
from lockstep.record.redaction import redacted_fields
from lockstep.record.run_store import Recorded
from lockstep.record.stores import find_files, find_finished
from lockstep.training.digest import weights_digest
from lockstep.training.digests import Digester, model_digest

_FILES = ("ledger.parquet", "evaluations.parquet", "fields.json")
_WEIGHTS = "weights"


def find_proven(
    uri: str, identity: str, folder: Path, plan: Mapping[str, Any], *, early_stop: bool
) -> Recorded | None:
    """The newest finished run of this identity whose record bears it out, or None. `plan` is that of the run which it is to stand for."""
    for found in find_finished(uri, identity, folder):
        steps = None if early_stop else plan.get("total_steps")
        if found.summary.get("identity") == identity and not doubt(found, uri, folder, steps):
            return found
    return None


def doubt(found: Recorded, uri: str, folder: Path, steps: int | None = None) -> str:
    """Why a run cannot be taken for finished; nothing where its record bears it out.

    Its ledger has every step up to the one that the summary says, which is `steps` where given; the final weights have the digest of
    the summary and that of the ledger's last row; the identity is that of its fields. One that another run stands for has that one's weights.
    """
    with tempfile.TemporaryDirectory() as place:
        here = Path(place)
        try:
            find_files(uri, found.run_id, _FILES, folder, here)
            owner = str(found.summary.get("reused_from") or found.run_id)
            find_files(uri, owner, (_WEIGHTS,), folder, here)
            return _doubt(found.summary, here, steps)
        except (LockstepError, OSError, ValueError, TypeError, safetensors.SafetensorError) as error:
            return f"its record cannot be read: {error}"


def refuse_doubtful(found: Recorded, uri: str, folder: Path) -> None:
    """RecordError where a run that is called finished is not borne out by its record."""
    if reason := doubt(found, uri, folder):
        raise RecordError(
            f"run {found.run_id} is marked as finished, but {reason}; look at it with `lockstep record check {found.run_id}`, "
            "and do not trust what it says"
        )


def _doubt(summary: Mapping[str, Any], here: Path, steps: int | None) -> str:
    history = read_history(here)
    last = summary.get("step")
    numbers = [row.step for row in history.steps]
    if not numbers or numbers != list(range(numbers[0], numbers[0] + len(numbers))) or numbers[-1] != last:
        return f"its ledger has not the steps up to {last}"
    if steps is not None and last != steps:
        return f"it ended after step {last} of {steps}"
    state = safetensors.torch.load_file(here / _WEIGHTS / "final.safetensors")
    if weights_digest(state) != summary.get("weights_digest"):
        return "its weights have another digest than its summary says"
    digests = history.steps[-1].digests
    if digests is not None and digests.weights != model_digest(Digester(torch.device("cpu")), state):
        return "its weights are not those of the last row of its ledger"
    return _doubt_of_identity(summary, here / "fields.json")


def _doubt_of_identity(summary: Mapping[str, Any], path: Path) -> str:
    fields = json.loads(path.read_text(encoding="utf-8"))
    if redacted_fields(fields) or identity_digest(fields) == summary.get("identity"):
        return ""
    return "its fields have another identity than its summary says"
