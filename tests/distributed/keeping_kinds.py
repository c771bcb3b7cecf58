"""Jobs that keep something beside the weights: of an evaluation, of an update, of the optimizer. Sound ones, and those that are refused."""

from __future__ import annotations

import copy
import functools
import re
import warnings
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import Loss, Mean
from lockstep.checkpoint.problems import UNSTORABLE
from lockstep.training import problems
from lockstep.training.integrity import problems as integrity_problems
from lockstep.training.step import problems as step_problems
from tests.distributed.kinds import CLASSES, FEATURES, Kind, Refusal, held_in, perceptron
from tests.fading import Fading
from tests.flat_momentum import FlatMomentum
from tests.nested import Nested

# --- sound ----------------------------------------------------------------------------------------------------


class Scored(Kind):
    """Its evaluation gives the class that the model says, and the right one."""

    def outputs(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        x, y = batch
        return {"preds": model(x), "target": y}

    def whole_set_metrics(self, outputs: Any) -> dict[str, Any]:
        return {"right": right(outputs)}


def right(outputs: Any) -> float:
    return float((outputs["preds"].argmax(1) == outputs["target"]).float().mean())


class CollectedMetrics(Scored):
    """A collection of torchmetrics, which notes which of its members share their state."""

    def __init__(self, params: Any) -> None:
        import torchmetrics

        super().__init__(params)
        every = [
            torchmetrics.classification.MulticlassPrecision(CLASSES),
            torchmetrics.classification.MulticlassRecall(CLASSES),
        ]
        self.collected = torchmetrics.MetricCollection(every)

    def whole_set_metrics(self, outputs: Any) -> dict[str, Any]:
        return {"all": self.collected}


class CachesForItsFigures(Scored):
    """What its figures need is made when it is first asked for."""

    weights: Any = None

    @functools.cached_property
    def names(self) -> list[str]:
        return [f"class {i}" for i in range(CLASSES)]

    def figures(self, outputs: Any) -> dict[str, Any]:
        if self.weights is None:
            self.weights = torch.ones(CLASSES)
        counts = torch.bincount(outputs["target"], self.weights[outputs["target"]], minlength=CLASSES)
        return {"counts.txt": "\n".join(f"{n} {c:g}" for n, c in zip(self.names, counts, strict=True))}


class MaskMadeInEvaluation(Kind):
    """A constant that only evaluation needs, made there when it is first needed."""

    mask: Any = None

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        if model.training:
            return loss
        if self.mask is None:
            self.mask = torch.ones(())
        return Loss(loss.total * self.mask, loss.weight, loss.parts)


class HeadFirst(Kind):
    """Groups in an order of their own, which is the same in each process."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        head, *rest = reversed(list(model.children()))
        groups = [
            {"params": list(head.parameters()), "lr": 0.05},
            {"params": [p for one in rest for p in one.parameters()]},
        ]
        return torch.optim.AdamW(groups, lr=0.01)


class Tempered(nn.Module):
    """Its temperature is no tensor: it is kept by the extra state of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron(FEATURES, CLASSES)
        self.heat = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.body(x) / self.heat
        return found

    def get_extra_state(self) -> dict[str, Any]:
        return {"heat": self.heat}

    def set_extra_state(self, state: Any) -> None:
        self.heat = state["heat"]


class ExtraState(Kind):
    def model(self) -> nn.Module:
        return Tempered()

    def after_step(self, model: nn.Module, step: int) -> None:
        model.heat *= 0.9  # type: ignore[assignment, operator]


class LargeMemory(Kind):
    """State of more than four megabytes, to which each step adds in place."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.counts = torch.zeros(1_200_000)

    def after_step(self, model: nn.Module, step: int) -> None:
        self.counts += 0.01 * step

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        return Loss(loss.total * (1 + self.counts[-1]), loss.weight, loss.parts)

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts}

    def load_state_dict(self, state: Any) -> None:
        self.counts = state["counts"]


class Window(Kind):
    """A history of losses' scales and its tail, which is a view of it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.history = torch.ones(8)
        self.newest = self.history[-2:]

    def after_step(self, model: nn.Module, step: int) -> None:
        self.history[:-1] = self.history[1:].clone()
        self.newest.fill_(1 + step / 10)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        return Loss(loss.total * self.history.mean(), loss.weight, loss.parts)

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history, "newest": self.newest}

    def load_state_dict(self, state: Any) -> None:
        self.history, self.newest = state["history"], state["newest"]


