"""A recorded run shown to be what it says: steps taken again from a checkpoint, every deterministic column and digest compared.

What could explain a difference (versions, device, threads, source, data) is compared first. Where the run is taken
again on another kind of device or by other versions, bits may rightly differ: the difference in bits is still reported, and the
numbers are then compared within `TOLERANCE`, which the answer states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lockstep.checkpoint.errors import BadCheckpointError
from lockstep.checkpoint.reader import Loaded
from lockstep.checkpoint.runs.run_folder import Replay
from lockstep.job.identity import VARIABLE
from lockstep.job.inputs.external_facts import changed_facts
from lockstep.proof.identity_changes import UNTOLD, Cause, causes
from lockstep.proof.record_checks import record_disagreements, told_of, weights_folders
from lockstep.proof.recorded_run import RecordedRun
from lockstep.proof.replaying import Replayed, Watching
from lockstep.proof.step_spans import Span
from lockstep.proof.summary_checks import (
    DIGEST_OF,
    file_disagreements,
    identity_disagreement,
    lacking_digests,
    plan_of,
    read_weights,
    same_in_json,
)
from lockstep.record.ledger.row_comparison import Digest, differing_rows
from lockstep.record.ledger.rows import EvaluationRow, StepRow
from lockstep.spec.fields import Spec
from lockstep.training.auxiliary_state import beside_path, load_beside
from lockstep.training.integrity.digests import Digester, model_digest, optimizer_digest
from lockstep.training.integrity.state_digest import tree_digest, weights_digest

TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2, "fp16": 2e-2}
"""How far a number may be from the recorded one, relative to it, where bits may rightly differ; by the run's precision."""

_ENOUGH = 5
"""So many steps that differ tell a value that was changed afterwards from a run that goes another way."""

_OF_RESULT = (
    "weights_digest", "ema_digest", "best_digest", "best_step", "epoch", "samples", "skipped", "tested", "tested_step",
)  # fmt: skip
"""What of a summary is the same in every execution of a run, beside its metrics."""

_OF_SUMMARY = " of the summary"
_BESIDE = "beside_digest."

_EXACT = ("step", "epoch", "samples", "weight", "skipped", "scale")
"""Columns that are the same on any machine."""


class FirstDifference(NamedTuple):
    """Where two executions part. `micro_batch` where its gradient was compared."""

    step: int
    micro_batch: int | None
    quantity: str
    recorded: Any
    found: Any

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; digests as 16 hexadecimal digits, floats as they are."""
        return {**self._asdict(), "recorded": _plain(self.recorded), "found": _plain(self.found)}


@dataclass(slots=True)
class Verified:
    """What a verification came to. `steps` were compared; `tolerance` is None where they were compared bit for bit."""

    run_id: str
    steps: int = 0
    first_difference: FirstDifference | None = None
    cause: str | None = None
    fields: list[Cause] | None = field(default_factory=list)
    """Those of the identity that are not as recorded, whether or not any bit is another for it; None where none are recorded."""
    facts: list[Cause] = field(default_factory=list)
    """What the job took from outside itself that is not as recorded, and is no part of the identity."""
    elsewhere: list[str] = field(default_factory=list)
    tolerance: float | None = None
    same_bits: bool = True
    spans: list[Span] = field(default_factory=list)
    weights: bool = False
    """Whether the run's last step was taken again, and led to the weights that its summary and its files have."""
    uncompared: str = ""
    """Why not all files of the result's weights were compared; empty where they were, and where the run has not finished."""
    ended: bool = False
    """Whether the run has finished: of one that has not, neither its result nor the files beside its rows are compared."""
    told: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """What of its record nothing proves, by document; `*` is all of it."""

    @property
    def same(self) -> bool:
        return self.first_difference is None

    def as_dict(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "same": self.same,
            "steps": self.steps,
            "first_difference": None if self.first_difference is None else self.first_difference.as_dict(),
            "cause": self.cause,
            "fields": None if self.fields is None else [item._asdict() for item in self.fields],
            "facts": [item._asdict() for item in self.facts],
            "same_bits": self.same_bits,
            "tolerance": self.tolerance,
            "elsewhere": self.elsewhere,
            "weights": self.weights,
            "uncompared": self.uncompared or None,
            "ended": self.ended,
            "told": {name: list(fields) for name, fields in self.told.items()},
            "spans": [{"from": item.start + 1, "to": item.until} for item in self.spans],
        }


