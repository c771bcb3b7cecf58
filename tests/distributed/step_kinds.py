"""Jobs that follow a step: what `after_step` changes, an average of the weights, and what is refused of it."""

from __future__ import annotations

import copy
import math
import re
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

import lockstep
from lockstep import Loss
from lockstep.data import Mixture, Packed
from lockstep.training import problems
from lockstep.training.integrity import problems as integrity_problems
from lockstep.training.step import problems as step_problems
from tests.distributed.kinds import CLASSES, FEATURES, Kind, Refusal, held_in, perceptron

# --- after an update ------------------------------------------------------------------------------------------


class ClippedCritic(Kind):
    """Arjovsky et al. 2017: weights are clipped after each update."""

    def after_step(self, model: nn.Module, step: int) -> None:
        for parameter in model.parameters():
            parameter.clamp_(-0.2, 0.2)


class TeacherAfterStep(Kind):
    """A frozen teacher moves a little each step, by a share that falls, with noise; every micro-batch reads it."""

    share = 0.5

    def model(self) -> nn.Module:
        student = perceptron(FEATURES, CLASSES, nn.BatchNorm1d(8))
        return nn.ModuleDict({"student": student, "teacher": copy.deepcopy(student).requires_grad_(False)})

    def after_step(self, model: nn.Module, step: int) -> None:
        self.share /= 1 + step
        for mine, other in zip(model["teacher"].parameters(), model["student"].parameters(), strict=True):
            mine.lerp_(other, self.share).add_(torch.randn_like(mine), alpha=0.01)
        for mine, other in zip(model["teacher"].buffers(), model["student"].buffers(), strict=True):
            mine.copy_(other)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model["student"], batch)
        x, _ = batch
        far = F.mse_loss(model["student"](x), model["teacher"](x), reduction="sum")
        return Loss(loss.total + far, loss.weight, loss.parts)

    def state_dict(self) -> dict[str, Any]:
        return {"share": self.share}

    def load_state_dict(self, state: Any) -> None:
        self.share = state["share"]


class ReadsItsGradients(Kind):
    """The gradients of the last update scale the inputs of the next step."""

    def model(self) -> nn.Module:
        model = perceptron(7, CLASSES)  # gradients of 7 numbers a row lie anywhere in a bucket
        model.register_buffer("steepness", torch.zeros(()))
        return model

    def after_step(self, model: nn.Module, step: int) -> None:
        slopes = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
        model.steepness.copy_(torch.stack(slopes).sum())

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return super().loss(model, (F.pad(x, (0, 1)) * (1 + model.steepness), y))


class Averaged(Kind):
    """One line of the spec: evaluated is the average of the weights."""

    more: ClassVar[dict[str, Any]] = {"ema": 0.7}

    def model(self) -> nn.Module:
        return perceptron(FEATURES, CLASSES, nn.BatchNorm1d(8), nn.Dropout(0.2))


class AveragedAndClipped(ClippedCritic):
    """The average is taken of what `after_step` left; a frozen layer and tied weights are the model's own."""

    more: ClassVar[dict[str, Any]] = {"ema": 0.9, "early_stop": {"patience": 5}}

    def model(self) -> nn.Module:
        first, tied = nn.Linear(FEATURES, FEATURES).requires_grad_(False), nn.Linear(FEATURES, FEATURES)
        return nn.Sequential(first, tied, nn.Tanh(), tied, nn.Linear(FEATURES, CLASSES))


# --- schedules of the job's own --------------------------------------------------------------------------------


class RateByFunction(Kind):
    """Warm-up and half a cosine, as nanoGPT writes them."""

    def schedule(self, optimizer: torch.optim.Optimizer, updates: int) -> Any:
        def factor(update: int) -> float:
            if update < 1:
                return (update + 1) / 2
            return 0.1 + 0.45 * (1 + math.cos(math.pi * (update - 1) / (updates - 1)))

        return factor