class SeparatesItsWindow(Window):
    def load_state_dict(self, state: Any) -> None:
        self.history, self.newest = state["history"].clone(), state["newest"].clone()


class MovesBesideItsModel(Kind):
    """A buffer of the model that the job takes for its own, and takes back by itself."""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_buffer("heat", torch.ones(1))
        return model

    def after_step(self, model: nn.Module, step: int) -> None:
        self.heat: Any = model.heat
        self.heat *= 0.9

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        return Loss(loss.total * model.heat.sum(), loss.weight, loss.parts)  # type: ignore[operator, union-attr]

    def state_dict(self) -> dict[str, Any]:
        return {"heat": getattr(self, "heat", torch.ones(1))}

    def load_state_dict(self, state: Any) -> None:
        self.heat = state["heat"]


class OneMemory(Kind):
    """An optimizer whose momenta are in one memory."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return FlatMomentum(model.parameters())


class StateOfItsOptimizer(Kind):
    """The job saves what its optimizer keeps to itself."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.fading = Fading(model.parameters(), lr=0.05)
        return self.fading

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.fading.taken}

    def load_state_dict(self, state: Any) -> None:
        self.fading.taken = state["taken"]


class StateInLists(Kind):
    """Its optimizer's state is in lists, in double, and a word."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Nested(model.parameters())


class TrainingModeInItsMetrics(Kind):
    """A metric of the training mode, in which it leaves the model."""

    def model(self) -> nn.Module:
        return perceptron(FEATURES, CLASSES, nn.Dropout(0.5))

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Mean]:
        x, y = batch
        model.train()
        return {"noisy": Mean(F.cross_entropy(model(x), y, reduction="sum"), len(y))}


class CachesInEvaluationMode(Kind):
    """What prediction needs is computed once in evaluation mode, and dropped in training mode."""

    more: ClassVar[dict[str, Any]] = {"evaluate": {"every": {"steps": 1}}}

    def model(self) -> nn.Module:
        return Cached()


class Cached(nn.Linear):
    cache: torch.Tensor | None = None

    def __init__(self) -> None:
        super().__init__(FEATURES, CLASSES)

    def train(self, mode: bool = True) -> Cached:
        if mode:
            self.cache = None
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            return super().forward(x)
        if self.cache is None:
            self.cache = self.weight.detach().clone()
        return F.linear(x, self.cache, self.bias)


class MeansInReusedTensors(Kind):
    """A part that is a buffer, and a metric in a tensor that each micro-batch writes anew."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.right = torch.zeros(())

    def model(self) -> nn.Module:
        model = perceptron()
        model.register_buffer("spread", torch.zeros(()))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        scores = model(x)
        if not model.training:
            model.spread.copy_(scores.detach().var())  # type: ignore[operator, union-attr]
        total = F.cross_entropy(scores, y, reduction="sum")
        return Loss(total, len(y), {"spread": Mean(model.spread, 1)})  # type: ignore[arg-type]

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Mean]:
        x, y = batch
        self.right.copy_((model(x).argmax(1) == y).sum())
        return {"right": Mean(self.right, len(y))}


# --- what no checkpoint keeps ---------------------------------------------------------------------------------