class Judge:
    """Decides which differences count, from the identities of the run and of the process that takes its steps again."""

    def __init__(self, run: RecordedRun, fields: Mapping[str, Any]) -> None:
        self._run = run
        self._plan, self._placed_alike = plan_of(run.spec, run.fields), run.placed_alike
        self.causes = causes(run.fields, fields)
        self.elsewhere = [str(cause) for cause in self.causes if cause.elsewhere]
        if run.spec.determinism == "fast":
            self.elsewhere.append("determinism: fast promises no bits")
        self.tolerance = TOLERANCE[run.spec.precision] if self.elsewhere else None

    def of_step(self, step: int, row: StepRow | None) -> Iterator[FirstDifference]:
        """Everything in which the recorded row of a step and `row`, which was computed again, differ, whether or not it may."""
        recorded = self._run.steps.get(step)
        differ = list(_row_differences(step, recorded, row))
        yield from differ
        if recorded is None or self._plan is None or recorded.attempt != self._placed_alike:
            return
        lacking = lacking_digests(self._run.spec, self._plan, recorded)
        if lacking is not None and lacking not in [difference.quantity for difference in differ]:
            yield FirstDifference(step, None, lacking, None, "there")

    def counts(self, difference: FirstDifference) -> bool:
        """Whether a difference is larger than another kind of machine may cause."""
        return self.tolerance is None or not _within(difference, self.tolerance)


class Watch:
    """Looks at rows as their steps are taken again: once a few differ by more than they may, no more steps are needed."""

    def __init__(self, run: RecordedRun) -> None:
        self._run, self._differing = run, 0
        self._judge: Judge | None = None

    def begun(self, fields: Mapping[str, Any], _facts: Mapping[str, Any]) -> None:
        self._judge = Judge(self._run, fields)

    def row(self, row: StepRow) -> None:
        judge = self._judge
        if judge is not None:
            self._differing += any(map(judge.counts, judge.of_step(row.step, row)))

    def evaluation(self, row: EvaluationRow) -> None: ...

    def enough(self) -> bool:
        return self._differing >= _ENOUGH


Take = Callable[[Spec, Replay, Watching, Path | None], Replayed]
"""Takes the steps of a replay again, wherever that is; into the folder, where one is given, go the weights that they lead to."""


def verify(run: RecordedRun, spans: Sequence[Span], take: Take, aside: Path) -> Verified:
    """Take the spans again with `take`, in order, up to the first that differs.

    Checkpoints that the storage has no longer are downloaded into `aside`.
    """
    answer = Verified(run.run_id, ended=bool(run.ended), told=told_of(run, aside))
    folders, why = weights_folders(run, aside) if run.ended else ([], "")
    unread = {name for name in run.fields if name.startswith(VARIABLE)}
    if lacking := _lacking_weights(run.summary, folders):
        answer.uncompared = f"{lacking}: {why or 'neither its folder nor its store has this file'}"
    for span in spans:
        answer.spans.append(span._replace(start=max(span.start, run.forked_at)))
        storage = run.spec.checkpoint.storage
        if span.start:
            storage, mismatch = _checkpoint(run, span.start, aside)
            if mismatch is not None:
                answer.first_difference, answer.same_bits = mismatch, False
                answer.cause = "the checkpoint was changed after it was saved"
                return answer
        replay = Replay(run.run_id, storage, span.start, span.until)
        led_to = _led_to(run, span, aside)
        replayed = take(run.spec, replay, Watch(run), led_to)
        if led_to is not None:
            replayed = with_own_digests(replayed, run.last_step, led_to)
        _compare(run, span, replayed, folders, aside, answer)
        unread -= replayed.fields.keys()
        if answer.first_difference is not None:
            return answer
    if answer.told and unread:  # of these nothing was read when its steps were taken again
        of_fields = (*answer.told.get("fields.json", ()), *sorted(unread))
        answer.told = {**answer.told, "fields.json": of_fields}
    wrong = next(record_disagreements(run, aside), None)
    if wrong is not None:  # last, for most of what was changed is told better by the steps
        answer.first_difference = FirstDifference(run.last_step, None, *wrong)
        answer.cause = "the record was changed after it was written: all steps are equal"
        answer.weights = answer.weights and not _is_of_result(answer.first_difference)
    return answer


