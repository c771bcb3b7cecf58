"""Which modules ran in which dtype under autocast, noted once, by temporary hooks in the first micro-batch of an attempt."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from lockstep.plan import Position
from lockstep.training.integrity.probe import NoProbe
from lockstep.training.observe.worker_memory import tensors_in

NAME = "precision.json"


@dataclass(slots=True)
class Ran:
    """A module that ran: its class, and the types of its floating-point parameters, inputs and outputs."""

    kind: str
    parameters: list[str]
    inputs: list[str]
    outputs: list[str]
    calls: int = 0


@dataclass
class Coverage(NoProbe):
    """Notes in `modules`, by name, the dtypes that each module of the first micro-batch ran in. It changes no result."""

    precision: str
    modules: dict[str, Ran] = field(default_factory=dict)

    @contextmanager
    def around(self, position: Position, m: int, model: nn.Module, phase: str) -> Iterator[None]:
        if self.modules:
            yield
            return
        hooks = [
            module.register_forward_hook(partial(self._note, name or type(model).__name__), with_kwargs=True)
            for name, module in model.named_modules()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _note(self, name: str, module: nn.Module, given: Any, named: Any, output: Any) -> None:
        ran = self.modules.setdefault(
            name, Ran(type(module).__name__, _types(module.parameters(recurse=False)), [], [])
        )
        ran.inputs = sorted({*ran.inputs, *_types([given, named])})
        ran.outputs = sorted({*ran.outputs, *_types(output)})
        ran.calls += 1

    def text(self) -> str:
        """The text of precision.json: the modules in the order in which they first returned, and how many have which output dtypes."""
        outputs = Counter(", ".join(ran.outputs) or "none" for ran in self.modules.values())
        modules = [
            {
                "name": name,
                "class": ran.kind,
                "parameters": ran.parameters,
                "inputs": ran.inputs,
                "outputs": ran.outputs,
                "calls": ran.calls,
            }
            for name, ran in self.modules.items()
        ]
        return json.dumps(
            {"precision": self.precision, "outputs": dict(outputs), "modules": modules}, indent=1
        )


def _types(value: Any) -> list[str]:
    """The floating-point types of the tensors of a value."""
    tensors = (
        [value]
        if isinstance(value, Tensor)
        else tensors_in(list(value) if isinstance(value, Iterator) else value)
    )
    return sorted(
        {str(tensor.dtype).removeprefix("torch.") for tensor in tensors if tensor.dtype.is_floating_point}
    )