class SavesHalf(Kind):
    """Two things change with each step, and one of them is saved."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.scale, self.pull = 1.0, 1.0

    def after_step(self, model: nn.Module, step: int) -> None:
        self.scale, self.pull = 0.9 * self.scale, 0.8 * self.pull

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        scores = model(x)
        total = self.scale * F.cross_entropy(scores, y, reduction="sum") + self.pull * scores.pow(2).sum()
        return Loss(total, len(y))

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state: Any) -> None:
        self.scale = state["scale"]


class ForgetsToTakeBack(SavesHalf):
    """Both are saved, and one is taken back."""

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "pull": self.pull}


class HiddenTeacher(Kind):
    """A teacher in a list, which no checkpoint has; the step is counted in one."""

    step = 0

    def model(self) -> nn.Module:
        model = super().model()
        self.teacher = [copy.deepcopy(model).requires_grad_(False)]
        return model

    def after_step(self, model: nn.Module, step: int) -> None:
        self.step = step
        for mine, other in zip(self.teacher[0].parameters(), model.parameters(), strict=True):
            mine.lerp_(other, 0.1)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        x, _ = batch
        far = (model(x) - self.teacher[0](x)).pow(2).sum()
        return Loss(loss.total + (far if self.step > 3 else 0.0), loss.weight, loss.parts)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: Any) -> None:
        self.step = state["step"]


class OwnStateDict(Fading):
    """Its `state_dict` has something of its own, and not what it goes by."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "kind": "fading"}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict({name: value for name, value in state.items() if name != "kind"})


class ForgetfulOptimizer(Kind):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return OwnStateDict(model.parameters(), lr=0.05)


class NumbersOfNumPy(Kind):
    def state_dict(self) -> dict[str, Any]:
        return {"heat": np.float32(0.1)}


class LongComplexNumbers(Kind):
    """In a buffer that the model's `state_dict` leaves out, and a checkpoint has."""

    def model(self) -> nn.Module:
        model = perceptron()
        model.register_buffer("turns", torch.ones(3, dtype=torch.complex128), persistent=False)
        return model


class Wraps(torch.optim.Optimizer):
    """A wrapper of another optimizer that is none itself."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.state, self.param_groups = inner, inner.state, inner.param_groups
        self.defaults = inner.defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)


class WrapsAsAnOptimizer(Wraps):
    """It is one, and holds on to groups and a state that the inner one has replaced once it is loaded."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        torch.optim.Optimizer.__init__(self, inner.param_groups, inner.defaults)
        super().__init__(inner)


class Signs(torch.optim.Optimizer):
    """Its rate has another name."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"size": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad.sign(), alpha=group["size"])


class RateByAnotherName(Kind):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Signs(model.parameters())


class TakesBackSomethingElse(WrapsAsAnOptimizer):
    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state["inner"])


class SharesItsState(torch.optim.Optimizer):
    """It loads by itself, and the inner optimizer holds on to the groups and the state that both had."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.state = inner, inner.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


class WrappedOptimizer(Kind):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Wraps(torch.optim.Adam(model.parameters()))


class WrappedStateThatIsLost(Kind):
    """Its counter has the state taken up again before training."""

    calls = 0

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return TakesBackSomethingElse(torch.optim.Adam(model.parameters()))

    def after_step(self, model: nn.Module, step: int) -> None:
        self.calls += 1

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: Any) -> None:
        self.calls = state["calls"]


class Scripted(Kind):
    def model(self) -> nn.Module:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            scripted: nn.Module = torch.jit.script(super().model())
        return scripted


class Merging(nn.Linear):
    """A low-rank change, which eval() adds to the weight and train() takes away again: as in loralib."""

    def __init__(self) -> None:
        super().__init__(FEATURES, 8)
        self.weight.requires_grad = False
        self.down = nn.Parameter(torch.randn(2, FEATURES))
        self.up = nn.Parameter(torch.zeros(8, 2))

    def train(self, mode: bool = True) -> Merging:
        if mode != self.training:
            self.weight.data += (self.up @ self.down) * (-1 if mode else 1)
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        change = x @ self.down.T @ self.up.T if self.training else 0.0
        return super().forward(x) + change


class MergesInEvaluationMode(Kind):
    def model(self) -> nn.Module:
        return nn.Sequential(Merging(), nn.Tanh(), nn.Linear(8, CLASSES))


class ExpiresCodes(Kind):
    """A buffer that is written past torch's count of writes, from some sample on that the rehearsal does not meet."""

    more: ClassVar[dict[str, Any]] = {"data": {"drop_last": False, "shuffle": "none"}}

    def model(self) -> nn.Module:
        model = perceptron()
        model.register_buffer("shift", torch.zeros(()))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        if model.training and x[0, 0] > 1.2:
            model.shift.data.add_(0.1)  # type: ignore[operator, union-attr]
        return super().loss(model, (x + model.shift, y))


