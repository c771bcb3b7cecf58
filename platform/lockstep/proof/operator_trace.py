"""One micro-batch under the microscope: what every module, every operator and every parameter's gradient came to.

Everything is kept as a digest and a few statistics, in the order in which it was computed. Looking changes no bit: nothing
is drawn, and nothing is written to what is computed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.plan import Position
from lockstep.training.integrity.digests import Digester
from lockstep.training.observe.worker_memory import tensors_in

Phase = Literal["forward", "backward", "between"]
"""`between` is what Lockstep itself does, which is not looked at."""


@dataclass(frozen=True, slots=True)
class ObservedValue:
    """A value: `what` names it (`output of hidden`, `aten.addmm`), `where` is the module that it belongs to."""

    what: str
    where: str
    phase: Phase
    digest: int
    statistics: dict[str, Any] = field(compare=False)


@dataclass(slots=True)
class Look:
    """All that was seen of one micro-batch, in order."""

    batch: list[ObservedValue] = field(default_factory=list)
    weights: list[ObservedValue] = field(default_factory=list)
    modules: list[ObservedValue] = field(default_factory=list)
    """The outputs of each module's calls, inner modules before outer ones."""
    loss: list[ObservedValue] = field(default_factory=list)
    gradients: list[ObservedValue] = field(default_factory=list)
    """Of the parameters, in the order in which backward came to them."""
    operators: list[ObservedValue] = field(default_factory=list)
    later: list[Look] = field(default_factory=list)
    """The same micro-batch in the further phases of its step, in order."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Look:
        """The look whose `asdict` is `fields`."""
        values = {
            name: [ObservedValue(**document) for document in documents]
            for name, documents in fields.items()
            if name != "later"
        }
        return cls(**values, later=[cls.of(document) for document in fields.get("later", ())])


def statistics(tensor: Tensor) -> dict[str, Any]:
    """Shape, mean, standard deviation, least and greatest value, and how many are not finite."""
    figures: dict[str, Any] = {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }
    if not tensor.numel() or tensor.is_complex() or tensor.layout is not torch.strided:
        return figures
    values = tensor.detach().to(torch.float64).reshape(-1).cpu()
    finite = values[values.isfinite()]
    figures["not_finite"] = values.numel() - finite.numel()
    if finite.numel():
        mean = (
            math.fsum(finite.tolist()) / finite.numel() if finite.numel() <= 1 << 16 else float(finite.mean())
        )
        spread = float(finite.std(correction=0))
        figures |= {"mean": mean, "std": spread, "min": float(finite.min()), "max": float(finite.max())}
    return figures


class Microscope(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at micro-batch `micro_batch` of step `step` (both from 0), at its single operators only if asked; `look` has what was seen."""

    def __init__(self, step: int, micro_batch: int, *, operators: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._at, self._operators = (step, micro_batch), operators
        self.look = Look()
        self._at_hand, self._begun = self.look, False
        self._modules: list[str] = []
        self._phase: Phase = "between"
        self._busy = False

    @contextmanager
    def around(self, position: Position, m: int, model: nn.Module, phase: str) -> Iterator[None]:
        """Look while the block computes this micro-batch, forward and backward, if it is the one."""
        if (position.step, m) != self._at:
            yield
            return
        if self._begun:
            self._at_hand = Look()
            self.look.later.append(self._at_hand)
        self._begun = True
        hooks = list(self._hooks(model))
        self._at_hand.weights = [
            self._observed(name, "", value)
            for name, value in model.state_dict().items()
            if isinstance(value, Tensor)
        ]
        try:
            with self if self._operators else nullcontext():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def batch(self, position: Position, m: int, batch: Any) -> None:
        """The micro-batch as it was fetched."""
        if (position.step, m) == self._at:
            self._phase = "forward"
            self._at_hand.batch = [
                self._observed(f"batch[{i}]", "", leaf) for i, leaf in enumerate(tensors_in(batch))
            ]

    def loss(self, position: Position, m: int, total: Tensor | float) -> None:
        """The loss has been computed."""
        if (position.step, m) == self._at:
            self._phase = "between"
            self._modules = []
            if isinstance(total, Tensor):
                self._at_hand.loss = [self._observed("the loss", "", total)]

    def backward(self, position: Position, m: int) -> None:
        """Backward begins."""
        if (position.step, m) == self._at:
            self._phase = "backward"

    def _hooks(self, model: nn.Module) -> Iterator[Any]:
        for name, module in model.named_modules():
            module_name = name or "the model"

            def enter(_module: nn.Module, _inputs: Any, module_name: str = module_name) -> None:
                self._modules.append(module_name)

            def leave(_module: nn.Module, _inputs: Any, output: Any, module_name: str = module_name) -> None:
                if self._modules and self._modules[-1] == module_name:
                    self._modules.pop()
                for i, leaf in enumerate(tensors_in(output)):
                    self._at_hand.modules.append(
                        self._observed(f"output{f'[{i}]' if i else ''} of {module_name}", module_name, leaf)
                    )

            yield module.register_forward_pre_hook(enter)
            yield module.register_forward_hook(leave)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:

                def came(gradient: Tensor, name: str = name) -> None:
                    self._at_hand.gradients.append(self._observed(f"gradient of {name}", name, gradient))

                yield parameter.register_hook(came)  # type: ignore[no-untyped-call]

    def _observed(self, name: str, where: str, tensor: Tensor) -> ObservedValue:
        busy, self._busy = self._busy, True
        try:
            with torch.no_grad():
                digest = Digester(torch.device("cpu")).digest({"": tensor.detach().cpu()})
                return ObservedValue(name, where, self._phase, digest, statistics(tensor))
        finally:
            self._busy = busy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if not self._busy and self._phase != "between":
            where = self._modules[-1] if self._modules else "the loss"
            for leaf in tensors_in(output):
                if leaf.layout is torch.strided and not leaf.is_meta and not _unwritten(func):
                    self._at_hand.operators.append(
                        self._observed(str(func).removesuffix(".default"), where, leaf)
                    )
        return output


def _unwritten(func: Any) -> bool:
    """Whether an operator gives memory that nobody has written yet."""
    return ".empty" in str(func) or "new_empty" in str(func)


@dataclass(frozen=True, slots=True)
class Parting:
    """The first value in which two looks at one micro-batch part, and the operator that made it, where it was seen."""

    quantity: str
    module: str | None
    parameter: str | None
    operator: str | None
    first: ObservedValue | None
    second: ObservedValue | None


def parting(look_a: Look, look_b: Look) -> Parting | None:
    """Where two looks part first: phase by phase the batch, the weights, a module's output, the loss, or a parameter's gradient."""
    for name in ("batch", "weights", "modules", "loss", "gradients"):
        pair = _first(getattr(look_a, name), getattr(look_b, name))
        if pair is None:
            continue
        a, b = pair
        value = a or b
        assert value is not None
        quantity = f"weights {value.what}" if name == "weights" else value.what
        module = parameter = operator = None
        if name in ("modules", "loss"):
            operator, module = _operator(look_a, look_b, "forward")
            module = module or value.where or None
        if name == "gradients":
            parameter = value.where
            # The loss may be the same number where what led to it was not.
            operator, _ = _operator(
                look_a, look_b, "backward" if _forward(look_a) == _forward(look_b) else "forward"
            )
        return Parting(quantity, module, parameter, operator, a, b)
    further = zip_longest(look_a.later, look_b.later, fillvalue=Look())
    return next(filter(None, (parting(a, b) for a, b in further)), None)


def _first(
    values_a: Sequence[ObservedValue], values_b: Sequence[ObservedValue]
) -> tuple[ObservedValue | None, ObservedValue | None] | None:
    """The first pair that is not the same: values of one name are compared, in the order of `values_a`."""
    unmatched = _numbered(values_b)
    for key, a in _numbered(values_a).items():
        b = unmatched.pop(key, None)
        if b is None or a.digest != b.digest:
            return a, b
    return next(((None, b) for b in unmatched.values()), None)


def _numbered(values: Sequence[ObservedValue]) -> dict[tuple[str, int], ObservedValue]:
    """Values by their names and how often each came before."""
    count: dict[str, int] = {}
    numbered = {}
    for value in values:
        count[value.what] = count.get(value.what, 0) + 1
        numbered[value.what, count[value.what]] = value
    return numbered


def _forward(look: Look) -> Counter[int]:
    """The values that operators gave before the loss, by their digests."""
    return Counter(value.digest for value in look.operators if value.phase == "forward")


def _operator(look_a: Look, look_b: Look, phase: Phase) -> tuple[str | None, str | None]:
    """The first operator of a phase that was another one, or gave other bits, and its module."""
    a, b = ([value for value in look.operators if value.phase == phase] for look in (look_a, look_b))
    for i in range(max(len(a), len(b))):
        x, y = (value[i] if i < len(value) else None for value in (a, b))
        if x is None or y is None or (x.what, x.digest) != (y.what, y.digest):
            names = [value.what if value is not None else "nothing" for value in (x, y)]
            module = next(value.where for value in (x, y) if value is not None)
            return names[0] if names[0] == names[1] else f"{names[0]} → {names[1]}", module
    return None, None