class FallsEveryEpoch(Kind):
    """torchvision's references: `lr_scheduler.step()` after each epoch, over a StepLR."""

    def schedule(self, optimizer: torch.optim.Optimizer, updates: lockstep.Updates) -> lockstep.PerEpoch:
        assert (int(updates), updates.per_epoch, updates.epochs) == (updates, 3, -(-updates // 3))
        return lockstep.PerEpoch(lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5))


class WarmsUpForAnEpoch(Kind):
    """A scheduler by updates that is made of epochs, and keeps their number in its state."""

    def schedule(self, optimizer: torch.optim.Optimizer, updates: lockstep.Updates) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, total_steps=updates, pct_start=1 / updates.epochs
        )


class Restarts(Kind):
    def schedule(self, optimizer: torch.optim.Optimizer, updates: int) -> Any:
        return lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=3)


class MovedMomentum(Kind):
    """Its scheduler moves the momentum of the optimizer as well."""

    def schedule(self, optimizer: torch.optim.Optimizer, updates: int) -> Any:
        return lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=updates + 1)


class Milestones(Kind):
    """Two schedulers, one after the other; one of them keeps a Counter."""

    more: ClassVar[dict[str, Any]] = {"ema": 0.5}

    def schedule(self, optimizer: torch.optim.Optimizer, updates: int) -> Any:
        rising = lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=1)
        falling = lr_scheduler.MultiStepLR(optimizer, [1, 2], gamma=0.5)
        return lr_scheduler.SequentialLR(optimizer, [rising, falling], milestones=[1])


class LaterMilestones(Kind):
    """The second scheduler begins after the step at which a run here is stopped."""

    def schedule(self, optimizer: torch.optim.Optimizer, updates: int) -> Any:
        rising = lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=2)
        falling = lr_scheduler.MultiStepLR(optimizer, [1, 1, 2], gamma=0.5)
        return lr_scheduler.SequentialLR(optimizer, [rising, falling], milestones=[2])


class FallsWhenNothingImproves(Kind):
    """pytorch/examples' word_language_model: a quarter of the rate where an evaluation is not the best."""

    more: ClassVar[dict[str, Any]] = {"evaluate": {"every": {"steps": 1}}}

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=20.0)

    def schedule(self, optimizer: torch.optim.Optimizer, updates: int) -> Any:
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.25, patience=0, threshold=0.0)


# --- metrics of the whole set ---------------------------------------------------------------------------------


class Streamed:
    """A metric as torchmetrics has them: it adds up in float32, so the order of what it is given shows."""

    def __init__(self) -> None:
        self.total = torch.zeros(())

    def update(self, scores: torch.Tensor, labels: torch.Tensor) -> None:
        for score, label in zip(scores, labels, strict=True):
            self.total = self.total * 0.9 + score[label].exp()

    def compute(self) -> torch.Tensor:
        return self.total

    def reset(self) -> None:
        self.total = torch.zeros(())


