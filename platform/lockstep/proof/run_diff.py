"""Where two runs part, and why: what differs by intention, the first step, and within it the micro-batch, the module or parameter, and the operator."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lockstep.checkpoint.runs.run_folder import Replay
from lockstep.job.inputs.external_facts import changed_facts
from lockstep.proof import problems
from lockstep.proof.execution import Execution, take_steps
from lockstep.proof.identity_changes import Cause, causes
from lockstep.proof.operator_trace import Look, ObservedValue, parting
from lockstep.proof.recorded_run import RecordedRun
from lockstep.proof.replaying import Replayed
from lockstep.proof.summary_checks import plan_of
from lockstep.record.ledger.row_comparison import Differing, Digest, differing_rows
from lockstep.record.ledger.rows import EvaluationRow, StepRow
from lockstep.spec.fields import Spec


@dataclass(slots=True)
class Side:
    """One of the two: a recorded run, or a spec that was trained here from its beginning (`run` is None)."""

    name: str
    spec: Spec
    fields: Mapping[str, Any]
    steps: Mapping[int, StepRow]
    evaluations: Mapping[int, EvaluationRow]
    source: Mapping[str, bytes]
    execution: Execution
    """What takes its steps again."""
    run: RecordedRun | None = None

    @property
    def ended(self) -> int:
        """The step with which it came to its end; 0 where it has not."""
        if self.run is not None:
            return self.run.ended
        plan, last = plan_of(self.spec, self.fields), max(self.steps)
        return last if plan is not None and plan.total_steps == last else 0

    def replayed(self, until: int, agreed: int, aside: Path, look: tuple[int, int] | None = None) -> Replayed:
        """Its steps through `until`, taken again from the newest checkpoint that is not after the step `agreed`."""
        start, storage = 0, self.spec.checkpoint.storage
        if self.run is not None:
            start = max((step for step in self.run.checkpoints if step <= agreed), default=0)
            if start:
                storage, _ = self.run.checkpoint(start, aside)
        run_id = "" if self.run is None else self.run.run_id
        return take_steps(
            self.execution, self.spec, Replay(run_id, storage, start, until), Unwatched(), look=look
        )


class Executed(Protocol):
    """Steps that were taken, and the evaluations among them, by step."""

    @property
    def steps(self) -> Mapping[int, StepRow]: ...

    @property
    def evaluations(self) -> Mapping[int, EvaluationRow]: ...


class Unwatched:
    """Takes all rows: no row makes the steps that follow unnecessary."""

    def row(self, row: StepRow) -> None: ...

    def enough(self) -> bool:
        return False


@dataclass(slots=True)
class Parted:
    """The first difference of two runs. Where a micro-batch was looked into: the first value in it that differs, with the statistics of both."""

    step: int
    micro_batch: int | None
    quantity: str
    recorded: Any
    found: Any
    module: str | None = None
    parameter: str | None = None
    operator: str | None = None
    statistics: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, step: int, mismatch: Differing) -> Parted:
        """The first difference, which is a quantity of `step`."""
        return cls(step, mismatch.micro_batch, mismatch.quantity, mismatch.first, mismatch.second)

    def as_dict(self) -> dict[str, Any]:
        return {name: _plain(getattr(self, name)) for name in self.__dataclass_fields__}


@dataclass(slots=True, kw_only=True)
class Compared:
    """Two trainings that were compared over `steps` steps."""

    steps: int
    fields: list[Cause] = field(default_factory=list)
    first_difference: Parted | None = None
    note: str | None = None

    @property
    def same(self) -> bool:
        return self.first_difference is None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: whether they are the `same`, and every field."""
        return {
            "same": self.same,
            **{entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)},
            "fields": [cause._asdict() for cause in self.fields],
            "first_difference": None if self.first_difference is None else self.first_difference.as_dict(),
        }


@dataclass(slots=True, kw_only=True)
class Difference(Compared):
    """How two runs differ."""

    source: str
    """The difference of their jobs' files, as a unified diff."""


def difference(a: Side, b: Side, aside: Path) -> Difference:
    """Compare two sides, and take the step in which they part again on both, each in its process, to look into it."""
    last = min(max(a.steps), max(b.steps))
    shared = sum(step in b.steps for step in a.steps)
    if not shared:
        have = " and ".join(f"{min(each.steps)} to {max(each.steps)}" for each in (a, b))
        raise problems.NO_COMMON_STEP(got=have)
    answer = Difference(
        steps=shared, fields=[*causes(a.fields, b.fields), *_facts(a, b)], source=source_diff(a, b)
    )
    alike = _end_alike(a, b, last)
    first, agreed = first_parting(a, b, last, ends_alike=alike)
    if first is None:
        if max(a.steps) != max(b.steps) and a.run is not None and b.run is not None:
            counts = [f"{max(side.steps)} steps" for side in (a, b)]
            answer.first_difference = Parted(last + 1, None, "row", counts[0], counts[1])
            return answer
        if (mismatch := _other_result(a, b)) is None:
            return answer
        first = last, mismatch
    step, mismatch = first
    answer.first_difference = Parted.of(step, mismatch)
    again = [side.replayed(step, min(agreed, step - 1), aside) for side in (a, b)]
    first, agreed = first_parting(again[0], again[1], step, ends_alike=step < last or alike)
    if first is None:
        answer.note = (
            "taken again here, both give the same bits: the versions or the machines that recorded them differ, "
            "or a record was changed (lockstep verify tells)"
        )
        return answer
    step, mismatch = first
    answer.first_difference = Parted.of(step, mismatch)
    if mismatch.micro_batch is not None:
        _look_into(a, b, answer.first_difference, aside)
    return answer