class TableWhenAskedFor(Kind):
    """A table for large numbers, kept as a buffer once a sample asks for it, which those of the rehearsal do not."""

    more: ClassVar[dict[str, Any]] = {"data": {"drop_last": False, "shuffle": "none"}}

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        if x[0, 0] > 1.2 and not hasattr(model, "table"):
            model.register_buffer("table", torch.full((), 0.5), persistent=False)
        return super().loss(model, (x * model.table if x[0, 0] > 1.2 else x, y))


class NormWhenAskedFor(TableWhenAskedFor):
    """The same as a layer with statistics of its own."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        first: Any = model[0]  # type: ignore[index]
        if x[0, 0] > 1.2 and not hasattr(first, "large"):
            first.large = nn.BatchNorm1d(FEATURES, affine=False)
        return Kind.loss(self, model, (first.large(x) if x[0, 0] > 1.2 else x, y))


class ShiftWhenAskedFor(TableWhenAskedFor):
    """The same as a parameter, which no optimizer holds."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        if x[0, 0] > 1.2 and not hasattr(model, "shift"):
            model.shift = nn.Parameter(torch.zeros(()))
        return Kind.loss(self, model, (x + model.shift if x[0, 0] > 1.2 else x, y))


class DropsItsTable(Kind):
    """A buffer that the first micro-batch needs alone."""

    def model(self) -> nn.Module:
        model = perceptron()
        model.register_buffer("table", torch.full((), 0.5))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        if hasattr(model, "table"):
            del model.table
        return super().loss(model, batch)


class DropsItsTableAfterStep(DropsItsTable):
    loss = Kind.loss

    def after_step(self, model: nn.Module, step: int) -> None:
        if step == 2:
            del model.table


# --- what the data read ---------------------------------------------------------------------------------------


class Staged(TensorDataset):
    stage = 0.0

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x * (1 + self.stage), y


class StageOfTheData(Kind):
    """Each step tells its dataset a stage, which batches that are fetched ahead do not see."""

    def train_data(self) -> Any:
        self.staged = Staged(*super().train_data().tensors)  # type: ignore[attr-defined]
        return self.staged

    def after_step(self, model: nn.Module, step: int) -> None:
        self.staged.stage = step / 10

    def state_dict(self) -> dict[str, Any]:
        return {"stage": self.staged.stage}

    def load_state_dict(self, state: Any) -> None:
        self.staged.stage = state["stage"]


# --- the order of an optimizer --------------------------------------------------------------------------------


class Sets(Kind):
    """Parameters from a set: their order goes by their addresses."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            *[nn.Linear(FEATURES, FEATURES) for _ in range(12)], nn.Linear(FEATURES, CLASSES)
        )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        head = set(model[-1].parameters())  # type: ignore[index]
        groups = [{"params": list(set(model.parameters()) - head)}, {"params": list(head), "lr": 0.003}]
        return torch.optim.AdamW(groups, lr=0.01)


# --- what is kept of an evaluation ----------------------------------------------------------------------------


class WeighsByTheBest(Scored):
    """The loss goes by the best evaluation, which rank 0 alone knows."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.best = -1.0

    def whole_set_metrics(self, outputs: Any) -> dict[str, Any]:
        self.best = max(self.best, right(outputs))
        return {"best": self.best}

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        return Loss(loss.total * (2 + self.best), loss.weight, loss.parts)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: Any) -> None:
        self.best = state["best"]


class BestSoFar(Scored):
    """The same, where there is none at first."""

    best: float | None = None

    def whole_set_metrics(self, outputs: Any) -> dict[str, Any]:
        score = float(outputs["preds"].sum())
        if self.best is None or score > self.best:
            self.best = score
        return {"best": self.best}


class PhaseByFigures(Scored):
    """Each evaluation's figures are numbered, and the loss goes by the number."""

    number = 0

    def figures(self, outputs: Any) -> dict[str, Any]:
        PhaseByFigures.number += 1
        return {"number.txt": str(self.number)}


class ScheduledByScore(Scored):
    rate = 1.0

    def whole_set_metrics(self, outputs: Any) -> dict[str, Any]:
        self.rate *= 0.5
        return {"right": right(outputs)}

    def schedule(self, optimizer: torch.optim.Optimizer, updates: int) -> Any:
        return lambda update: self.rate


