"""What a job's loss hands to torch's own losses: labels, classes, and what guessing would cost.

A mode sees the calls while the job's loss runs, so a job needs to say nothing about its labels.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

MOST_CLASSES = 1 << 20
"""Of an output with more classes, labels are not counted."""

_ROUNDING = 1e-3
"""How far from 1 the sum of a row of probabilities may be, in half precision too."""

_FAR = 0.05
"""How far from 1 it has to be to be none."""


@dataclass(slots=True)
class ClassLabels:
    """The labels of all calls of a cross-entropy over `classes` classes, and what went in with them."""

    classes: int
    counts: Tensor
    """How often each class is the label, (classes,), int64, on the CPU."""
    calls_with: Tensor
    """In how many calls each class is a label, likewise: labels of one sample are often alike."""
    calls: int = 0
    ignored: int = 0
    rows: int = 0
    probabilities: int = 0
    """Rows whose logits, or log-probabilities, are probabilities: none negative, the sum 1."""
    unnormalised: int = 0
    """Rows of log-probabilities whose probabilities are far from adding up to 1."""
    logs: bool = False
    """Whether `nll_loss` was called, which is given log-probabilities."""
    loss: float = 0.0
    """Sum of the losses of all labels that count."""

    def add(self, logits: Tensor, labels: Tensor, ignore: int, *, logs: bool) -> None:
        """Count one call. `logits` are (rows, classes), `labels` (rows,); with `logs` they are log-probabilities."""
        counted = labels != ignore
        self.ignored += int((~counted).sum())
        used, counted_labels = logits[counted].double(), labels[counted]
        if not len(counted_labels):
            return
        counts = torch.bincount(counted_labels, minlength=self.classes)[: self.classes].cpu()
        self.counts += counts
        self.calls_with += counts > 0
        self.calls += 1
        self.rows += len(counted_labels)
        if logs:
            self.logs = True
            self.unnormalised += int(((used.exp().sum(1) - 1).abs() > _FAR).sum())
        if self.classes > 1:
            sums = (used.sum(1) - 1).abs() < _ROUNDING
            self.probabilities += int((sums & (used >= 0).all(1)).sum())
        self.loss += float(F.nll_loss(used if logs else used.log_softmax(1), counted_labels, reduction="sum"))

    @property
    def chance(self) -> float:
        """The mean loss of one who gives every class the same probability."""
        return math.log(self.classes)


@dataclass(slots=True)
class BinaryLabels:
    """The labels of all calls of a binary cross-entropy with logits."""

    rows: int = 0
    positive: float = 0.0
    outside: int = 0
    """Labels below 0 or above 1."""
    probabilities: int = 0
    """Logits above 0 and below 1."""
    spread: float = 0.0
    """The greatest distance between logits of one call."""
    loss: float = 0.0

    def add(self, logits: Tensor, labels: Tensor) -> None:
        targets = labels.double()
        self.probabilities += int(((logits > 0) & (logits < 1)).sum())
        self.spread = max(self.spread, float(logits.max() - logits.min())) if logits.numel() else self.spread
        self.rows += targets.numel()
        self.positive += float(targets.sum())
        self.outside += int(((targets < 0) | (targets > 1)).sum())
        self.loss += float(F.binary_cross_entropy_with_logits(logits.double(), targets, reduction="sum"))

    chance = math.log(2)
    """The mean loss of one who says one half."""


@dataclass(slots=True)
class Numbers:
    """The targets of all calls of a squared error, and the shapes that other errors of numbers were given."""

    rows: int = 0
    sum: float = 0.0
    squares: float = 0.0
    loss: float = 0.0
    stretched: str = ""
    """Shapes of outputs and targets that were not the same, so that each was held against several of the other."""

    def compare(self, name: str, outputs: Tensor, targets: Tensor) -> None:
        """Note a call of the loss `name` whose outputs and targets are not of one shape."""
        if outputs.shape != targets.shape:
            self.stretched = f"{name} is given outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)}"

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Count one call of a squared error."""
        predicted = outputs.double()
        expected = targets.double() + torch.zeros_like(predicted)
        self.rows += expected.numel()
        self.sum += float(expected.sum())
        self.squares += float((expected * expected).sum())
        self.loss += float(((predicted - expected) ** 2).sum())

    @property
    def chance(self) -> float:
        """The mean loss of one who always says the mean of the targets: their variance."""
        return self.squares / self.rows - (self.sum / self.rows) ** 2


@dataclass(slots=True)
class LossInputs:
    """What all calls of torch's losses were given, by kind of loss; labels of classes by the number of classes."""

    classes: dict[int, ClassLabels] = field(default_factory=dict)
    binary: BinaryLabels = field(default_factory=BinaryLabels)
    numbers: Numbers = field(default_factory=Numbers)


class LossInputsMode(TorchFunctionMode):
    """While it is entered, notes into `inputs` what torch's losses are called with. It changes no result."""

    def __init__(self, inputs: LossInputs) -> None:
        super().__init__()
        self.inputs = inputs

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _NOTED:
            bound = inspect.signature(func).bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            if any(_is_symbolic(bound.arguments[name]) for name in ("input", "target")):
                return result
            with torch.no_grad(), torch.autocast(bound.arguments["input"].device.type, enabled=False):
                self._note(func, bound.arguments)
        return result

    def _note(self, func: Callable[..., Any], arguments: dict[str, Any]) -> None:
        output, target = arguments["input"].detach(), arguments["target"].detach()
        if func is F.binary_cross_entropy_with_logits:
            self.inputs.binary.add(output, target)
        elif func in _OF_NUMBERS:
            self.inputs.numbers.compare(func.__name__, output, target)
            if func is F.mse_loss:
                self.inputs.numbers.add(output, target)
        elif not target.is_floating_point():
            classes = output.shape[-1] if output.dim() == 1 else output.shape[1]
            if classes > MOST_CLASSES:
                return
            rows = output.reshape(1, -1) if output.dim() == 1 else output.movedim(1, -1).reshape(-1, classes)
            none = torch.zeros(classes, dtype=torch.int64)
            noted = self.inputs.classes.setdefault(classes, ClassLabels(classes, none, none.clone()))
            noted.add(rows, target.reshape(-1), arguments["ignore_index"], logs=func is F.nll_loss)


def _is_symbolic(tensor: Tensor) -> bool:
    """Whether it stands for many, under `torch.func.vmap` and its like: then it has no values to look at."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


_OF_NUMBERS = frozenset({F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss})
_NOTED = frozenset({F.cross_entropy, F.nll_loss, F.binary_cross_entropy_with_logits}) | _OF_NUMBERS
