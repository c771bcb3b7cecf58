"""Jobs whose modules have modes, sizes and settings of their own, optimizers with modes, and steps that leave parameters unused.

Every class here is a job. Those in `REFUSED` break the promise, and the problem beside them says how.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao import quantization
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Dataset, TensorDataset

import lockstep
from lockstep import Loss, Mean
from lockstep.training import problems
from lockstep.training.step import problems as step_problems
from tests.distributed.kinds import CLASSES, FEATURES, Kind, Refusal, held_in, numbers, perceptron

# --- modes ----------------------------------------------------------------------------------------------------


class Pair(nn.Module):
    """A frozen teacher with dropout and BatchNorm, and its student."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = perceptron(FEATURES, CLASSES, nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.student = perceptron(FEATURES, CLASSES, nn.Dropout(0.2))
        self.teacher.requires_grad_(False)


class PairThatTrainsOneSide(Pair):
    def train(self, mode: bool = True) -> PairThatTrainsOneSide:
        super().train(mode)
        self.teacher.eval()
        return self


class TeacherAtRest(Kind):
    """haitongli/knowledge-distillation-pytorch: the teacher is put into evaluation mode where the model is built."""

    def model(self) -> nn.Module:
        pair = Pair()
        pair.teacher.eval()
        return pair

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        out = model.student(x)
        with torch.no_grad():
            wanted = model.teacher(x)
        distance = F.kl_div(out.log_softmax(1), wanted.softmax(1), reduction="sum")
        mode = Mean(float(model.teacher.training) * len(y), len(y))
        return Loss(distance + F.cross_entropy(out, y, reduction="sum"), len(y), {"teacher_trains": mode})


class TeacherAtRestByTrain(TeacherAtRest):
    """The same by a `train()` of the model's own."""

    def model(self) -> nn.Module:
        return PairThatTrainsOneSide()


class TeacherAtRestByLoss(TeacherAtRest):
    """The same by the loss, in each micro-batch anew."""

    def model(self) -> nn.Module:
        return Pair()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        model.teacher.eval()
        return super().loss(model, batch)


class PseudoLabels(Kind):
    """The loss looks at its batch in evaluation mode first, and forgets to go back: each micro-batch begins in training mode."""

    def model(self) -> nn.Module:
        return perceptron(FEATURES, CLASSES, nn.BatchNorm1d(8), nn.Dropout(0.3))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        out = model(x)
        model.eval()
        with torch.no_grad():
            sure = model(x).softmax(1).amax(1)
        return Loss((sure * F.cross_entropy(out, y, reduction="none")).sum(), len(y))


class FreezesItsNormLater(Kind):
    """BatchNorm is put into evaluation mode after the first step, as detectors do after a warm-up."""

    def model(self) -> nn.Module:
        return perceptron(FEATURES, CLASSES, nn.BatchNorm1d(8))

    def after_step(self, model: nn.Module, step: int) -> None:
        if step == 1:
            model[1].eval()


class Cooling(nn.Module):
    temperature = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) / self.temperature


class CoolsAnAttribute(Kind):
    """A plain attribute of a module that `after_step` changes: no `state_dict` has it."""

    def model(self) -> nn.Module:
        return Cooling()

    def after_step(self, model: nn.Module, step: int) -> None:
        model.temperature = 2.0 / (1 + step)


# --- buffers that a forward sizes -----------------------------------------------------------------------------


