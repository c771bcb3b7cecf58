"""Jobs with state that a resume loses, and that begins only after some steps: nothing that a rehearsal of the first two steps sees.

Each begins at step `begins`. From then on the state changes after each step, and the loss or the update follows it. `Late` is what they have in
common, and `EVERY` has them all.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import itertools
import queue
import random
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

import lockstep
from lockstep import Loss
from tests.distributed.kinds import FEATURES, Kind, perceptron


class Late(Kind):
    class Params(lockstep.Params):
        begins: int = 5
        seed: int = 0
        pause_s: float = 0.0
        """How long each micro-batch takes at least."""

    params: Params
    named: ClassVar[str] = ""
    """What the message names; nothing where the state is out of sight."""

    def eval_data(self) -> None:
        return None

    def factor(self) -> float:
        """What the loss is multiplied by."""
        return 1.0

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        time.sleep(self.params.pause_s)
        loss = super().loss(model, batch)
        return Loss(loss.total * self.factor(), loss.weight, loss.parts)

    def after_step(self, model: nn.Module, step: int) -> None:
        if step + 1 >= self.params.begins:
            self.late(model)

    def late(self, model: nn.Module) -> None:
        """Changes the state after a step."""


COUNT = 0


class ModuleGlobal(Late):
    named = "late_kinds.COUNT"

    def factor(self) -> float:
        return 1.0 + 0.01 * COUNT

    def late(self, model: nn.Module) -> None:
        global COUNT
        COUNT += 1


HISTORY: list[float] = []


class GlobalList(Late):
    named = "late_kinds.HISTORY"

    def factor(self) -> float:
        return 1.0 + 0.01 * len(HISTORY)

    def late(self, model: nn.Module) -> None:
        HISTORY.append(0.5)


class ClassAttribute(Late):
    named = "class ClassAttribute.seen"
    seen: ClassVar[int] = 0

    def factor(self) -> float:
        return 1.0 + 0.01 * self.seen

    def late(self, model: nn.Module) -> None:
        type(self).seen += 1


class JobAttribute(Late):
    named = "job.patience"
    patience = 0

    def factor(self) -> float:
        return 1.0 / (1 + self.patience)

    def late(self, model: nn.Module) -> None:
        self.patience += 1


class CacheOfSteps(Late):
    """A cache that `after_step` fills."""

    named = "job.cache"

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.cache: dict[str, float] = {}

    def factor(self) -> float:
        return self.cache.get("scale", 1.0)

    def late(self, model: nn.Module) -> None:
        first = next(model.parameters())
        self.cache["scale"] = 1.0 + float(first.detach().abs().mean())


class AnIterator(Late):
    named = "job.rate"
    rates: Iterator[float] | None = None
    rate = 1.0

    def factor(self) -> float:
        return self.rate

    def late(self, model: nn.Module) -> None:
        if self.rates is None:
            self.rates = itertools.count(1.0, 0.125)
        self.rate = next(self.rates)


class AGenerator(Late):
    """Python's kind of generator, whose frame nothing sees."""

    named = "job.value"
    now: Any = None

    def factor(self) -> float:
        return self.now() if self.now is not None else 1.0

    def late(self, model: nn.Module) -> None:
        def rises() -> Iterator[float]:
            at = 1.0
            while True:
                at += 0.25
                yield at

        if self.now is None:
            self.rises = rises()
            self.now = functools.partial(getattr, self, "value")
        self.value = next(self.rises)


class TorchGenerator(Late):
    """Draws that are held, from a generator that nothing keys."""

    named = "job.generator"
    drawn = 1.0

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.generator = torch.Generator().manual_seed(params.seed)

    def factor(self) -> float:
        return self.drawn

    def late(self, model: nn.Module) -> None:
        self.drawn = 0.5 + float(torch.rand((), generator=self.generator))


class NumpyGenerator(Late):
    named = "job.generator"
    drawn = 1.0

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.generator = np.random.default_rng(params.seed)

    def factor(self) -> float:
        return self.drawn

    def late(self, model: nn.Module) -> None:
        self.drawn = 0.5 + float(self.generator.random())


class PythonRandom(Late):
    named = "job.random"
    drawn = 1.0

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.random = random.Random(params.seed)

    def factor(self) -> float:
        return self.drawn

    def late(self, model: nn.Module) -> None:
        self.drawn = 0.5 + self.random.random()


class Recent(Late):
    """The mean of the last few values."""

    named = "job.recent"

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.recent: deque[float] = deque(maxlen=4)

    def factor(self) -> float:
        return 1.0 + sum(self.recent)

    def late(self, model: nn.Module) -> None:
        self.recent.append(float(next(model.parameters()).detach().abs().mean()))