class ThawsByScore(Scored):
    score = -1.0

    def whole_set_metrics(self, outputs: Any) -> dict[str, Any]:
        self.score = right(outputs)
        return {"right": self.score}

    def frozen_parameters(self, model: nn.Module, step: int) -> list[str]:
        return [] if self.score >= 0 else ["0"]


class AddsUpScores:
    """A metric object that cannot be reset."""

    total = 0.0

    def update(self, preds: torch.Tensor) -> None:
        self.total += float(preds.sum())

    def compute(self) -> float:
        return self.total


class MetricWithoutReset(Scored):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.streamed = AddsUpScores()

    def whole_set_metrics(self, outputs: Any) -> dict[str, Any]:
        return {"streamed": self.streamed}


class Remembering(nn.Module):
    """Counts its forwards of an evaluation, and centres by the first batch of one."""

    def __init__(self, centres: bool) -> None:
        super().__init__()
        self.body = perceptron(FEATURES, CLASSES)
        self.seen = 0
        self.centre: torch.Tensor | None = None
        self.centres = centres

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training and self.centres and self.centre is None:
            self.centre = x.mean(0)
        if not self.training and not self.centres:
            self.seen += 1
        found: torch.Tensor = self.body(x if self.centre is None else x - self.centre)
        return found if self.seen < 12 else 1.3 * found


class CentresByTheFirstEvaluation(Kind):
    def model(self) -> nn.Module:
        return Remembering(centres=True)


class CountsEvaluations(Kind):
    """Exact for as long as nothing reads the count: it is warned of."""

    def model(self) -> nn.Module:
        return Remembering(centres=False)


class Scale:
    """How often something was asked for, in its class; the hundredth time it counts."""

    asked = 0

    @classmethod
    def ask(cls) -> float:
        cls.asked += 1
        return 1.0 if cls.asked < 100 else 2.0


class CountsInAnotherClass(Kind):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        return Loss(loss.total * Scale.ask(), loss.weight)


def scale_of(losses: torch.Tensor, seen: list[float] = []) -> float:  # noqa: B006 - the mistake
    seen.append(float(losses.detach()))
    return 1.0 if len(seen) < 100 else sum(seen[-100:])


class CountsInADefault(Kind):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        return Loss(loss.total * scale_of(loss.total), loss.weight)


def scale_by_name() -> float:
    scale_by_name.asked = getattr(scale_by_name, "asked", 0) + 1  # type: ignore[attr-defined]
    return 1.0 if scale_by_name.asked < 100 else 2.0  # type: ignore[attr-defined]


class CountsInAFunction(Kind):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        return Loss(loss.total * scale_by_name(), loss.weight)


class CountsOnAParameter(Kind):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss, weight = super().loss(model, batch), model[0].weight
        weight.asked = getattr(weight, "asked", 0) + 1
        return Loss(loss.total * (1.0 if weight.asked < 100 else 2.0), loss.weight)


class CountsInAHook(Kind):
    def model(self) -> nn.Module:
        model, norms = perceptron(), [0.0]

        def clipped(gradient: torch.Tensor) -> torch.Tensor:
            norms.append(float(gradient.norm()))
            return gradient if len(norms) < 100 else gradient.clamp(-norms[-100], norms[-100])

        model[0].weight.register_hook(clipped)
        return model


class FollowsItsEvaluations(Kind):
    """The mean loss of evaluation, kept on each worker of its own share, tempers the training loss."""

    mean = 1.0

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        total = F.cross_entropy(model(x), y, reduction="sum")
        if model.training:
            return Loss(total * self.mean, len(y))
        self.mean = float(total) / len(y)
        return Loss(total, len(y))


class AnchorsOfInferenceMode(Kind):
    """What the job has computed in advance, as embeddings of its classes are."""

    def model(self) -> nn.Module:
        with torch.inference_mode():
            self.anchors = torch.linspace(0, 1, CLASSES)
        return perceptron()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss(F.cross_entropy(model(x) + self.anchors, y, reduction="sum"), len(y))


