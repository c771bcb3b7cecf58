"""The rehearsal of an evaluation: its first micro-batch repeats, after the last one too, and leaves nothing that training reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.errors import LockstepError
from lockstep.training.evaluation import whole_set_metrics
from lockstep.training.evaluation.evaluation_pass import Evaluation, Row
from lockstep.training.integrity import problems
from lockstep.training.integrity.rehearsal.child_process import in_child
from lockstep.training.integrity.rehearsal.generators import OwnGenerators
from lockstep.training.integrity.rehearsal.names_of_objects import memory_of, named
from lockstep.training.integrity.rehearsal.object_state import Memory, tensor_digest
from lockstep.training.job_data import shown_label
from lockstep.training.module_modes import evaluating, has_own_train
from lockstep.training.step.buffers import KeptBuffers


class EvaluationRehearsal(NamedTuple):
    """What the first micro-batch of an evaluation showed."""

    names: list[str] | None
    """Of the metrics; None where they are not known yet: a metric of the whole set may fail on one micro-batch."""
    warnings: list[str]
    values: list[Mapping[str, str]]
    """What the job held after each call of its whole-set functions that changed something."""


def rehearse(
    evaluation: Evaluation,
    model: nn.Module,
    *,
    repeat: bool = False,
    warn: Callable[[str], None] = lambda _: None,
    training: Callable[[], list[dict[str, str]]] = list,
) -> EvaluationRehearsal:
    """Evaluate the first micro-batch, so that what is wrong shows before training. Call it in a process that does not train.

    With `repeat` it is computed again, after the last one, and must give the same values; and the results of the first micro-batch of
    `training` must not depend on what it leaves behind.
    """
    trial = _Trial(evaluation, model)
    evaluation.over_all.compares = repeat
    evaluation.restore_buffers = KeptBuffers(model).restore
    if not repeat:
        return trial.shown(*evaluation.computed(model, 0), warn)
    shown, leftovers, with_it = in_child(partial(trial.rehearsed, training), trial.job)
    for text in shown.warnings:
        warn(text)
    if leftovers:
        trial.check_left(leftovers, with_it, in_child(training, trial.job))
    if handed_on := trial.handed_on(training, leftovers):
        warn(
            f"evaluation: {named(handed_on)} changes with every micro-batch of it, so it is not the same on every worker and no checkpoint "
            "keeps it; as soon as a loss, a gradient or an update depends on it, other workers or a resume give other bits"
        )
    return shown


class _Trial:
    """An evaluation that is tried on a model."""

    def __init__(self, evaluation: Evaluation, model: nn.Module) -> None:
        self.evaluation, self.model = evaluation, model
        self.job, self.seed = evaluation.job, evaluation.seed

    def rehearsed(
        self, training: Callable[[], list[dict[str, str]]]
    ) -> tuple[EvaluationRehearsal, dict[str, str], list[dict[str, str]]]:
        """What an evaluation shows, the values of the places that its micro-batches change, and what training gives after it."""
        before = memory_of(self.job, self.model)
        once, outputs = self._computed(0)
        self._check_repeats(self._texts(once, outputs), before)
        after = memory_of(self.job, self.model)
        leftovers = {place: after.values.get(place, "") for place in after.changed_since(before)}
        check_modes(self.model)
        with_it = in_child(training, self.job) if leftovers else []
        warnings: list[str] = []
        shown = self.shown(once, outputs, warnings.append)
        return shown._replace(warnings=warnings), leftovers, with_it

    def shown(
        self, row: Row, outputs: whole_set_metrics.Outputs, warn: Callable[[str], None]
    ) -> EvaluationRehearsal:
        over_all = self._tried(outputs, warn)
        if over_all is None:
            return EvaluationRehearsal(None, [], self.evaluation.over_all.values)
        whole_set_metrics.check_names(over_all, row)
        return EvaluationRehearsal(
            [f"{self.evaluation.label}/{name}" for name in (*row, *over_all)],
            [],
            self.evaluation.over_all.values,
        )

    def _tried(
        self, outputs: whole_set_metrics.Outputs, warn: Callable[[str], None]
    ) -> Mapping[str, float] | None:
        if not whole_set_metrics.has_outputs(self.job):
            return {}
        try:
            return self.evaluation.over_all.compute(
                self.model, outputs, partial(self._after_others, outputs)
            ).metrics
        except LockstepError as error:
            if error.__cause__ is None:  # a value of a wrong kind, not a failure on too few samples
                raise
            warn(
                f"evaluation: the metrics of the whole set could not be tried on its first micro-batch, and are first computed after "
                f"training has begun: {error}"
            )
            return None

    def _after_others(self, outputs: whole_set_metrics.Outputs) -> Iterator[Mapping[str, str]]:
        """What the job holds after the whole-set metrics of the first outputs and the last, and after the last alone."""

        def values(*every: whole_set_metrics.Outputs) -> Mapping[str, str]:
            for batch_outputs in every:
                whole_set_metrics.compute(self.job, batch_outputs, seed=self.seed)
            return memory_of(self.job, self.model).values

        _, last = self._computed(self.evaluation.last)
        yield in_child(partial(values, outputs, last), self.job)
        yield in_child(partial(values, last), self.job)

    def check_left(
        self, left: Mapping[str, str], with_it: list[dict[str, str]], without: list[dict[str, str]]
    ) -> None:
        """Refuse what evaluation leaves behind if the results of the first micro-batch of training depend on it."""
        for with_values, without_values in zip(with_it, without, strict=True):
            for name in {**with_values, **without_values}:
                if with_values.get(name) != without_values.get(name):
                    raise problems.EVALUATION_LEAVES(name=named([*left]), got=name)

    def handed_on(self, training: Callable[[], list[dict[str, str]]], left: Mapping[str, str]) -> list[str]:
        """The places in `left` that go from one evaluation micro-batch to the next: training does not write them, nor one evaluation anew."""

        def changed(action: Callable[[], Any]) -> tuple[list[str], dict[str, str]]:
            before = memory_of(self.job, self.model)
            action()
            after = memory_of(self.job, self.model)
            return after.changed_since(before), after.values

        if not left:
            return []
        by_training, _ = in_child(partial(changed, training), self.job)
        _, once = in_child(partial(changed, lambda: self._computed(0)), self.job)
        within = tuple(f"{place}[" for place in by_training)
        return [
            place
            for place, value in left.items()
            if once.get(place, "") != value and place not in by_training and not place.startswith(within)
        ]

    def _computed(self, i: int) -> tuple[Row, whole_set_metrics.Outputs]:
        return self.evaluation.computed(self.model, i)

    def _texts(self, row: Row, outputs: whole_set_metrics.Outputs) -> dict[str, str]:
        """The results of one micro-batch by name, as texts: equal values have equal texts."""
        return {
            **{f"{self.evaluation.label}/{name}": repr(value) for name, value in row.items()},
            **{f"the output {name!r}": text for name, text in whole_set_metrics.texts(outputs).items()},
        }

    def _check_repeats(self, once: dict[str, str], held: Memory) -> None:
        """Refuse a first micro-batch that gives something else when it is computed again, also after the last one.

        `once` are its first results, `held` what the job held before them.
        """
        generators = OwnGenerators({shown_label(self.evaluation.label): self.evaluation.batches.samples})
        again = self._texts(*self._computed(0))
        generators.look()
        between = memory_of(self.job, self.model)
        if self.evaluation.last:
            self._computed(self.evaluation.last)
            generators.look()
        third = self._texts(*self._computed(0))
        generators.look()
        if gone_on := generators.gone_on():
            self._computed(0)
            generators.look()
            generators.refuse(gone_on)
        for first, second, before in ((again, third, between), (once, again, held)):
            metric = next((name for name, value in first.items() if second.get(name) != value), None)
            if metric is not None:
                raise self._differs(metric, memory_of(self.job, self.model).changed_since(before))

    def _differs(self, metric: str, left: list[str]) -> LockstepError:
        if left:
            return problems.EVALUATION_KEEPS(name=named(left), got=metric)
        return problems.EVALUATION_DIFFERS(got=metric)


def check_modes(model: nn.Module) -> None:
    """JobError where evaluation mode and back changes the weights, as they are once training has moved them."""
    if not any(map(has_own_train, model.modules())):
        return
    values = [parameter.detach().clone() for parameter in model.parameters()]
    try:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.rand_like(parameter))
        digests = {name: tensor_digest(parameter) for name, parameter in model.named_parameters()}
        with evaluating(model):
            pass
        for name, parameter in model.named_parameters():
            if tensor_digest(parameter) != digests[name]:
                raise problems.WEIGHTS_MERGED(name=name)
    finally:
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), values, strict=True):
                parameter.copy_(value)
