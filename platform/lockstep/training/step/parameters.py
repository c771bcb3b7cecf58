"""Parameters change in the update and nowhere else; any other write to one is refused by name.

A parameter that a forward writes to is written once for each micro-batch that its worker runs: more often on one
worker than on two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import JobError
from lockstep.training import problems
from lockstep.training.step import problems as step_problems

SHORT = (torch.bfloat16, torch.float16)


class ParameterWatch:
    """Detects a write to any parameter of a model, frozen ones included, or another tensor in its place.

    It uses torch's count of writes, at the price of comparing two numbers per parameter. A write through `.data` is not
    counted; the rehearsal compares values.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held: list[tuple[str, Tensor, dict[str, Tensor | None], str]] = []
        seen: set[int] = set()
        for prefix, module in model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    full = f"{prefix}.{name}" if prefix else name
                    self._held.append((full, parameter, module._parameters, name))
        self._asking = [parameter.requires_grad for _, parameter, _, _ in self._held]
        self._versions: list[int] = []
        self.note()

    def note(self) -> None:
        """Accept the parameters as they are now."""
        self._versions = [parameter._version for _, parameter, _, _ in self._held]

    def check(self, where: str) -> None:
        """Raise JobError where one was written to since; `where` is the place in the run."""
        watched = zip(
            self._held, self._versions, self._asking, strict=True
        )  # one pass: this runs for each micro-batch
        for (full, parameter, owner, name), version, asking in watched:
            if parameter._version != version or owner.get(name) is not parameter:
                raise written_parameter(full, where)
            if parameter.requires_grad != asking:
                raise _asks_otherwise(full, asking, where)

    def check_asking(self, where: str) -> None:
        """Raise JobError where a parameter's `requires_grad` has changed."""
        for (full, parameter, _, _), asking in zip(self._held, self._asking, strict=True):
            if parameter.requires_grad != asking:
                raise _asks_otherwise(full, asking, where)

    def check_places(self) -> None:
        """Raise JobError where an update has replaced a parameter: the optimizer holds the old one."""
        for full, parameter, owner, name in self._held:
            if owner.get(name) is not parameter:
                raise step_problems.PARAMETER_REPLACED(
                    name=full, where="after the first update, before training"
                )


class ModuleWatch:
    """Detects parameters that come after the start, and modules with tensors that come, go, or are put in the place of others.

    It compares what the modules hold with what they held: this runs for each micro-batch.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known = dict(model.named_modules(remove_duplicate=False))
        self._parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._note()

    def _note(self) -> None:
        modules = self._known.values()
        self._held = [
            (module._parameters, len(module._parameters), module._modules, [*module._modules.values()])
            for module in modules
        ]
        self._empty = [
            (parameters, name)
            for parameters, *_ in self._held
            for name in parameters
            if parameters[name] is None
        ]

    def check(self, where: str) -> None:
        """Raise JobError for one that has come, gone or been replaced since; `where` is the place in the run."""
        alike = all(
            len(parameters) == n and [*there.values()] == children
            for parameters, n, there, children in self._held
        )
        if alike and all(parameters.get(name) is None for parameters, name in self._empty):
            return
        current = dict(self._model.named_modules(remove_duplicate=False))
        known_ids, there = set(map(id, self._known.values())), set(map(id, current.values()))
        for name in {**self._known, **current}:
            before, after = self._known.get(name), current.get(name)
            is_another_name = id(before) in there and id(after) in known_ids
            if before is not after and not is_another_name and (_has_tensors(before) or _has_tensors(after)):
                done = "was made" if before is None else "was taken out" if after is None else "was replaced"
                raise step_problems.MODULE_CHANGED(name=name, got=done, where=where)
        for name, _ in self._model.named_parameters(remove_duplicate=False):
            if name not in self._parameters:
                raise step_problems.PARAMETER_MADE(name=name, where=where)
        self._known = current  # modules without tensors may come and go
        self._note()


def _has_tensors(module: nn.Module | None) -> bool:
    return module is not None and any(True for kind in (module.parameters(), module.buffers()) for _ in kind)


def check_scaled(model: nn.Module) -> None:
    """JobError for parameters that learn in float16, or as complex numbers: torch's loss scaler takes no such gradient."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            raise problems.COMPLEX_SCALED(name=name, dtype=parameter.dtype)
        if parameter.requires_grad and parameter.dtype == torch.float16:
            raise step_problems.HALF_PARAMETER(name=name)


def short_parameters(model: nn.Module) -> list[str]:
    """A warning where parameters learn in a type of few digits, in which their gradients are summed too."""
    short = [(name, p.dtype) for name, p in model.named_parameters() if p.requires_grad and p.dtype in SHORT]
    if not short:
        return []
    (name, dtype), others = short[0], f" and {len(short) - 1} more" if len(short) > 1 else ""
    return [
        f"job.model: parameter {name!r}{others} is {dtype}, so the gradients of a step are added up and its updates rounded in so few "
        "digits (the same on any number of workers); hold it in float32 and set precision: bf16"
    ]


def _asks_otherwise(name: str, asked: bool, where: str) -> JobError:
    return step_problems.ASKS_OTHERWISE(name=name, got="no longer asks" if asked else "now asks", where=where)


def noted_on(parameter: Tensor) -> dict[str, Any]:
    """The attributes that a job has given a parameter, by which its optimizer may treat it otherwise."""
    noted = vars(parameter)
    of_torch = vars(parameter.detach()) if "fake_mode" in noted else {}
    return {name: value for name, value in noted.items() if name not in of_torch}


def written_parameter(name: str, where: str) -> JobError:
    return step_problems.PARAMETER_WRITTEN(name=name, where=where)


def missing_gradient(names: Sequence[str], where: str) -> JobError:
    """The error for parameters that a backward left without a gradient: each is named, for a person has to see to each."""
    return problems.NO_GRADIENT(
        got=", ".join(map(repr, names)),
        s="s" if len(names) > 1 else "",
        it="them" if len(names) > 1 else "it",
        where=where,
    )