class WholeSet(Kind):
    """AUROC, F1 by class, perplexity, a confusion matrix and a metric object."""

    more: ClassVar[dict[str, Any]] = {"early_stop": {"metric": "eval/auroc", "mode": "max"}, "ema": 0.5}

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.streamed = Streamed()

    def outputs(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        x, y = batch
        scores = model(x)
        loss = F.cross_entropy(scores, y, reduction="none")
        return {"scores": scores, "labels": y, "loss": loss, "names": [f"{i:.3f}" for i in x[:, 0].tolist()]}

    def whole_set_metrics(self, outputs: Any) -> dict[str, Any]:
        scores, labels = outputs["scores"], outputs["labels"]
        confusion = confusion_of(scores, labels)
        right = confusion.diagonal()
        return {
            "auroc": auroc(scores[:, 0], labels == 0),
            "f1": 2 * right / (confusion.sum(0) + confusion.sum(1)).clamp(min=1),
            "perplexity": outputs["loss"].double().mean().exp(),
            "streamed": self.streamed,
            "bootstrap": {"low": scores[torch.randint(len(labels), (5,))].min()},
            "names": sum(i * float(name) for i, name in enumerate(outputs["names"])),
        }

    def figures(self, outputs: Any) -> dict[str, Any]:
        return {"confusion": confusion_of(outputs["scores"], outputs["labels"]), "notes.md": "# as it is\n"}


def confusion_of(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    pairs = labels * CLASSES + scores.argmax(1)
    return torch.bincount(pairs, minlength=CLASSES * CLASSES).view(CLASSES, CLASSES)


def auroc(scores: torch.Tensor, positive: torch.Tensor) -> float:
    """The share of pairs of a positive and a negative sample in which the positive one has the higher score."""
    ahead = (scores[positive].unsqueeze(1) - scores[~positive].unsqueeze(0)).sign()
    return float(((ahead + 1) / 2).double().mean())


# --- mixtures and packing -------------------------------------------------------------------------------------


class MixedAndPacked(Kind):
    """Two collections of documents, packed, three rows of the one to one of the other."""

    def model(self) -> nn.Module:
        return nn.ModuleDict(
            {"word": nn.Embedding(11, 8), "place": nn.Embedding(6, 8), "out": nn.Linear(8, 11)}
        )

    def train_data(self) -> Any:
        rows = {
            name: Packed(documents(number, name), 6, end=0) for name, number in (("prose", 20), ("code", 3))
        }
        return Mixture(rows, {"prose": 3, "code": 1}, samples=32)

    def eval_data(self) -> Any:
        return Packed(documents(4, "held out"), 6, end=0, pad=0)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        tokens, positions, documents = batch["tokens"], batch["positions"], batch["documents"]
        scores = model["out"]((model["word"](tokens) + model["place"](positions)).tanh())[:, :-1]
        same = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
        targets = tokens[:, 1:].masked_fill(~same, -100)
        return Loss(F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum"), same.sum())


def documents(number: int, name: str) -> Any:
    generator = torch.Generator().manual_seed(len(name))
    lengths = torch.randint(1, 15, (number,), generator=generator).tolist()
    return [torch.randint(1, 11, (length,), generator=generator) for length in lengths]


# --- refused --------------------------------------------------------------------------------------------------


class ReplacesAParameter(Kind):
    def after_step(self, model: nn.Module, step: int) -> None:
        model[0].weight = nn.Parameter(model[0].weight.clamp(-0.1, 0.1))  # type: ignore[index]


class CopiesItsTeacher(Kind):
    """A copy of the student in the place of the teacher, whose statistics nobody puts back."""

    def model(self) -> nn.Module:
        student = perceptron(FEATURES, CLASSES, nn.BatchNorm1d(8))
        return nn.ModuleDict({"student": student, "teacher": copy.deepcopy(student).requires_grad_(False)})

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        wanted = model["teacher"](x).softmax(1)  # type: ignore[index]
        return Loss(F.cross_entropy(model["student"](x), wanted, reduction="sum"), len(x))  # type: ignore[index]

    def after_step(self, model: nn.Module, step: int) -> None:
        model["teacher"] = copy.deepcopy(model["student"]).requires_grad_(False)  # type: ignore[index, operator]


class UnfreezesAfterStep(Kind):
    def model(self) -> nn.Module:
        model = perceptron()
        model[0].requires_grad_(False)
        return model

    def after_step(self, model: nn.Module, step: int) -> None:
        model[0].requires_grad_(True)  # type: ignore[index]


class TiedByItsMemory(Kind):
    """Two parameters that are one piece of memory, as much code ties weights."""

    more: ClassVar[dict[str, Any]] = {"ema": 0.5}

    def model(self) -> nn.Module:
        first, second = (nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(2))
        second.weight.data = first.weight.data
        return nn.Sequential(first, nn.Tanh(), second, nn.Linear(FEATURES, CLASSES))


class OneOfATable(Kind):
    """A buffer of one element, with the stride of the table that it is cut from, which each forward writes."""

    more: ClassVar[dict[str, Any]] = {"ema": 0.5}

    def model(self) -> nn.Module:
        model = perceptron()
        model.register_buffer("seen", torch.arange(6.0)[::6])
        return model

    def loss(self, model: Any, batch: Any) -> Loss:
        if model.training:
            model.seen.add_(batch[0].detach().mean())
        return super().loss(model, batch)


class FailsAfterStep(Kind):
    def after_step(self, model: nn.Module, step: int) -> None:
        raise ValueError("no such layer")


class RateFallsAfterStep(Kind):
    """It sets the rate of its optimizer by itself, and the schedule would set it back."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.own = torch.optim.SGD(model.parameters(), lr=0.1)
        return self.own

    def after_step(self, model: nn.Module, step: int) -> None:
        for group in self.own.param_groups if step == 2 else ():
            group["lr"] = 0.01


class GroupsAreAddedAfterStep(Kind):
    """It hands its optimizer further parameters while it trains, as code that finetunes layer by layer does."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.own = torch.optim.SGD(model.parameters(), lr=0.1)
        return self.own

    def after_step(self, model: nn.Module, step: int) -> None:
        if step == 2:
            self.own.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": 0.01})


class CountingSchedule(Kind):
    """Its function counts its calls."""

    def schedule(self, optimizer: torch.optim.Optimizer, updates: int) -> Any:
        calls = iter(range(1, 1000))
        return lambda update: 1 / next(calls)


class RateBelowZero(Kind):
    def schedule(self, optimizer: torch.optim.Optimizer, updates: int) -> Any:
        return lambda update: 0.5 - update


class SchedulerNotReturned(Kind):
    def schedule(self, optimizer: torch.optim.Optimizer, updates: int) -> Any:
        lr_scheduler.StepLR(optimizer, 1)


class PlateauWithoutEvaluation(FallsWhenNothingImproves):
    def eval_data(self) -> None:
        return None


class SchedulerOfAnother(Kind):
    def schedule(self, optimizer: torch.optim.Optimizer, updates: int) -> Any:
        return lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), 1)


class ScheduleOfNumbers(Kind):
    def schedule(self, optimizer: torch.optim.Optimizer, updates: int) -> Any:
        return [1.0] * updates


class OutputsThatDiffer(Kind):
    """What it gives of an evaluation is not the same a second time."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.calls = 0

    def outputs(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        self.calls += 1
        return {"calls": torch.full((len(batch[1]),), self.calls)}

    def whole_set_metrics(self, outputs: Any) -> dict[str, Any]:
        return {"calls": outputs["calls"].sum()}


class OutputsOfNoRow(WholeSet):
    def outputs(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": self.loss(model, batch).total}


class MatrixAsAMetric(WholeSet):
    def whole_set_metrics(self, outputs: Any) -> dict[str, Any]:
        return {"auroc": 0.5, "confusion": torch.eye(3)}


class MetricByTheNameOfTheLoss(WholeSet):
    def whole_set_metrics(self, outputs: Any) -> dict[str, Any]:
        return {"auroc": 0.5, "loss": 1.0}


class LargestGradients(Kind):
    """Delayed scaling: a hook on the gradient of the outputs keeps its largest values in a buffer, and the next step reads them."""

    def model(self) -> nn.Module:
        model = perceptron()
        model.register_buffer("largest", torch.ones(2))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        scale = 1 / model.largest.max()
        logits = model(x)

        def keep(gradient: torch.Tensor) -> None:
            model.largest.copy_(torch.stack([model.largest[1], gradient.abs().max()]))

        if logits.requires_grad:
            logits.register_hook(keep)
        return Loss(F.cross_entropy(logits * scale, y, reduction="sum"), len(y))


class TwoOptimizersInOneCycle(Kind):
    """Their momentum goes down and up with the rate; torch's fused kernels, which note something once."""

    def optimizer(self, model: nn.Module) -> Any:
        first, *rest = model.parameters()
        return [torch.optim.SGD(each, lr=0.1, momentum=0.9, fused=True) for each in ([first], rest)]

    def schedule(self, optimizer: torch.optim.Optimizer, total: Any) -> Any:
        return lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=total)


