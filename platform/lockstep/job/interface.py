"""What a user writes: the model, the data and the loss.

A job holds no training loop, no device, no rank and no seed: the same job runs in one process or in many.
Importing this module costs nothing but torch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import pydantic
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import Dataset

from lockstep.job.collation import collated
from lockstep.job.problems import UPDATES_PER_EPOCH

T = TypeVar("T")

IS_PLACEMENT = object()
"""Marks a param as placement, in the metadata of its type."""

Placement = Annotated[T, IS_PLACEMENT]
"""The type of a param that says where something is or what resources it may use, never what it is: `train: Placement[str]`.

It is not part of a run's identity, so a resume may change it. Data that were moved are recognised by their fingerprint.
"""


class Params(pydantic.BaseModel):
    """A job's own settings, filled from the spec's `job.params`; unknown names are refused.

    pydantic converts the types, so a tuple, a path or an enum can be written in YAML.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean that is not divided yet: `total / weight` once all micro-batches are summed.

    `total` and `weight` are numbers or tensors of no dimension. The weight is what the total is divided by in the end:
    samples, or tokens.
    """

    total: Tensor | float
    weight: Tensor | float


@dataclass(frozen=True, slots=True)
class Term:
    """A term of a loss that has a denominator of its own: its sum, the weight that the sum is divided by, and a factor.

    `total` is a tensor of no dimension; `weight` counts what the sum is over, such as boxes. A step takes
    `coefficient * (total / weight)`, with total and weight over its whole global batch; a term whose weight is 0 there adds nothing.
    """

    total: Tensor
    weight: Tensor | float
    coefficient: float = 1.0

    def mean(self, weight: Tensor | float) -> Tensor:
        """The term over `weight`; with a weight of 0 its total, which is then 0 as well."""
        divisor = weight + (weight == 0) if isinstance(weight, Tensor) else weight or 1.0
        return self.coefficient * (self.total / divisor)


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of one micro-batch as a sum and its weight, with further means to record.

    `total` is a tensor of no dimension with a gradient: the *sum* of the losses, never their mean.
    `parts` are recorded as `train/<name>` and `eval/<name>`; every micro-batch gives the same names, and none is `loss`, `lr`,
    `grad_norm`, `clipped_norm`, `scale` or `skipped`, which each step records anyway.
    A loss of several means with different denominators is made by `Loss.of_terms`.
    `statistics` are for `after_step`, like those of `Job.step_statistics`: what the loss has computed anyway.
    """

    total: Tensor
    weight: Tensor | float
    parts: Mapping[str, Mean] = field(default_factory=dict)
    terms: Mapping[str, Term] = field(default_factory=dict)
    statistics: Mapping[str, Mean | Tensor] = field(default_factory=dict)

    @classmethod
    def of_terms(
        cls,
        terms: Mapping[str, Term],
        parts: Mapping[str, Mean] | None = None,
        statistics: Mapping[str, Mean | Tensor] | None = None,
    ) -> Loss:
        """The sum of several terms, each divided by its own weight over the whole step; every micro-batch gives the same ones.

        Each term is also recorded as the part of its name, without its coefficient.
        """
        total = reduce(operator.add, [term.mean(term.weight) for term in terms.values()])
        term_means = {name: Mean(term.total.detach(), term.weight) for name, term in terms.items()}
        return cls(total, 1.0, {**term_means, **(parts or {})}, terms, statistics or {})


Rows = Tensor | Mapping[str, Tensor]
"""A tensor whose first dimension counts samples, or several by name."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of each step with its own loss, and parameters that only this phase updates.

    `loss` takes the model and a micro-batch, as `Job.loss` does. `parameters` are names of parameters, or of modules for all
    parameters in them. `optimizer` makes an optimizer from those parameters, such as `partial(torch.optim.Adam, lr=2e-4)`; by default
    it is of the kind that the spec names. `draws_as` is another phase of the step whose seeds this one takes:
    both then draw the same numbers in the same order. With `embed`, which takes model and micro-batch as `Job.embed` does, the `loss` is
    one over the whole global batch: it takes the model and the rows, as `Job.batch_loss` does.
    """

    name: str
    loss: Callable[[nn.Module, Any], Loss]
    parameters: Sequence[str]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    draws_as: str | None = None
    embed: Callable[[nn.Module, Any], Rows] | None = None