class BuffersOfManyTypes(Kind):
    """Rotations as complex numbers, and types that gloo does not know either."""

    def model(self) -> nn.Module:
        model = perceptron()
        model.register_buffer("turns", torch.polar(torch.ones(CLASSES), torch.arange(3.0)))
        model.register_buffer("counts", torch.zeros(2, dtype=torch.int16))
        model.register_buffer("codes", torch.arange(3).to(torch.uint16))
        model.register_buffer("scales", torch.ones(3).to(torch.float8_e4m3fn), persistent=False)
        return model

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        if model.training:
            model.counts += 1
            model.turns *= torch.polar(torch.ones(CLASSES), torch.full((CLASSES,), 0.1))
        logits = (model(x) * model.turns).real
        return Loss(F.cross_entropy(logits, y, reduction="sum"), len(y))


class InnerOptimizer(Kind):
    """A wrapper over momentum, whose rate falls with each update."""

    more: ClassVar[dict[str, Any]] = {"schedule": {"name": "cosine"}}

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return SharesItsState(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9))


class InnerOptimizerThatLoads(InnerOptimizer):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return WrapsAsAnOptimizer(torch.optim.Adam(model.parameters(), lr=0.03))


class InnerOptimizerWithoutState(InnerOptimizer):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return WrapsAsAnOptimizer(torch.optim.SGD(model.parameters(), lr=0.3))


class WithoutTeacher(nn.Module):
    """A student, and a frozen teacher that its `state_dict` leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = perceptron(), perceptron().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.student(x)
        return logits

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if "teacher." not in name}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict=False, assign=assign)


class TeacherOutOfTheState(Kind):
    """`after_step` moves the teacher all the same, and the loss follows it."""

    def model(self) -> nn.Module:
        return WithoutTeacher()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        logits = model(x)
        apart = F.mse_loss(logits, model.teacher(x), reduction="sum")
        return Loss(F.cross_entropy(logits, y, reduction="sum") + apart, len(y))

    def after_step(self, model: nn.Module, step: int) -> None:
        for mean, own in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
            mean.lerp_(own, 0.1)


class Strict(WithoutTeacher):
    load_state_dict = nn.Module.load_state_dict  # type: ignore[assignment]


class LeavesOutAndLoadsStrictly(TeacherOutOfTheState):
    def model(self) -> nn.Module:
        return Strict()


class Halved(nn.Sequential):
    """Its `state_dict` has half the digits, for small files."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value.half() for name, value in super().state_dict(*args, **kwargs).items()}


class GivesHalfTheDigits(Kind):
    def model(self) -> nn.Module:
        return Halved(*perceptron())