class FallsByItsCounter(lr_scheduler.LRScheduler):
    """Counts its calls itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls = 0
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        self.calls += 1
        return [rate / self.calls for rate in self.base_lrs]


class ForgetsItsCounter(FallsByItsCounter):
    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}


class SchedulerOfItsOwn(Kind):
    def schedule(self, optimizer: torch.optim.Optimizer, total: Any) -> Any:
        return FallsByItsCounter(optimizer)


class SchedulerThatForgets(Kind):
    """A resumed run would begin at the first rates."""

    def schedule(self, optimizer: torch.optim.Optimizer, total: Any) -> Any:
        return lr_scheduler.SequentialLR(optimizer, [ForgetsItsCounter(optimizer)], [])


REFUSED: dict[type[Kind], Refusal] = {
    SchedulerThatForgets: (step_problems.SCHEDULE_LACKS, {"name": "ForgetsItsCounter", "steps": 3}),
    ReplacesAParameter: (step_problems.PARAMETER_REPLACED, {"name": "0.weight"}),
    CopiesItsTeacher: (
        step_problems.MODULE_CHANGED,
        {"name": "teacher", "got": "was replaced", "where": re.compile("^after the first update")},
    ),
    UnfreezesAfterStep: (step_problems.ASKS_OTHERWISE, {"name": "0.weight", "got": "now asks"}),
    RateFallsAfterStep: (
        step_problems.RATE_CHANGED,
        {"group": 0, "previous": 0.1, "got": 0.01, "when": "after an update, as by job.after_step"},
    ),
    GroupsAreAddedAfterStep: (step_problems.GROUPS_CHANGED, {"got": 2, "wanted": 1}),
    CountingSchedule: (step_problems.SCHEDULE_DIFFERS, {"wanted": [1.0, 0.5], "got": [1 / 3, 0.25]}),
    RateBelowZero: (step_problems.SCHEDULE_FACTOR, {"got": -1.5, "update": 2}),
    SchedulerNotReturned: (step_problems.SCHEDULER_KEPT, {}),
    PlateauWithoutEvaluation: (
        step_problems.PLATEAU_UNEVALUATED,
        {"got": "ReduceLROnPlateau", "metric": "eval/loss"},
    ),
    SchedulerOfAnother: (step_problems.OTHER_OPTIMIZER, {"got": "StepLR"}),
    ScheduleOfNumbers: (step_problems.SCHEDULE_KIND, {"got": "list"}),
    OutputsThatDiffer: (
        integrity_problems.EVALUATION_KEEPS,
        {"name": "job.calls", "got": "the output 'calls'"},
    ),
    OutputsOfNoRow: (
        problems.OUTPUTS_FORM,
        {
            "got": "'loss' is a tensor of no dimension",
            "wanted": "a tensor or a list with a row for each sample",
        },
    ),
    MatrixAsAMetric: (problems.WHOLE_SET_NUMBER, {"name": "confusion", "got": "of 2 dimensions"}),
    MetricByTheNameOfTheLoss: (
        problems.WHOLE_SET_NAME,
        {"got": "loss", "taken": re.compile("^the name of the loss")},
    ),
    TiedByItsMemory: (
        integrity_problems.ONE_MEMORY,
        {"name": "parameter '2.weight'", "other": "parameter '0.weight'"},
    ),
    FailsAfterStep: (
        problems.JOB_FAILED,
        {"where": re.compile("^after step 1, .*step_kinds.py"), "kind": "ValueError", "got": "no such layer"},
    ),
}
"""Jobs that are refused, each with the problem and facts of it."""

HELD = held_in(__name__, REFUSED)
"""Jobs whose bits do not depend on who runs them."""