class Waiting(Late):
    """State in a queue, which no walk of objects sees."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.waiting: queue.SimpleQueue[int] = queue.SimpleQueue()

    def factor(self) -> float:
        return 1.0 + 0.125 * self.waiting.qsize()

    def late(self, model: nn.Module) -> None:
        self.waiting.put(1)


LEVEL = contextvars.ContextVar("level", default=0)


class ContextVariable(Late):
    def factor(self) -> float:
        return 1.0 + 0.125 * LEVEL.get()

    def late(self, model: nn.Module) -> None:
        LEVEL.set(LEVEL.get() + 1)


@functools.cache
def _first_seen(key: str) -> list[float]:
    return [1.0]


class FunctionCache(Late):
    def factor(self) -> float:
        return _first_seen("rate")[0]

    def late(self, model: nn.Module) -> None:
        _first_seen("rate")[0] *= 1.125


class Teacher(Late):
    """A copy of the model that is made late, and that the loss follows from then on."""

    teacher: nn.Module | None = None

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        if self.teacher is None:
            return loss
        x, _ = batch
        with torch.no_grad():
            wanted = self.teacher(x)
        return Loss(loss.total + (model(x) - wanted).square().sum(), loss.weight, loss.parts)

    def late(self, model: nn.Module) -> None:
        if self.teacher is None:
            self.teacher = copy.deepcopy(model)


class NeedsItsTeacher(Teacher):
    """The same, where a resumed step does not compute otherwise, but fails."""

    named = "there is no teacher"

    def after_step(self, model: nn.Module, step: int) -> None:
        super().after_step(model, step)
        if step + 1 >= self.params.begins:
            assert self.teacher is not None
            model.get_submodule("0").stage = 1

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        if getattr(model.get_submodule("0"), "stage", 0) and self.teacher is None:
            raise RuntimeError("there is no teacher")
        return super().loss(model, batch)


class Plain(nn.Module):
    """A layer with a list, and a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.grows: list[float] = []
        self.shift = torch.zeros(FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + len(self.grows)) + self.shift


class ListOfModule(Late):
    named = "model.0.grows"

    def model(self) -> nn.Module:
        return nn.Sequential(Plain(), perceptron())

    def late(self, model: nn.Module) -> None:
        if len(model.get_submodule("0").grows) < 300:
            model.get_submodule("0").grows.append(1.0)


class TensorOfModule(Late):
    named = "model.0.shift"

    def model(self) -> nn.Module:
        return nn.Sequential(Plain(), perceptron())

    def late(self, model: nn.Module) -> None:
        layer: Any = model.get_submodule("0")
        layer.shift = layer.shift + 0.0625


class HookOfModule(Late):
    """A hook that is registered late."""

    hooked = False

    def late(self, model: nn.Module) -> None:
        if not self.hooked:
            self.hooked = True
            model.get_submodule("0").register_forward_hook(lambda module, given, output: output * 2.0)


class OtherLoss(Late):
    """A curriculum: from some step on another loss."""

    named = "job.second"
    second = False

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        return Loss(loss.total.square() if self.second else loss.total, loss.weight)

    def late(self, model: nn.Module) -> None:
        self.second = True


class Remembers(torch.optim.SGD):
    """An optimizer with a number that its `state_dict` leaves out."""

    beyond = 0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(1.0 / (1 + self.beyond))
        return super().step(closure)


class AttributeOfOptimizer(Late):
    named = "optimizer.beyond"

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.made = Remembers(model.parameters(), lr=0.01)
        return self.made

    def late(self, model: nn.Module) -> None:
        self.made.beyond += 1


class CountsItself(torch.optim.SGD):
    """An optimizer that counts its own steps in an attribute, and changes its mind."""

    def __init__(self, *given: Any, begins: int, **more: Any) -> None:
        super().__init__(*given, **more)
        self.count, self.begins = 0, begins

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        late = max(0, self.count - self.begins)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(1.0 + 0.125 * late)
        return super().step(closure)


class StepsOfOptimizer(Late):
    named = "optimizer.count"

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return CountsItself(model.parameters(), lr=0.01, begins=self.params.begins)


class HookOfOptimizer(Late):
    """A hook of the optimizer that keeps what it saw."""

    named = "optimizer hook"

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        made, seen = torch.optim.SGD(model.parameters(), lr=0.01), [0]

        def before(optimizer: torch.optim.Optimizer, *given: Any) -> None:
            seen[0] += 1
            if seen[0] > self.params.begins:
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            parameter.grad.mul_(1.0 + seen[0])

        made.register_step_pre_hook(before)
        return made


class Environment(Late):
    """It keeps a number in a variable of its process."""

    placement_variables = ("LATE_FACTOR",)

    def factor(self) -> float:
        import os

        return float(os.environ.get("LATE_FACTOR", "1"))

    def late(self, model: nn.Module) -> None:
        import os

        os.environ["LATE_FACTOR"] = str(self.factor() + 0.125)


EVERY: tuple[type[Late], ...] = (
    ModuleGlobal,
    GlobalList,
    ClassAttribute,
    JobAttribute,
    CacheOfSteps,
    AnIterator,
    AGenerator,
    TorchGenerator,
    NumpyGenerator,
    PythonRandom,
    Recent,
    Waiting,
    ContextVariable,
    FunctionCache,
    Teacher,
    NeedsItsTeacher,
    ListOfModule,
    TensorOfModule,
    HookOfModule,
    OtherLoss,
    AttributeOfOptimizer,
    StepsOfOptimizer,
    HookOfOptimizer,
)