class Observing(nn.Module):
    """As `PerChannelMinMaxObserver`: empty until the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron()
        self.register_buffer("largest", torch.tensor([]))

    def forward(self, x: Tensor) -> Tensor:
        now = x.detach().abs().amax(0)
        if self.largest.numel() == 0:
            self.largest.resize_(now.shape).copy_(now)
        elif self.training:
            self.largest.copy_(torch.maximum(self.largest, now))
        return self.net(x / self.largest.clamp(min=1))


class SizedByItsForward(Kind):
    def model(self) -> nn.Module:
        return Observing()


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant = quantization.QuantStub()
        self.conv = nn.Conv1d(1, 4, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm1d(4)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(4 * FEATURES, CLASSES)
        self.dequant = quantization.DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn(self.conv(self.quant(x[:, None]))))
        return self.dequant(self.fc(x.flatten(1)))


class QuantisationAware(Kind):
    """pytorch/vision's references/quantization: observers rest after the first step, and BatchNorm's statistics after the second."""

    more: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 3e-2}}
    sized = False

    def model(self) -> nn.Module:
        with warnings.catch_warnings(action="ignore"):  # torch.ao.quantization is deprecated
            return self.prepared()

    def prepared(self) -> nn.Module:
        model = quantization.fuse_modules_qat(Quantised().train(), [["conv", "bn", "relu"]])
        # That of get_default_qat_qconfig("fbgemm"), which warns of its own arguments.
        each = quantization.FusedMovingAvgObsFakeQuantize
        activation = each.with_args(
            observer=quantization.MovingAverageMinMaxObserver, quant_min=0, quant_max=127
        )
        weight = each.with_args(
            observer=quantization.MovingAveragePerChannelMinMaxObserver,
            quant_min=-128,
            quant_max=127,
            dtype=torch.qint8,
            qscheme=torch.per_channel_symmetric,
        )
        model.qconfig = quantization.QConfig(activation=activation, weight=weight)
        model = quantization.prepare_qat(model)
        if self.sized:
            model(torch.randn(4, FEATURES))
        return model

    def after_step(self, model: nn.Module, step: int) -> None:
        if step == 1:
            model.apply(quantization.disable_observer)
        if step == 2:
            model.apply(torch.nn.intrinsic.qat.freeze_bn_stats)


class QuantisationAwareSizedBefore(QuantisationAware):
    """A forward in `model` gives the observers their sizes."""

    sized = True


# --- optimizers with modes ------------------------------------------------------------------------------------


class ScheduleFreeSGD(torch.optim.Optimizer):
    """Defazio et al. 2024: the gradient is taken at y, between z, which moves, and x, the mean of all z so far; x is what is evaluated."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "k": 0, "train_mode": False})

    @torch.no_grad()
    def eval(self) -> None:
        self._swap(False, lambda momentum: 1 - 1 / momentum)

    @torch.no_grad()
    def train(self) -> None:
        self._swap(True, lambda momentum: 1 - momentum)

    def _swap(self, trains: bool, share: Any) -> None:
        for group in self.param_groups:
            if group["train_mode"] != trains:
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.lerp_(self.state[parameter]["z"], share(group["momentum"]))
                group["train_mode"] = trains

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("a step in evaluation mode: call train() first")
            group["k"] += 1
            share = 1 / group["k"]
            for y in group["params"]:
                if y.grad is None:
                    continue
                z = self.state[y].setdefault("z", y.clone())
                y.lerp_(z, share)
                y.add_(y.grad, alpha=group["lr"] * (group["momentum"] * (1 - share) - 1))
                z.sub_(y.grad, alpha=group["lr"])


class ScheduleFree(Kind):
    more: ClassVar[dict[str, Any]] = {
        "evaluate": {"every": {"steps": 1}},
        "early_stop": {"patience": 9},
    }

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return ScheduleFreeSGD(model.parameters(), lr=0.5)


# --- schedules by a metric ------------------------------------------------------------------------------------


class FallsByScore(Kind):
    """milesial/Pytorch-UNet: `ReduceLROnPlateau(optimizer, "max")`, whose goal is to maximise a score."""

    more: ClassVar[dict[str, Any]] = {"evaluate": {"every": {"steps": 1}}}

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def schedule(self, optimizer: torch.optim.Optimizer, updates: int) -> Any:
        return lockstep.Plateau(ReduceLROnPlateau(optimizer, "max", patience=0), metric="eval/score")

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Mean]:
        x, y = batch
        return {"score": Mean(model(x).softmax(1).gather(1, y[:, None]).sum(), len(y))}


class FollowsNothingThatRises(FallsByScore):
    def schedule(self, optimizer: torch.optim.Optimizer, updates: int) -> Any:
        return ReduceLROnPlateau(optimizer, "max", patience=0)


class FollowsAnUnknownMetric(FallsByScore):
    def schedule(self, optimizer: torch.optim.Optimizer, updates: int) -> Any:
        return lockstep.Plateau(ReduceLROnPlateau(optimizer, "max"), metric="eval/acuracy")


class FollowsWithoutEvaluation(FollowsAnUnknownMetric):
    def eval_data(self) -> None:
        return None


class FollowsAnotherScheduler(FallsByScore):
    def schedule(self, optimizer: torch.optim.Optimizer, updates: int) -> Any:
        return lockstep.Plateau(torch.optim.lr_scheduler.StepLR(optimizer, 1), metric="eval/accuracy")  # type: ignore[arg-type]


# --- parameters that a step leaves unused -----------------------------------------------------------------------


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 8)
        self.heads = nn.ModuleList(nn.Linear(8, CLASSES) for _ in range(2))