def _lacking_weights(summary: Mapping[str, Any], folders: Sequence[Path]) -> str:
    """The first file of which a summary has the digest and that none of the folders has; empty where each is there."""
    beside = summary.get("beside") or {}
    for name, key in DIGEST_OF.items():
        path = Path("weights", f"{name}.safetensors")
        stated = [path] * bool(summary.get(key)) + [beside_path(path)] * bool(beside.get(name))
        for file in stated:
            if not any((folder / file).is_file() for folder in folders):
                return file.as_posix()
    return ""


def _led_to(run: RecordedRun, span: Span, aside: Path) -> Path | None:
    """A new folder for the weights that a span leads to; None where they are not those of the run's result."""
    if not run.ended or span.until != run.last_step:
        return None
    folder = aside / "led-to" / "weights"
    folder.mkdir(parents=True)
    return folder


def with_own_digests(replayed: Replayed, last: int, weights: Path) -> Replayed:
    """The replayed steps, with the digests of the result as they are computed here, from the tensors in the folder `weights`.

    Those that the executing process reports are not used. A file that it has not handed over has no digest.
    """
    row, summary = replayed.steps.get(last), {**replayed.summary}
    beside_digests: dict[str, str | None] = {}
    for name, key in DIGEST_OF.items():
        path = weights / f"{name}.safetensors"
        summary[key] = None
        if not path.is_file():
            continue
        state = read_weights(path)
        summary[key] = weights_digest(state)
        beside_digests[name] = tree_digest(load_beside(path)) if beside_path(path).is_file() else None
        if name == "final" and row is not None and row.digests is not None:
            digest = model_digest(Digester(torch.device("cpu")), state)
            row = row._replace(digests=row.digests._replace(weights=digest))
    steps = replayed.steps if row is None else {**replayed.steps, last: row}
    return replace(replayed, steps=steps, summary={**summary, "beside": beside_digests})


def _compare(
    run: RecordedRun, span: Span, replayed: Replayed, folders: Sequence[Path], aside: Path, answer: Verified
) -> None:
    """Add what a span of replayed steps shows to the answer; in the `folders` are weights of the run's result."""
    judge = Judge(run, replayed.fields)
    answer.fields = judge.causes if run.fields else None
    answer.facts = [Cause(*difference) for difference in changed_facts(run.facts, replayed.facts)]
    answer.elsewhere = judge.elsewhere
    # All of them, also where the watch had enough: a step that was not taken is a difference, and never the same.
    steps = range(max(span.start, run.forked_at) + 1, span.until + 1)
    differences = list(_differences(run, judge, replayed, steps, folders))
    differences += _checkpoint_differences(run, replayed, steps, aside)
    differences.sort(key=lambda difference: difference.step)
    answer.steps += sum(step in replayed.steps for step in steps)
    if run.ended and run.last_step in steps:
        answer.weights = not answer.uncompared and not any(map(_is_of_result, differences))
    if not differences:
        return
    answer.same_bits = False
    answer.tolerance = judge.tolerance
    if beyond := [difference for difference in differences if judge.counts(difference)]:
        answer.first_difference = beyond[0]
        answer.cause = _cause_text(judge.causes) or _cause_text(answer.facts) or _lone_cause(beyond) or UNTOLD