class Merged(nn.Linear):
    """Its `state_dict` has what it has learnt beside its weight added to it; at first that is nothing."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.beside = nn.Parameter(torch.zeros(outputs, inputs))

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        state = super().state_dict(*args, prefix=prefix, **kwargs)
        state[f"{prefix}weight"] = (self.weight + self.beside).detach()
        return state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight + self.beside, self.bias)


class GivesMergedWeights(Kind):
    def model(self) -> nn.Module:
        return nn.Sequential(Merged(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


UNSAVED = "changes with an update, and no checkpoint keeps it"

FIRST = "'0.weight' and 3 more"

REFUSED: dict[type[Kind], Refusal] = {
    RateByAnotherName: (step_problems.NO_RATE, {"label": "job.optimizer", "got": "Signs"}),
    DropsItsTable: (step_problems.BUFFER_TYPE, {"name": "table", "got": None, "wanted": "torch.float32"}),
    DropsItsTableAfterStep: (step_problems.BUFFER_TYPE, {"name": "table", "got": None}),
    WrappedOptimizer: (step_problems.NO_SUPER_INIT, {"label": "job.optimizer", "got": "Wraps"}),
    WrappedStateThatIsLost: (
        problems.JOB_FAILED,
        {
            "where": re.compile("^taking back the state that it gives after the first update"),
            "kind": "KeyError",
        },
    ),
    MergesInEvaluationMode: (integrity_problems.WEIGHTS_MERGED, {"name": "0.weight"}),
    SeparatesItsWindow: (problems.SHARED_APART, {"name": "job/history", "other": "job/newest"}),
    MovesBesideItsModel: (problems.SHARED_APART, {"name": "job/heat", "other": "model/heat"}),
    ExpiresCodes: (step_problems.BUFFER_UNCOUNTED, {"name": "shift", "where": "step 3, rank 0"}),
    TableWhenAskedFor: (step_problems.BUFFER_MADE, {"name": "table"}),
    NormWhenAskedFor: (step_problems.MODULE_CHANGED, {"name": "0.large", "got": "was made"}),
    ShiftWhenAskedFor: (step_problems.PARAMETER_MADE, {"name": "shift"}),
    Scripted: (integrity_problems.COMPILED, {"name": "the model", "got": re.compile("^torch.jit")}),
    LongComplexNumbers: (
        UNSTORABLE,
        {"where": "model/turns", "got": re.compile("^a tensor of torch.complex128")},
    ),
    NumbersOfNumPy: (UNSTORABLE, {"where": "job/heat", "got": "a numpy.float32"}),
    StageOfTheData: (integrity_problems.DATA_CHANGED, {"name": "job.staged.stage", "where": " in batch[0]"}),
    LeavesOutAndLoadsStrictly: (integrity_problems.STATE_REFUSED, {"got": re.compile('"teacher.0.weight"')}),
    GivesHalfTheDigits: (
        integrity_problems.STATE_CONVERTED,
        {"name": "0.weight", "got": "torch.float16", "wanted": "torch.float32", "where": "at the start"},
    ),
    GivesMergedWeights: (
        integrity_problems.STATE_CONVERTED,
        {"name": "0.weight", "where": "after the first update, before training"},
    ),
    Sets: (
        step_problems.PARAMETER_ORDER,
        {"where": re.compile("^parameter . of group 0$"), "there": "when the optimizer is made again"},
    ),
    WeighsByTheBest: (integrity_problems.WHOLE_SET_KEEPS, {"got": "job.best"}),
    BestSoFar: (integrity_problems.WHOLE_SET_KEEPS, {"got": "job.best"}),
    PhaseByFigures: (integrity_problems.WHOLE_SET_KEEPS, {"got": "class PhaseByFigures.number"}),
    ScheduledByScore: (integrity_problems.WHOLE_SET_KEEPS, {"got": "job.rate"}),
    ThawsByScore: (integrity_problems.WHOLE_SET_KEEPS, {"got": "job.score"}),
    MetricWithoutReset: (integrity_problems.WHOLE_SET_KEEPS, {"got": "job.streamed.total"}),
    CentresByTheFirstEvaluation: (
        integrity_problems.EVALUATION_LEAVES,
        {"name": "model.centre", "got": "the loss"},
    ),
    SavesHalf: (integrity_problems.NOT_RESUMED, {"name": FIRST, "got": f"job.pull {UNSAVED}"}),
    ForgetsToTakeBack: (integrity_problems.NOT_RESUMED, {"name": FIRST, "got": f"job.pull {UNSAVED}"}),
    ForgetfulOptimizer: (
        integrity_problems.NOT_RESUMED,
        {"name": FIRST, "got": f"optimizer.taken {UNSAVED}"},
    ),
    FollowsItsEvaluations: (integrity_problems.EVALUATION_LEAVES, {"name": "job.mean", "got": "the loss"}),
}
"""Jobs that are refused, each with the problem and facts of it."""

TOLD: dict[type[Kind], tuple[str, ...]] = {
    HiddenTeacher: (f"job.teacher[0].0.weight and 3 more {UNSAVED}",),
    CountsInAnotherClass: (".Scale.asked changes with every micro-batch",),
    CountsInADefault: (".scale_of.seen and ", "changes with every micro-batch"),
    CountsInAFunction: (".scale_by_name.asked changes with every micro-batch",),
    CountsOnAParameter: ("model.0.weight.asked changes with every micro-batch",),
    CountsInAHook: ("model.0.weight[0].norms and ", "changes with every micro-batch"),
    CountsEvaluations: ("model.seen changes with every micro-batch of it",),
}
"""Jobs that are warned of something, and words of the warning."""

HELD = [kind for kind in held_in(__name__, REFUSED) if kind not in TOLD]
"""Jobs whose bits do not depend on who runs them."""
