"""The held-out sets of a run: which of them an evaluation takes, and the one test at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from lockstep.communication.group import Group
from lockstep.job.interface import Job
from lockstep.plan import Plan, Position
from lockstep.spec.fields import Spec
from lockstep.training.evaluation.evaluation_pass import Evaluation
from lockstep.training.integrity.rehearsal.evaluation import EvaluationRehearsal, rehearse
from lockstep.training.job_data import is_test
from lockstep.training.step.full_sharding import FullSharding
from lockstep.training.step.precision import Precision


class EvaluationSets:
    """The evaluations of a job's `eval_data` and `test_data`, by the labels that the names of their metrics begin with.

    An evaluation takes the sets that are due, in the order in which the job gives them; each begins from the model's own buffers. A set of
    `test_data` is never due.
    """

    def __init__(
        self,
        spec: Spec,
        job: Job,
        plan: Plan,
        data: Mapping[str, Dataset[Any]],
        group: Group,
        precision: Precision,
        processes: int | None = None,
    ) -> None:
        """`processes` fetch the micro-batches; by default as many as the spec says."""
        self.spec, self.plan = spec, plan
        self.by_label = {
            label: Evaluation(
                job,
                samples,
                group,
                precision,
                micro_batch=plan.evaluation_micro_batch,
                global_batch=plan.global_batch,
                seed=spec.seed,
                processes=spec.data.loader_processes if processes is None else processes,
                label=label,
                limit=None if is_test(label) else spec.evaluate.of(_name(label)).limit,
            )
            for label, samples in data.items()
        }
        self.figures: Mapping[str, str] = {}
        """The job's figures of the newest evaluation, as text by file name, which begins with the set's name if it has one; on rank 0."""

    def __iter__(self) -> Iterator[Evaluation]:
        return iter(self.by_label.values())

    @property
    def evaluated(self) -> Mapping[str, Evaluation]:
        """Those of `eval_data`."""
        return {label: evaluation for label, evaluation in self.by_label.items() if not is_test(label)}

    @property
    def tests(self) -> Mapping[str, Evaluation]:
        """Those of `test_data`."""
        return {label: evaluation for label, evaluation in self.by_label.items() if is_test(label)}

    def due(self, position: Position) -> list[str]:
        """The labels of the sets that are evaluated after the step at `position`: after the last step of the run all of them."""
        is_last = position.number == self.plan.total_steps
        cadence = self.spec.evaluate
        return [label for label in self.evaluated if is_last or _every(cadence, label).due(position)]

    def is_of(self, metric: str, labels: Iterable[str]) -> bool:
        """Whether the set of a metric is among these. One of no known set counts as of the first."""
        longest = max(
            (label for label in self.by_label if metric.startswith(f"{label}/")), key=len, default=None
        )
        return (longest or next(iter(self.by_label))) in labels

    def __call__(
        self, model: nn.Module, labels: Sequence[str], alive: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """The metrics of these sets by name, equal on every rank. `alive` is called for each micro-batch."""
        metrics: dict[str, float] = {}
        figures: dict[str, str] = {}
        for label in labels:
            evaluation = self.by_label[label]
            metrics |= evaluation(model, alive)
            folder = f"{_name(label)}/" if _name(label) else ""
            figures |= {f"{folder}{name}": text for name, text in evaluation.figures.items()}
        self.figures = figures
        return metrics

    def join(self, group: Group) -> None:
        """Share the micro-batches out among the workers of `group` from now on."""
        for evaluation in self:
            evaluation.join(group)

    def restore_buffers_by(self, restore: Callable[[], None]) -> None:
        """Have `restore` put back what an evaluation wrote to buffers."""
        for evaluation in self:
            evaluation.restore_buffers = restore

    def shard(self, sharding: FullSharding | None) -> None:
        """Go through the micro-batches in passes, where the parameters are sharded."""
        for evaluation in self:
            evaluation.sharding = sharding

    def prepare(self, *, compares: bool) -> None:
        """See `Evaluation.prepare`."""
        for evaluation in self:
            evaluation.prepare(compares=compares)

    def rehearse(self, model: nn.Module, **options: Any) -> EvaluationRehearsal:
        """Rehearse each set; the names are those of all."""
        shown = [rehearse(evaluation, model, **options) for evaluation in self]
        names = [name for each in shown for name in each.names or ()]
        return EvaluationRehearsal(
            names if all(each.names is not None for each in shown) else None,
            [text for each in shown for text in each.warnings],
            [values for each in shown for values in each.values],
        )

    def learned(self, shown: EvaluationRehearsal) -> None:
        """Take over what the job held after the whole-set functions of a rehearsal."""
        for evaluation in self:
            evaluation.over_all.values = [*shown.values]


def _name(label: str) -> str:
    """The name of a set; empty for the only one."""
    return label.partition("/")[2]


def _every(cadence: Any, label: str) -> Any:
    return cadence.of(_name(label)).every