def _differences(
    run: RecordedRun, judge: Judge, replayed: Replayed, steps: range, folders: Sequence[Path]
) -> Iterator[FirstDifference]:
    """Everything in which the record and the replayed steps differ, step by step."""
    last = run.last_step
    for step in steps:
        yield from judge.of_step(step, replayed.steps.get(step))
        evaluation = run.evaluations.get(step)
        # After its last step a run that has not finished may have been ended before its evaluation.
        if evaluation is not None or step < last or run.ended:
            yield from _row_differences(step, evaluation, replayed.evaluations.get(step))
    if steps.start == run.forked_at + 1:
        yield from _rows_outside_run(run, lambda step: step < steps.start)
    if last in steps:
        yield from _rows_outside_run(run, lambda step: step > last)
        if run.ended and last in replayed.steps:
            yield from _result_differences(run, replayed.summary, folders)


def _rows_outside_run(run: RecordedRun, where: Callable[[int], bool]) -> Iterator[FirstDifference]:
    """Rows and evaluations of steps that the run cannot have taken."""
    for kind, rows in {"row": run.steps, "evaluation": run.evaluations}.items():
        yield from (FirstDifference(step, None, kind, "there", None) for step in rows if where(step))


def _result_differences(
    run: RecordedRun, replayed: Mapping[str, Any], folders: Sequence[Path]
) -> Iterator[FirstDifference]:
    """In what a finished run's summary differs from that of the replayed state after its last step, and its files of weights, in the `folders`, from its record."""
    last = run.last_step
    of_recorded, of_replayed = _metrics(run.summary), _metrics(replayed)
    recorded, replayed = {**run.summary, **of_recorded}, {**replayed, **of_replayed}
    metrics = {*of_recorded, *of_replayed}
    for name in DIGEST_OF:
        for result in (recorded, replayed):
            result[f"{_BESIDE}{name}"] = (result.get("beside") or {}).get(name)
    for name in (*_OF_RESULT, *(f"{_BESIDE}{name}" for name in DIGEST_OF), *sorted(metrics)):
        if not same_in_json(recorded.get(name), replayed.get(name)):
            yield FirstDifference(last, None, f"{name}{_OF_SUMMARY}", recorded.get(name), replayed.get(name))
    wrong = identity_disagreement(run.summary, run.fields) if run.fields else None
    if wrong is not None:
        yield FirstDifference(last, None, f"identity{_OF_SUMMARY}", wrong.stated, wrong.found)
    for folder in folders:
        for name, stated, actual in file_disagreements(run.summary, folder, run.steps.get(last)):
            yield FirstDifference(last, None, name, stated, actual)


