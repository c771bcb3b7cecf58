"""Evaluation: every held-out sample once, the same bits whatever the number of workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.communication.group import Group
from lockstep.data.loader import Loader
from lockstep.data.micro_batches import MicroBatches
from lockstep.data.sampler import EVALUATION, MicroBatch
from lockstep.errors import LockstepError
from lockstep.job.interface import Job, Loss, Mean, overrides
from lockstep.randomness import evaluation_batch_key, evaluation_key, seed_all
from lockstep.reduction_tree import evaluation_ranges
from lockstep.training import problems
from lockstep.training.evaluation import whole_set_metrics
from lockstep.training.failure import job_at
from lockstep.training.integrity.rehearsal.whole_set_watch import WholeSetWatch
from lockstep.training.job_data import dataset_size, shown_label
from lockstep.training.module_modes import evaluating, has_own_train
from lockstep.training.step.full_sharding import FullSharding, diverged
from lockstep.training.step.means import means_alone, means_of
from lockstep.training.step.parameters import ParameterWatch
from lockstep.training.step.phases import own_phases
from lockstep.training.step.precision import Precision
from lockstep.training.step.sample_rows import rows_by_name

T = TypeVar("T")

Row = dict[str, tuple[float, float]]
"""Total and weight of each metric of one micro-batch, by name."""


class Evaluation:
    """A held-out set of a run, and its metrics for the model as it stands.

    Micro-batch i is samples `i*micro … (i+1)*micro - 1`. Each one's totals are computed by themselves and added in index
    order in float64, so the result does not depend on which worker ran it. Seeds are the same in every evaluation.
    """

    def __init__(
        self,
        job: Job,
        data: Dataset[Any],
        group: Group,
        precision: Precision,
        *,
        micro_batch: int,
        global_batch: int,
        seed: int,
        processes: int,
        label: str = "eval",
        limit: int | None = None,
    ) -> None:
        """`global_batch` is how many samples a loss over a whole batch sees at once. `label` is what the names of the metrics begin with;
        of the data the first `limit` samples are taken.
        """
        self.job = job
        self.precision = precision
        self.seed = seed
        self.processes = processes
        self.label = label
        self.samples = dataset_size(data, shown_label(label))
        if self.samples == 0:
            raise problems.NO_SAMPLE(field=shown_label(label))
        self.samples = min(self.samples, limit or self.samples)
        self.batches = MicroBatches(data, job.collate, seed=seed, purpose="eval data")
        self.micro_batch = micro_batch
        self.restore_buffers: Callable[[], None] = lambda: None
        """Puts back what evaluation wrote to buffers; called after each micro-batch, as in training."""
        self.sharding: FullSharding | None = None
        """The sharded parameters of the model, which the workers gather together: they go through the micro-batches in passes."""
        self.join(group)
        self.figures: Mapping[str, str] = {}
        """The job's figures of the newest evaluation, as text by file name; on rank 0."""
        self._gives_outputs = whole_set_metrics.has_outputs(job)
        self._has_loss = has_evaluation_loss(job)
        self._has_batch_loss = has_batch_loss(job)
        self._global_batch = global_batch
        self._coefficients: dict[str, float] = {}
        """Of the terms of the loss, as this rank's micro-batches of the newest evaluation have given them."""
        self.over_all = WholeSetWatch(job, seed)
        """Computes the metrics of the whole set."""

    def join(self, group: Group) -> None:
        """Share the micro-batches out among the workers of `group` from now on."""
        self.group = group
        self.assigned = evaluation_ranges(self.samples, self.micro_batch, group.size)[group.rank]

    def __call__(self, model: nn.Module, alive: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Metrics by name, `<label>/<name>`, equal on every rank. `alive` is called for each micro-batch."""
        self._coefficients = {}
        own_rows, outputs, embedded = self._own_results(model, alive)
        every = self.group.gather(
            (own_rows, self._coefficients, embedded, self.sharding and self.sharding.order)
        )
        if len({order for *_, order in every}) > 1:
            raise diverged("an evaluation")
        rows = self._in_order([of_rank for of_rank, *_ in every])
        if self._has_batch_loss:
            rows = [
                *self._batch_losses(model, self._in_order([of_rank for _, _, of_rank, _ in every])),
                *rows,
            ]
        totals: dict[str, tuple[float, float]] = {}
        for row in rows:
            for name, (total, weight) in row.items():
                subtotal = totals.get(name, (0.0, 0.0))
                totals[name] = (subtotal[0] + total, subtotal[1] + weight)
        coefficients = {name: value for _, of_rank, *_ in every for name, value in of_rank.items()}
        if coefficients:  # each term over its own weight of the whole set
            means = [(coefficients[name], *totals[name]) for name in coefficients]
            totals["loss"] = (sum(factor * (total / (weight or 1.0)) for factor, total, weight in means), 1.0)
        metrics = {
            f"{self.label}/{name}": total / weight if weight else float("nan")
            for name, (total, weight) in totals.items()
        }
        if self._gives_outputs:
            over_all = self._over_the_whole_set(model, outputs)
            whole_set_metrics.check_names(over_all, totals)
            metrics |= {f"{self.label}/{name}": value for name, value in over_all.items()}
        return metrics

    @torch.no_grad()
    def _batch_losses(self, model: nn.Module, embedded: Sequence[Mapping[str, Tensor]]) -> Iterator[Row]:
        """A loss over a whole batch, for each stretch of `batch.global` samples of the set, from the rows of all ranks. Each rank computes all of them."""
        device, size = self.group.device, self._global_batch
        rows = {name: torch.cat([each[name] for each in embedded]) for name in embedded[0]}
        for i in range(-(-self.samples // size)):
            batch = {
                name: each[i * size : (i + 1) * size].to(device, copy=True) for name, each in rows.items()
            }
            seed_all(evaluation_batch_key(self.seed, i), device)
            with job_at(f"evaluation, the loss of batch {i}"):
                with evaluating(model), self.precision.autocast():
                    loss = self._with_parameters(partial(self.job.batch_loss, model, batch.get("", batch)))
                yield _numbers({name: _own(mean) for name, mean in means_of(loss, {}).items()})
            self.restore_buffers()

    def _in_order(self, by_rank: Sequence[Sequence[T]]) -> list[T]:
        """What the ranks have for their micro-batches, in the order of these."""
        if self.sharding is None:
            return [of_one for of_rank in by_rank for of_one in of_rank]
        return [of_one for together in zip_longest(*by_rank) for of_one in together if of_one is not None]

    def _over_the_whole_set(
        self, model: nn.Module, own: list[whole_set_metrics.Outputs]
    ) -> Mapping[str, float]:
        """Metrics over the outputs of all ranks, in micro-batch order. Rank 0 computes them; all ranks get them, or the error."""
        every = self.group.gather_first(own)
        result: whole_set_metrics.WholeSet | None = None
        wrong: LockstepError | None = None
        if every is not None:
            try:
                outputs = whole_set_metrics.joined([outputs for outputs in self._in_order(every) if outputs])
                result = self.over_all.compute(model, outputs)
            except LockstepError as error:
                wrong = error
        self.figures = result.figures if result is not None else {}
        metrics, refusal = self.group.gather((result.metrics if result else {}, wrong))[0]
        if refusal is not None:
            raise wrong or refusal
        return dict(metrics)

    def prepare(self, *, compares: bool) -> None:
        """Look whether the data draw. `compares` is whether each evaluation looks at what the whole-set functions keep. Call it in the training process."""
        self.over_all.compares = compares
        self.batches.check_draws_nothing(self._key(0))

    @property
    def last(self) -> int:
        """The number of the last micro-batch."""
        return -(-self.samples // self.micro_batch) - 1

    @torch.no_grad()
    def computed(self, model: nn.Module, i: int) -> tuple[Row, whole_set_metrics.Outputs]:
        """Totals and weights of one micro-batch, and its outputs."""
        batch = self._fetch(i)
        means, outputs = self._results(model, i, batch)
        return _numbers(means), outputs

    @torch.no_grad()
    def _own_results(
        self, model: nn.Module, alive: Callable[[], None]
    ) -> tuple[list[Row], list[whole_set_metrics.Outputs], list[dict[str, Tensor]]]:
        """Totals of each micro-batch of this rank; their outputs, joined in order where the rank's micro-batches are neighbours; and their rows for a loss
        over a whole batch.
        """
        assigned: Sequence[int] = self.assigned
        if self.sharding is not None:
            # In the last pass a worker that has none computes the first one of the pass again, and it does not count.
            self.sharding.order, firsts = 0, range(0, self.last + 1, self.group.size)
            assigned = [min(first + self.group.rank, self.last) for first in firsts]
        keys = list(map(self._key, assigned))
        loader = Loader(
            self.batches, keys, self.group.device, min(self.processes, len(assigned)), self.group.let_go
        )
        try:
            means, outputs, embedded = [], [], list[dict[str, Tensor]]()
            # Modules that do more in train() than set a mode do it for each micro-batch: nothing goes from one to the next.
            with nullcontext() if any(map(has_own_train, model.modules())) else evaluating(model):
                for i, batch in zip(assigned, loader, strict=True):
                    batch_means, batch_outputs = self._results(model, i, batch, embedded)
                    means.append(batch_means)
                    outputs.append(batch_outputs)
                    alive()
        finally:
            loader.close()
        if self.sharding is None:
            return [_numbers(row) for row in means], [whole_set_metrics.joined(outputs)], embedded
        count = len(range(self.group.rank, self.last + 1, self.group.size))
        return [_numbers(row) for row in means[:count]], outputs[:count], embedded[:count]

    def _with_parameters(self, compute: Callable[[], T]) -> T:
        """What `compute` returns; where parameters are sharded, all ranks compute together."""
        if self.sharding is None:
            return compute()
        try:
            return self.sharding.computed(compute)
        finally:
            self.sharding.reshard()

    def _fetch(self, i: int) -> Any:
        return next(Loader(self.batches, [self._key(i)], self.group.device))

    def _key(self, i: int) -> MicroBatch:
        end = min((i + 1) * self.micro_batch, self.samples)
        return MicroBatch(EVALUATION, i, list(range(i * self.micro_batch, end)))

    def _results(
        self, model: nn.Module, i: int, batch: Any, embedded: list[dict[str, Tensor]] | None = None
    ) -> tuple[dict[str, Mean], whole_set_metrics.Outputs]:
        """Means and outputs of one micro-batch, in memory of their own. A loss over a whole batch has its rows added to `embedded`, if given.

        The means stay on the device, so that nothing waits for it before the last micro-batch is launched. Modes are set for each
        micro-batch, because its worker may have run others before it.
        """
        where = f"evaluation micro-batch {i}, rank {self.group.rank}"
        seed_all(evaluation_key(self.seed, i), self.group.device)
        try:
            with job_at(where):
                with evaluating(model), self.precision.autocast():
                    # What the modules' own `eval()` writes, their `train()` takes back: the rehearsal compares bits.
                    parameters = ParameterWatch(model)
                    compute = partial(self._evaluated, model, i, batch, embedded)
                    loss, further, outputs = self._with_parameters(compute)
                    parameters.check(where)
                means = means_alone(further) if loss is None else means_of(loss, further)
                copies = {name: _own(mean) for name, mean in means.items()}
        finally:
            self.restore_buffers()
        return copies, outputs

    def _loss(self, model: nn.Module, i: int, batch: Any, embedded: list[dict[str, Tensor]] | None) -> Any:
        """The loss of one micro-batch; None where there is none by itself."""
        if self._has_batch_loss:
            if embedded is None:
                micro_batches = self._global_batch // self.micro_batch
                stretch = stretch_of(i, micro_batches, -(-self.samples // self.micro_batch))
                return evaluation_loss(self.job, model, i, batch, self._fetch, stretch)
            given = self.job.embed(model, batch)
            count, where = len(self._key(i).ids), f" (evaluation micro-batch {i})"
            named = rows_by_name(given, count, "job.embed", where)
            embedded.append({name: row.detach().to("cpu", copy=True) for name, row in named.items()})
            return None
        loss = self.job.loss(model, batch) if self._has_loss else None
        if isinstance(loss, Loss):
            self._coefficients |= {name: float(term.coefficient) for name, term in loss.terms.items()}
        return loss

    def _evaluated(
        self, model: nn.Module, i: int, batch: Any, embedded: list[dict[str, Tensor]] | None
    ) -> tuple[Any, Mapping[str, Mean], whole_set_metrics.Outputs]:
        """What the job computes of a micro-batch: its loss, metrics and outputs."""
        loss = self._loss(model, i, batch, embedded)
        further = self.job.metrics(model, batch)
        outputs = whole_set_metrics.taken(self.job.outputs(model, batch)) if self._gives_outputs else {}
        return loss, further, outputs


def has_evaluation_loss(job: Job) -> bool:
    """Whether an evaluation has a loss: with phases it may have metrics alone. JobError where there is nothing to evaluate."""
    if overrides(job, "loss") or not own_phases(job):
        return True
    if not overrides(job, "metrics") and not whole_set_metrics.has_outputs(job):
        raise problems.NOTHING_EVALUATED()
    return False


def has_batch_loss(job: Job) -> bool:
    """Whether the loss of an evaluation is one over stretches of `batch.global` samples."""
    return overrides(job, "batch_loss") and not overrides(job, "loss")


def stretch_of(i: int, micro_batches: int, count: int) -> range:
    """The evaluation micro-batches, `count` in all, whose rows a loss over the whole batch takes together with those of micro-batch `i`."""
    first = i // micro_batches * micro_batches
    return range(first, min(first + micro_batches, count))


def evaluation_loss(
    job: Job, model: nn.Module, i: int, batch: Any, fetch: Callable[[int], Any], stretch: range
) -> Loss:
    """The loss of evaluation micro-batch `i` before training. One over the whole batch takes the rows of its `stretch`, whose others `fetch` gives."""
    if not has_batch_loss(job):
        return job.loss(model, batch)
    each = [job.embed(model, batch if other == i else fetch(other)) for other in stretch]
    if isinstance(each[0], Tensor):
        return job.batch_loss(model, torch.cat(each))  # type: ignore[arg-type]
    return job.batch_loss(model, {name: torch.cat([rows[name] for rows in each]) for name in each[0]})  # type: ignore[index]


def _own(mean: Mean) -> Mean:
    """A mean in memory of its own, without its graph: the job may write to its tensors, and buffers are put back."""
    total, weight = (
        value.detach().clone() if isinstance(value, Tensor) else value for value in (mean.total, mean.weight)
    )
    return Mean(total, weight)


def _numbers(row: dict[str, Mean]) -> Row:
    return {name: (float(mean.total), float(mean.weight)) for name, mean in row.items()}