@dataclass(frozen=True, slots=True)
class Plateau:
    """A `ReduceLROnPlateau` and the metric of the evaluations that it is stepped with, such as `eval/accuracy`."""

    scheduler: ReduceLROnPlateau
    metric: str


@dataclass(frozen=True, slots=True)
class PerEpoch:
    """A torch scheduler that is stepped at the end of each epoch, as most loops step `StepLR` or `MultiStepLR`."""

    scheduler: LRScheduler


class Updates(int):
    """The most updates that a run can make, a whole number; `per_epoch` of them make an epoch, and `epochs` are begun."""

    epochs: int
    _per_epoch: int | None

    def __new__(cls, updates: int, per_epoch: int | None, epochs: int | None = None) -> Updates:
        """`per_epoch` is None where epochs have different numbers of updates; then `epochs` is given."""
        number = super().__new__(cls, updates)
        number._per_epoch = per_epoch
        number.epochs = -(-updates // per_epoch) if epochs is None and per_epoch else epochs or 0
        return number

    def __getnewargs__(self) -> tuple[int, int | None, int]:  # type: ignore[override]
        return int(self), self._per_epoch, self.epochs

    @property
    def per_epoch(self) -> int:
        """Updates of an epoch. Raises JobError where `batch.global` changes during the run: epochs then differ in it."""
        if self._per_epoch is None:
            raise UPDATES_PER_EPOCH()
        return self._per_epoch


class Job:
    """Base class of every job. Override `model`, `train_data`, and `loss` or `phases`; the rest has defaults."""

    Params: ClassVar[type[Params]] = Params
    placement_variables: ClassVar[Collection[str]] = ()
    """Environment variables that the job reads and that say where something is, never what it is: they are no part of a run's identity."""
    closure_calls: ClassVar[int] = 0
    """How often an optimizer of the job's own may evaluate the loss again in one update, by calling the closure that its `step` then gets."""
    params: Any
    _model_warnings: Sequence[str] = ()
    """What a run warns of when one of Lockstep's own jobs has made its model."""

    def __init__(self, params: Any) -> None:
        """Keep `params`. An override calls `super().__init__(params)`; the generators have the same seed in every process.

        It is called in every worker, and also by commands that only inspect the job: keep it cheap, and open data in `train_data`.
        """
        self.params = params

    def model(self) -> nn.Module:
        """A freshly initialised model on the CPU; the generators are seeded before the call."""
        raise NotImplementedError

    def train_data(self) -> Dataset[Any]:
        """A map-style dataset: `__len__` and `__getitem__`, or `__getitems__` for a whole micro-batch at once."""
        raise NotImplementedError

    def eval_data(self) -> Dataset[Any] | Mapping[str, Dataset[Any]] | None:
        """The held-out dataset, several by name, or None for a run without evaluation.

        The metrics of a set with a name are recorded as `eval/<set>/<metric>`.
        """
        return None

    def test_data(self) -> Dataset[Any] | Mapping[str, Dataset[Any]] | None:
        """What is evaluated once, when the run has finished, from the weights that it keeps; several sets by name, or None.

        Its metrics are recorded as `test/<metric>` or `test/<set>/<metric>`, and decide nothing.
        """
        return None

    def eval_weights(
        self, model: nn.Module, optimizer: Any, batches: Callable[[int], Iterable[Any]]
    ) -> AbstractContextManager[Any]:
        """A context in which the model has the weights to evaluate and to keep, where they are not those that are trained.

        Written as `eval_weights(model, optimizer)` or `eval_weights(model, optimizer, batches)`, mostly with `contextlib.contextmanager`.
        `batches(n)` are the first n micro-batches of the run in order, collated and on the device, for statistics such as those of
        `torch.optim.swa_utils.update_bn`. Parameters, buffers and modes come back by themselves, bit for bit. Every worker calls it alike; the
        generators are seeded, and gradients disabled. With phases `optimizer` is a mapping by their names.
        """
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Loss of one collated micro-batch, already on the worker's device. With `phases` or `batch_loss`, used only in evaluation."""
        raise NotImplementedError

    def embed(self, model: nn.Module, batch: Any) -> Rows:
        """What `batch_loss` needs of one collated micro-batch: a row for each sample, in their order, such as embeddings and labels.

        A tensor whose first dimension counts the samples, or a mapping of such tensors by name. Names, types and shapes of a row are the same in
        all micro-batches. It is called twice for each micro-batch of a step, and must give the same bits.
        """
        raise NotImplementedError

    def batch_loss(self, model: nn.Module, rows: Any) -> Loss:
        """The loss of a whole global batch, from what `embed` gave for all of its samples, in the order of the epoch.

        `rows` has the form that `embed` returns: a tensor, or a mapping. A job with `embed` and `batch_loss` needs no `loss`. Every
        worker computes it alike. The total is a sum with its weight, or a mean with the weight 1.
        """
        raise NotImplementedError

    def term_weights(self, batch: Any) -> Mapping[str, Tensor | float]:
        """The weights of the terms of `Loss.of_terms` in one collated micro-batch, by their names, where the data alone give them.

        A step divides each term by its weight over all of its micro-batches, which it must know before the first backward. Without this method
        it computes each forward twice to learn them.
        """
        raise NotImplementedError

    def phases(self) -> Sequence[Phase]:
        """The phases of a step, in the order in which they are taken; none for a job with one loss and one optimizer.

        Each walks over the same micro-batches, and updates its parameters before the next one begins.
        """
        return ()

    def frozen_parameters(self, model: nn.Module, step: int) -> Iterable[str]:
        """Names of parameters, or of modules, that are frozen in step number `step`, counted from 1.

        It must return the same names for the same step. In that step they get no gradient and no update, and their optimizer state does
        not change. A phase whose parameters are all frozen is skipped.
        """
        return ()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Mean]:
        """Further means of one evaluation micro-batch. The loss and its parts are always recorded."""
        return {}

    def outputs(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor | list[Any]]:
        """What `whole_set_metrics` and `figures` need of one evaluation micro-batch, by name.

        A tensor whose first dimension counts samples (or tokens, or boxes), or a list. Type and shape of a row are the same in
        all micro-batches.
        """
        return {}

    def whole_set_metrics(self, outputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Metrics over the outputs of the whole evaluation set, joined in micro-batch order; called on one rank only.

        Each name has a number, a sequence or mapping of numbers, or an object with `update` and `compute`, such as a metric of
        torchmetrics: its `update` gets the outputs that its parameters name.
        """
        return {}

    def figures(self, outputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Figures of an evaluation over the same outputs, by file name: text, a matplotlib figure, or a table.

        A table is numbers in rows and columns, such as a confusion matrix. Figures are recorded with the evaluation.
        """
        return {}

    def collate(self, samples: Sequence[Any]) -> Any:
        """Make one micro-batch from its samples; by default as torch's `default_collate` does.

        A `Counter` keeps its counts, with the keys of all samples. If the dataset's `__getitems__` returns a mapping, as a table's
        does, that is the micro-batch already and is used as it is.
        """
        return samples if isinstance(samples, Mapping) else collated(samples)

    def lengths(self, data: Dataset[Any]) -> Sequence[int] | Tensor | None:
        """The length of each sample of the training data, such as its tokens, in the order of the ids; for `data.shuffle: by_length`.

        None for the attribute `lengths` of the dataset. It must be the same whenever it is asked for.
        """
        return None

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None:
        """The job's own optimizer, or None for the one in the spec.

        A list of several, each with parameters of its own, is stepped in its order in each step: such as `SparseAdam` for tables, and another for the rest.
        """
        return None

    def schedule(
        self, optimizer: torch.optim.Optimizer, updates: Updates
    ) -> Callable[[int], float] | LRScheduler | PerEpoch | Plateau | None:
        """The job's own schedule, or None for the one in the spec.

        Either a function from the number of updates done to the factor on each group's learning rate in the next update, or
        a torch scheduler over `optimizer`, whose state is saved. It is stepped after each update; in a `lockstep.PerEpoch` at the end of each epoch. A
        `ReduceLROnPlateau` is stepped after each evaluation: with `eval/loss`, or in a `lockstep.Plateau` with the metric that it names.
        `updates` is the most updates that the run can make, a whole number; `updates.per_epoch` and `updates.epochs` say how they fall into epochs.
        """
        return None

    def step_statistics(self, model: nn.Module, batch: Any) -> Mapping[str, Mean | Tensor]:
        """What `after_step` needs of one micro-batch, beside what the loss gives in `Loss.statistics`: means or rows, by name.

        Each `Mean` is summed over the step along the tree, total and weight, which may be tensors of any shape. Each tensor has a row for each sample; those of the step are
        joined in the order of the epoch. It is called after the backward of each micro-batch, without gradients and with the seeds of its loss.
        """
        return {}

    def after_step(self, model: nn.Module, step: int, *statistics: Any, **_: Any) -> None:
        """Called after each update, the same on every rank: move a teacher, clip weights, lower a temperature.

        Written as `after_step(model, step)`, or as `after_step(model, step, statistics)` with the statistics of the step by name.

        `step` is the number of the step, counted from 1; a step that the loss scaler skips is no update. Gradients are
        disabled and the generators are seeded. It may write to the model's parameters and buffers, but do not replace them;
        what it changes of the job itself belongs in `state_dict`.
        """

    def state_dict(self) -> Mapping[str, Any]:
        """State of the job itself that training changes and a resumed run needs: tensors and plain values, the same on every worker.

        It is saved in checkpoints and passed to `load_state_dict`.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; called before the first step of a resumed run, if it returned anything."""
        raise NotImplementedError("a job with a state_dict needs a load_state_dict")

    def example_input(self) -> Any:
        """Arguments for one call of the model, for export and for the record; None if the job gives none."""
        return None

    def identity(self) -> Mapping[str, Any]:
        """Whatever else affects the run's bits, by name: versions of libraries, digests of files that the job reads by itself.

        Values are text or numbers. Each is a field `job.identity.<name>` of the run's identity; a resume is refused if one differs.
        """
        return {}

    def save_pretrained(self, model: nn.Module, folder: Path) -> None:
        """Write the model into an empty folder in the format of its library, for `lockstep export --format pretrained`.

        By default this calls the model's own `save_pretrained`, which models of Hugging Face's libraries have. Raises
        NotImplementedError if the model has none.
        """
        save = getattr(model, "save_pretrained", None)
        if not callable(save):
            raise NotImplementedError(f"{type(model).__name__} has no save_pretrained(folder)")
        save(folder)

    def load_pretrained(self, model: nn.Module, folder: Path) -> nn.Module:
        """Read what `save_pretrained` wrote; by default with `from_pretrained` of the model's class."""
        loaded: nn.Module = type(model).from_pretrained(folder)  # type: ignore[attr-defined]
        return loaded

    def activation_checkpoints(self, model: nn.Module) -> Iterable[nn.Module]:
        """Modules whose activations are recomputed in backward when `activation_checkpointing` is on."""
        return ()

    def conditional_parameters(self, model: nn.Module) -> Iterable[str]:
        """Names of parameters that get no gradient in some micro-batches, by design; there the gradient is zero."""
        return ()


def overrides(job: Job, name: str) -> bool:
    """Whether a job has a method of its own in the place of the base's."""
    return getattr(type(job), name) is not getattr(Job, name)