def _facts(a: Side, b: Side) -> list[Cause]:
    """What the jobs of two recorded runs took from outside themselves and no identity has."""
    if a.run is None or b.run is None:
        return []
    return [Cause(*change) for change in changed_facts(a.run.facts, b.run.facts)]


def first_parting(
    a: Executed, b: Executed, last: int, *, ends_alike: bool = True
) -> tuple[tuple[int, Differing] | None, int]:
    """The first step up to `last` whose row or evaluation differs, and how; and the last step before it whose digests are known to be the same.

    A row or an evaluation that only one has is a difference, of the steps that both have taken. Unless `ends_alike` an evaluation
    after the step `last` is none: one that comes only because a run ends there, or that a run was ended before.
    """
    agreed, first = 0, max(min(a.steps), min(b.steps))
    for step in sorted({*a.steps, *b.steps, *a.evaluations, *b.evaluations}):
        if not first <= step <= last:
            continue
        row_a, row_b = a.steps.get(step), b.steps.get(step)
        mismatch = next(differing_rows(row_a, row_b), None)
        if mismatch is not None:
            return (step, mismatch), agreed
        evaluated = a.evaluations.get(step), b.evaluations.get(step)
        if step < last or ends_alike or None not in evaluated:
            mismatch = next(differing_rows(*evaluated), None)
            if mismatch is not None:
                return (step, mismatch), agreed
        if (
            row_a is not None
            and row_a.digests is not None
            and row_b is not None
            and row_b.digests is not None
        ):
            agreed = step
    return None, agreed


def _end_alike(a: Side, b: Side, last: int) -> bool:
    """Whether both or neither come to their end with the step `last`, and none was ended early there."""
    cut_off = any(side.run is not None and not side.run.ended and max(side.steps) == last for side in (a, b))
    return not cut_off and (a.ended == last) == (b.ended == last)


def _other_result(a: Side, b: Side) -> Differing | None:
    """In which of their weights two finished runs differ that have the same rows; without digests these do not tell it."""
    if a.run is None or b.run is None or not (a.run.ended and b.run.ended):
        return None
    for name in ("weights_digest", "ema_digest"):
        digest_a, digest_b = a.run.summary.get(name), b.run.summary.get(name)
        if digest_a != digest_b:
            return Differing(name, digest_a, digest_b)
    return None


def _look_into(a: Side, b: Side, parted: Parted, aside: Path) -> None:
    assert parted.micro_batch is not None
    looks: list[Look] = []
    for side in (a, b):
        look = side.replayed(parted.step, parted.step - 1, aside, (parted.step - 1, parted.micro_batch)).look
        assert look is not None  # it was asked for, or an error raised
        looks.append(look)
    add_parting(parted, *looks)


def add_parting(parted: Parted, look_a: Look, look_b: Look) -> None:
    """Add to a difference the first value of its micro-batch that differs, and where it was made."""
    divergence = parting(look_a, look_b)
    if divergence is None:  # the digests of gradients differ, and nothing that was seen does
        return
    parted.quantity, parted.module, parted.parameter = (
        divergence.quantity,
        divergence.module,
        divergence.parameter,
    )
    parted.operator = divergence.operator
    parted.recorded, parted.found = (
        None if value is None else Digest(value.digest) for value in (divergence.first, divergence.second)
    )
    parted.statistics = {"recorded": _statistics(divergence.first), "found": _statistics(divergence.second)}


def _statistics(value: ObservedValue | None) -> dict[str, Any] | None:
    return None if value is None else value.statistics


def source_diff(a: Side, b: Side) -> str:
    """How the files of two jobs differ, as a unified diff; nothing where they are the same."""
    lines: list[str] = []
    for path in sorted({*a.source, *b.source}):
        lines_a, lines_b = (
            side.source.get(path, b"").decode(errors="replace").splitlines(keepends=True) for side in (a, b)
        )
        lines += difflib.unified_diff(lines_a, lines_b, f"{a.name}/{path}", f"{b.name}/{path}")
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def _plain(value: Any) -> Any:
    return repr(value) if isinstance(value, Digest) else value
