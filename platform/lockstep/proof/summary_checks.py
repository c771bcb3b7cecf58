"""What a run's summary states, checked against its own rows and files without training anything."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from lockstep.errors import StorageError, first_line
from lockstep.job.identity import identity_digest
from lockstep.plan import Plan
from lockstep.proof import problems
from lockstep.record.ledger.rows import EvaluationRow, StepRow
from lockstep.record.redaction import redacted_fields
from lockstep.spec.fields import Spec
from lockstep.training.auxiliary_state import beside_path, load_beside
from lockstep.training.integrity.digests import Digester, model_digest
from lockstep.training.integrity.state_digest import tree_digest, weights_digest
from lockstep.training.integrity.step_digests import digest_is_due
from lockstep.training.weights import read_tensors

DIGEST_OF = {"final": "weights_digest", "ema": "ema_digest", "best": "best_digest"}
"""Which digest of a run's summary belongs to which file of weights."""

_UNSTATED = "no digest"
"""Stands in a disagreement for the digest of a file that is there though the summary has none: whoever reads the file would take it for the run's."""


class Disagreement(NamedTuple):
    """A value on which two parts of a record disagree: `stated` in one, `found` in the other."""

    what: str
    stated: Any
    found: Any


class _Counted:
    """Micro-batches that tokens bound, of which only the number is known: enough for steps and epochs, and not for how many samples they have."""

    fields: Mapping[str, Any] = {}
    longest = 1

    def __init__(self, count: Any) -> None:
        self.count = count if isinstance(count, int) else 0

    def bounds(self, epoch: int) -> range:
        return range(self.count + 1)

    def order(self, epoch: int, whole: int) -> Any:
        raise NotImplementedError  # no sample is fetched

    def largest(self) -> list[Any]:
        raise NotImplementedError


def plan_of(spec: Spec, fields: Mapping[str, Any]) -> Plan | None:
    """The plan of a run whose identity has these fields; None where they do not tell how many samples it trained on."""
    samples = fields.get("data.train_samples")
    if not isinstance(samples, int):
        return None
    batch, length = spec.batch, spec.length
    try:
        return Plan.of(
            samples,
            batch.sizes,
            batch.micro,
            drop_last=spec.data.drop_last,
            epochs=length.epochs,
            steps=length.steps,
            group=spec.data.group_size,
            tokens=batch.tokens,
            by_length=_Counted(fields.get("data.train.token_batches")),
        )
    except ValueError:
        return None


def lacking_digests(spec: Spec, plan: Plan, row: StepRow) -> str | None:
    """Which digests a row lacks that it has to have by the spec; None where it lacks none, or the spec is older than digests."""
    digests = row.digests
    if digests is None:
        configured = "digest_every" in spec.record.model_fields_set
        return (
            "digests"
            if configured and digest_is_due(spec, plan.position(row.step - 1), plan.total_steps)
            else None
        )
    if digests.gradients is None and spec.reduction == "exact":
        return "gradient_digests"
    return "ema_digest" if digests.average is None and spec.ema is not None else None


def metric_disagreements(
    summary: Mapping[str, Any],
    steps: Mapping[int, StepRow],
    evaluations: Mapping[int, EvaluationRow],
    fields: Mapping[str, Any],
    *,
    forked: bool,
) -> Iterator[Disagreement]:
    """In what a summary's metrics are not the newest ones of the rows, or an evaluation of the last step is not there.

    A fork also has metrics of the run that was forked, which its own rows need not have.
    """
    stated = summary.get("metrics") or {}
    last = max(steps)
    evaluated = any(name.startswith("eval/") for name in stated) and fields.get("data.eval_samples") != 0
    if evaluated and last not in evaluations:
        newest_of = f"after step {max(evaluations)}" if evaluations else "none"
        yield Disagreement("the last evaluation", f"after step {last}", newest_of)
    newest: dict[str, float] = {}
    for step in sorted(steps):
        row = steps[step]
        newest |= {"train/loss": row.loss, **{f"train/{name}": value for name, value in row.parts.items()}}
    for step in sorted(evaluations):
        newest |= evaluations[step].metrics
    for name in sorted({*stated, *newest} if stated else ()):
        if forked and name not in newest:
            continue
        if not same_in_json(stated.get(name), newest.get(name)):
            yield Disagreement(f"{name} of the summary", stated.get(name), newest.get(name))


def file_disagreements(
    summary: Mapping[str, Any], folder: Path, last: StepRow | None
) -> Iterator[Disagreement]:
    """In what the files of weights in a run's `folder`, as far as they are there, are not what its summary and its last row say."""
    for name, key in DIGEST_OF.items():
        path = folder / "weights" / f"{name}.safetensors"
        if not path.is_file():
            continue
        stated = summary.get(key) or _UNSTATED
        try:
            state = read_weights(path)
        except StorageError as error:
            yield Disagreement(f"weights/{path.name}", stated, str(error))
            continue
        if (digest := weights_digest(state)) != stated:
            yield Disagreement(f"weights/{path.name}", stated, digest)
        if name == "final" and last is not None and last.digests is not None:
            actual = model_digest(Digester(torch.device("cpu")), state)
            if actual != last.digests.weights:
                yield Disagreement(
                    f"weights/{path.name} in the ledger's last row",
                    f"{last.digests.weights:016x}",
                    f"{actual:016x}",
                )
    yield from _beside_disagreements(summary, folder)


def files_beside(summary: Mapping[str, Any], folder: Path) -> dict[str, Path]:
    """The files of weights in a run's `folder` with something beside them, by their names in the summary."""
    stated = summary.get("beside") or {}
    return {name: folder / "weights" / f"{name}.safetensors" for name in DIGEST_OF if stated.get(name)}


def _beside_disagreements(summary: Mapping[str, Any], folder: Path) -> Iterator[Disagreement]:
    """The same for the files with what the model computes with besides its weights."""
    for name in DIGEST_OF:
        path = folder / "weights" / f"{name}.safetensors"
        if not beside_path(path).is_file():
            continue
        stated = (summary.get("beside") or {}).get(name) or _UNSTATED
        try:
            actual = tree_digest(load_beside(path))
        except StorageError as error:
            actual = str(error)
        if actual != stated:
            yield Disagreement(f"weights/{beside_path(path).name}", stated, actual)


def identity_disagreement(summary: Mapping[str, Any], fields: Mapping[str, Any]) -> Disagreement | None:
    """In what the identity that a summary states is not that of the `fields`; None where it is, and where a secret was left out of them."""
    stated, computed = summary.get("identity"), identity_digest(fields)
    if redacted_fields(fields) or computed == stated:
        return None
    return Disagreement("its identity", stated, computed)


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of weights. StorageError where it cannot be read."""
    try:
        return read_tensors(path)
    except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise problems.WEIGHTS_UNREADABLE(file=path, got=first_line(error)) from error


def same_in_json(first: Any, second: Any) -> bool:
    """Whether two values of a summary are the same: numbers to the last bit, as JSON has them."""
    first, second = (float(value) if isinstance(value, int) else value for value in (first, second))
    return json.dumps(first, default=str) == json.dumps(second, default=str)