def _metrics(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a summary, those of its test among them."""
    return {**(summary.get("metrics") or {}), **(summary.get("test") or {})}


def _row_differences(
    step: int, recorded: StepRow | EvaluationRow | None, replayed: StepRow | EvaluationRow | None
) -> Iterator[FirstDifference]:
    """In what the recorded row, or evaluation, of a step and the replayed one differ."""
    for quantity, first, second, micro_batch in differing_rows(recorded, replayed):
        yield FirstDifference(step, micro_batch, quantity, first, second)


# --- checkpoints ------------------------------------------------------------------------------------------------


def _checkpoint(run: RecordedRun, step: int, aside: Path) -> tuple[str, FirstDifference | None]:
    """The storage of a checkpoint, and in what its content is not what was recorded of it."""
    try:
        storage, loaded = run.checkpoint(step, aside)
    except BadCheckpointError as error:
        return "", FirstDifference(step, None, "checkpoint", "whole", str(error))
    row = run.steps.get(step)
    saved: Any = loaded.sections.get("check", {})
    actual = _checkpoint_digests(loaded)
    for expected in (_state_digests(row), {name: int(saved[name], 16) for name in actual if name in saved}):
        for name, value in expected.items():
            if value != actual.get(name):
                return storage, FirstDifference(step, None, name, Digest(value), _digest(actual.get(name)))
    return storage, None


def _state_digests(row: StepRow | None) -> dict[str, int]:
    """The digests of the state that a step left, by their names."""
    if row is None or row.digests is None:
        return {}
    digests = row.digests
    named = {"weights_digest": digests.weights, "optimizer_digest": digests.optimizer}
    return named if digests.average is None else {**named, "ema_digest": digests.average}


def _digest(value: int | None) -> Digest | None:
    return None if value is None else Digest(value)


def _checkpoint_digests(loaded: Loaded) -> dict[str, int]:
    """The digests of what a checkpoint holds."""
    digester, sections = Digester(torch.device("cpu")), loaded.sections
    model: Any = sections["model"]
    optimizer: Any = sections["optimizer"]
    digests = {
        "weights_digest": model_digest(digester, model["state"]),
        "optimizer_digest": optimizer_digest(digester, optimizer),
    }
    average: Any = sections.get("ema")
    return digests if average is None else {**digests, "ema_digest": digester.digest(average)}


def _checkpoint_differences(
    run: RecordedRun, replayed: Replayed, steps: range, aside: Path
) -> list[FirstDifference]:
    """In what the checkpoints of the storage within `steps` differ from the replayed state."""
    differ = []
    for step in run.saved:
        row = replayed.steps.get(step)
        if step not in steps or row is None or row.digests is None:
            continue
        try:
            saved = _checkpoint_digests(run.checkpoint(step, aside)[1])
        except BadCheckpointError as error:
            differ.append(FirstDifference(step, None, "checkpoint", "whole", str(error)))
            continue
        for name, digest in _state_digests(row).items():
            if saved.get(name) != digest:
                differ.append(
                    FirstDifference(
                        step, None, f"{name} of the checkpoint", _digest(saved.get(name)), Digest(digest)
                    )
                )
    return differ


# --- what is said of it -----------------------------------------------------------------------------------------


def _cause_text(differ: Sequence[Cause]) -> str | None:
    return "; ".join(str(cause) for cause in differ[:4]) or None


def _lone_cause(differences: Sequence[FirstDifference]) -> str | None:
    """Why only such values differ as no other value depends on: they were changed after they were computed. None where others differ."""
    if all(_is_of_result(difference) for difference in differences):
        return "the weights or the summary were changed after they were written: all else is equal"
    if len(differences) > 1:
        return None
    (difference,) = differences
    if "checkpoint" in difference.quantity:
        return "the checkpoint was changed after it was saved: all else is equal"
    if difference.quantity in ("row", "evaluation"):
        return "the record lacks it, or has it too much: all else is equal"
    return "this one value was changed after it was recorded: all else is equal"


def _is_of_result(difference: FirstDifference) -> bool:
    return difference.quantity.endswith(_OF_SUMMARY) or difference.quantity.startswith("weights/")


def _within(difference: FirstDifference, tolerance: float) -> bool:
    """Whether a difference is one that another kind of machine may rightly make."""
    if difference.recorded is None or difference.found is None or difference.quantity.startswith("weights/"):
        return False  # what is lacking, and what the record says twice, is no matter of rounding
    if (
        difference.micro_batch is not None
        or "digest" in difference.quantity
        or difference.quantity in (f"best_step{_OF_SUMMARY}", f"tested_step{_OF_SUMMARY}")
    ):
        return True
    if difference.quantity in _EXACT or not all(
        isinstance(value, float) for value in (difference.recorded, difference.found)
    ):
        return False
    return math.isclose(
        difference.recorded, difference.found, rel_tol=tolerance, abs_tol=tolerance * 1e-3
    ) or (math.isnan(difference.recorded) and math.isnan(difference.found))


def _plain(value: Any) -> Any:
    return (
        repr(value)
        if isinstance(value, int) and type(value) is not int and type(value) is not bool
        else value
    )