class HeadsOfTasks(Kind):
    """A head for each task, of which the second one's samples are rare: its step two has none (ultralytics)."""

    more: ClassVar[dict[str, Any]] = {
        "data": {"drop_last": False, "shuffle": "none"},
        "optimizer": {"lr": 0.1, "weight_decay": 0.5},
        "clip_norm": None,
    }
    tasks: ClassVar[list[list[int]]] = [[0, 1, 0, 0] * 3, [0] * 12, [0, 0, 1, 0] * 2]
    """The tasks of the samples of each step."""

    def model(self) -> nn.Module:
        return TwoHeads()

    def train_data(self) -> Dataset[Any]:
        x = numbers(32, FEATURES)
        return TensorDataset(x, x[:, :CLASSES].argmax(1), torch.tensor([*chain(*self.tasks)]))

    def eval_data(self) -> Dataset[Any]:
        x = numbers(7, FEATURES, seed=2)
        return TensorDataset(x, x[:, :CLASSES].argmax(1), torch.arange(7) % 2)

    def conditional_parameters(self, model: nn.Module) -> Iterable[str]:
        return [name for name, _ in model.named_parameters() if name.startswith("heads")]

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y, task = batch
        inner, total = model.body(x).tanh(), x.new_zeros(())
        for i, head in enumerate(model.heads):
            own = task == i
            if own.any():
                total = total + F.cross_entropy(head(inner[own]), y[own], reduction="sum")
        return Loss(total, len(y))


# --- orders of a dataset's own ----------------------------------------------------------------------------------


class Identities(TensorDataset):
    """P identities of K pictures in a row, as `RandomIdentitySampler` gives them (Cysu/open-reid)."""

    def __init__(self) -> None:
        who = torch.arange(12).repeat_interleave(3)
        super().__init__(numbers(12, FEATURES)[who] + 0.5 * numbers(36, FEATURES, seed=3), who)

    def epoch_order(self, seed: int, epoch: int, shuffle: str) -> Any:
        people = np.random.default_rng((seed, epoch)).permutation(12)
        return (3 * people[:, None] + np.arange(3)).ravel()


class SideBySide(Identities):
    neighbours_together = True


class Reidentification(Kind):
    """The batch-hard triplet loss: without a second picture of a person in the micro-batch there is nothing to pull."""

    more: ClassVar[dict[str, Any]] = {"rehearsal": "full"}

    def train_data(self) -> Dataset[Any]:
        return SideBySide()

    def eval_data(self) -> Dataset[Any]:
        return TensorDataset(numbers(7, FEATURES, seed=5), torch.arange(7) // 3)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, who = batch
        f, same = model(x), who[:, None] == who[None]
        distance = (f[:, None] - f[None]).square().sum(2).clamp(min=1e-12).sqrt()
        near = distance.masked_fill(same, torch.inf).amin(1)
        far = (distance * same).amax(1)
        each = torch.where(near.isinf(), far, F.relu(far - near + 0.3))
        return Loss(each.sum(), len(x), {"positives": Mean(same.sum() - len(x), len(x))})


class ReidentificationInARow(Reidentification):
    """Its micro-batches get every fourth picture."""

    def train_data(self) -> Dataset[Any]:
        return Identities()


REFUSED: Mapping[type[Kind], Refusal] = {
    FollowsNothingThatRises: (
        step_problems.PLATEAU_RISES,
        {"got": "ReduceLROnPlateau", "metric": "eval/loss"},
    ),
    FollowsAnUnknownMetric: (
        problems.SCHEDULE_METRIC,
        {"got": "eval/acuracy", "wanted": re.compile("did you mean 'eval/accuracy'")},
    ),
    FollowsWithoutEvaluation: (
        problems.SCHEDULE_METRIC,
        {"got": "eval/acuracy", "wanted": "the job has no eval_data"},
    ),
    FollowsAnotherScheduler: (
        step_problems.SCHEDULER_HELD,
        {"holder": "Plateau", "got": "StepLR", "wanted": re.compile("ReduceLROnPlateau")},
    ),
}
"""Jobs that are refused, each with the problem and facts of it."""

TOLD: dict[type[Kind], tuple[str, ...]] = {
    SizedByItsForward: ("the buffer 'largest' of the model depends on the samples",),
    ReidentificationInARow: ("job.loss: the first step's total is", "neighbours in the order of Identities.epoch_order", "the positions m, m + 4"),
}  # fmt: skip
"""Jobs that are warned of something and exact all the same, and words of the warning."""

HELD = held_in(__name__, REFUSED)
"""Jobs whose bits do not depend on who runs them."""
