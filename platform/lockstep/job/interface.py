"""What a user writes: the model, the data and the loss.

A job holds no training loop, no device, no rank and no seed: the same job runs in one process or in many.
Importing this module costs nothing but torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import pydantic
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, default_collate

T = TypeVar("T")

IS_PLACEMENT = object()
"""Marks a param as placement, in the metadata of its type."""

Placement = Annotated[T, IS_PLACEMENT]
"""The type of a param that says where something lies or what it may take, never what it is: `train: Placement[str]`.

It is no part of a run's identity, so a resume may change it. Data that are moved are the same data by their fingerprint.
"""


class Params(pydantic.BaseModel):
    """A job's own settings, filled from the spec's `job.params`; unknown names are refused.

    Types are converted as pydantic usually does, so that a tuple, a path or an enum can be written in YAML.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean that is not divided yet: `total / weight` once all micro-batches are summed.

    `total` and `weight` are scalars, tensors of no dimension or numbers. A weight is what the total is
    divided by in the end: samples, or tokens.
    """

    total: Tensor | float
    weight: Tensor | float


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of one micro-batch as a sum and its weight, with further means to record beside it.

    `total` is a tensor of no dimension with a gradient: the *sum* of the losses, never their mean.
    `parts` are recorded as `train/<name>` and `eval/<name>`; every micro-batch gives the same names, and none is `loss`, `lr`,
    `grad_norm`, `clipped_norm`, `scale` or `skipped`, which are recorded of each step.
    """

    total: Tensor
    weight: Tensor | float
    parts: Mapping[str, Mean] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of each step that learns by itself: a loss of its own, and the parameters that it alone updates.

    `loss` takes the model and a micro-batch, as `Job.loss` does. `parameters` are names of parameters, or of modules for all
    parameters in them. `optimizer` makes one of its own from those parameters, such as `partial(torch.optim.Adam, lr=2e-4)`; without
    it, the phase has one of the kind that the spec names. `draws_as` is another phase of the step whose seeds this one takes:
    both then draw the same numbers in the same order.
    """

    name: str
    loss: Callable[[nn.Module, Any], Loss]
    parameters: Sequence[str]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    draws_as: str | None = None


class Job:
    """Base of every job. Override `model`, `train_data` and `loss`, or `phases` in its place; the rest has defaults."""

    Params: ClassVar[type[Params]] = Params
    params: Any

    def __init__(self, params: Any) -> None:
        """Keep `params`. A job's own calls `super().__init__(params)`; the generators are seeded alike in every process.

        It is called in every worker, and wherever the job is looked at: keep it cheap, and open data in `train_data`.
        """
        self.params = params

    def model(self) -> nn.Module:
        """A freshly initialised model on the CPU; the generators are seeded before the call."""
        raise NotImplementedError

    def train_data(self) -> Dataset[Any]:
        """A map-style dataset: `__len__` and `__getitem__`, or `__getitems__` for a whole micro-batch at once."""
        raise NotImplementedError

    def eval_data(self) -> Dataset[Any] | None:
        """The held-out dataset, or None for a run without evaluation."""
        return None

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Loss of one collated micro-batch, already on the worker's device. With `phases` it is the evaluation's alone."""
        raise NotImplementedError

    def phases(self) -> Sequence[Phase]:
        """The phases of a step, in the order in which they are taken; none for a job with one loss and one optimizer.

        Each walks over the same micro-batches, and updates its parameters before the next one begins.
        """
        return ()

    def frozen_parameters(self, model: nn.Module, step: int) -> Iterable[str]:
        """Names of parameters, or of modules, that rest in step number `step`, counted from 1: the same whenever it is asked.

        They get no gradient in it and no update, and what the optimizer keeps of them stays as it is. A phase of which all rests is left out.
        """
        return ()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Mean]:
        """Further means of one evaluation micro-batch. The loss and its parts are always recorded."""
        return {}

    def outputs(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor | list[Any]]:
        """What `whole_set_metrics` and `figures` need of one evaluation micro-batch, by name.

        A tensor whose first dimension counts samples (or tokens, or boxes), or a list; of one type and shape of a row in
        all micro-batches.
        """
        return {}

    def whole_set_metrics(self, outputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Metrics over the outputs of the whole evaluation set, joined in micro-batch order; called on one rank alone.

        By name a number, several in a row or by name, or an object with `update` and `compute` as torchmetrics has them:
        it is given the outputs that its `update` names.
        """
        return {}

    def figures(self, outputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Figures of an evaluation by the name of their file, over the same outputs: text, a figure of matplotlib, or a table.

        A table is numbers in rows and columns, such as a confusion matrix. They are recorded with the evaluation.
        """
        return {}

    def collate(self, samples: Sequence[Any]) -> Any:
        """One micro-batch out of its samples; torch's `default_collate` unless overridden.

        What a dataset's `__getitems__` gives as a mapping, as a table does, is a micro-batch already and stays as it is.
        """
        return samples if isinstance(samples, Mapping) else default_collate(list(samples))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """An optimizer of the job's own, or None for the one that the spec names."""
        return None

    def schedule(
        self, optimizer: torch.optim.Optimizer, updates: int
    ) -> Callable[[int], float] | LRScheduler | None:
        """A schedule of the job's own, or None for the one that the spec names.

        Either a function of the number of updates done, which gives the factor on each group's learning rate for the next
        one (`updates` is the most that the run takes), or a scheduler of torch over `optimizer`, whose state is kept.
        """
        return None

    def after_step(self, model: nn.Module, step: int) -> None:
        """What follows an update, on every rank alike: move a teacher, clip weights, lower a temperature.

        `step` is the number of the step, counted from 1; a step that the loss scaler skips is no update. Called without
        gradients and with seeded generators. It may write to the model's parameters and buffers, never put others in their
        place; what it changes of the job itself belongs in `state_dict`.
        """

    def state_dict(self) -> Mapping[str, Any]:
        """What the job itself changes in training and a resumed run needs: tensors and plain values, the same on every worker.

        Checkpoints keep it, and `load_state_dict` is given it back.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; called before the first step of a resumed run, where it gave anything."""
        raise NotImplementedError("a job with a state_dict needs a load_state_dict")

    def example_input(self) -> Any:
        """Arguments for one call of the model, for export and for the record; None where there are none."""
        return None

    def identity(self) -> Mapping[str, Any]:
        """What else decides about the run's bits, by name: versions of libraries, digests of files that the job reads by itself.

        Text and numbers. Each is a field `job.identity.<name>` of the run's identity: a resume refuses to go on where one differs.
        """
        return {}

    def save_pretrained(self, model: nn.Module, folder: Path) -> None:
        """Write the model into an empty folder as the library that it is from does, for `lockstep export --format pretrained`.

        By default the model's own `save_pretrained`, as of Hugging Face's libraries. Raises NotImplementedError where it has none.
        """
        save = getattr(model, "save_pretrained", None)
        if not callable(save):
            raise NotImplementedError(f"{type(model).__name__} has no save_pretrained(folder)")
        save(folder)

    def load_pretrained(self, model: nn.Module, folder: Path) -> nn.Module:
        """What `save_pretrained` wrote of `model`, read again; by default by `from_pretrained` of the model's class."""
        loaded: nn.Module = type(model).from_pretrained(folder)  # type: ignore[attr-defined]
        return loaded

    def activation_checkpoints(self, model: nn.Module) -> Iterable[nn.Module]:
        """Modules whose activations are recomputed in backward when `activation_checkpointing` is on."""
        return ()

    def conditional_parameters(self, model: nn.Module) -> Iterable[str]:
        """Names of parameters that some micro-batches rightly leave without a gradient; they get zeros then."""
        return ()


def overrides(job: Job, name: str) -> bool:
    """Whether a job has a method of its own in the place of the base's."""
    return getattr(type(job), name) is not getattr(Job, name)
