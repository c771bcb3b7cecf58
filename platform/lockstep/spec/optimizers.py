"""The optimizers that a spec can name: each is a class here, with its settings and how torch's is made of them.

A new one is a class and its name in `Optimizer`. Nothing here imports torch: a spec is read before it is.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, ValidationInfo, field_validator

from lockstep.spec.section import Section, named


class TorchOptimizer(Section):
    """One of torch.optim, whose arguments are the settings of the section."""

    torch_class: ClassVar[str]
    """Its name in torch.optim. It updates each element by that element's own numbers, or `sharding: optimizer` would change bits."""
    fuses: ClassVar[bool] = False
    """Whether one kernel on CUDA does all that an update does to an element, where torch's default launches one for each operation."""

    def arguments(self) -> dict[str, Any]:
        """The arguments of torch's class, beside the parameters."""
        return {field: value for field, value in self if field != "name"}


_Beta = Annotated[float, Field(ge=0, lt=1)]
_Betas = Annotated[tuple[_Beta, _Beta], Field(strict=False)]  # a list, as YAML has no tuples


class AdamW(TorchOptimizer):
    """torch.optim.AdamW."""

    torch_class = "AdamW"
    fuses = True

    name: Literal["adamw"] = "adamw"
    lr: PositiveFloat = 1e-3
    weight_decay: NonNegativeFloat = 0.01
    betas: _Betas = (0.9, 0.999)
    eps: PositiveFloat = 1e-8


class Adam(TorchOptimizer):
    """torch.optim.Adam."""

    torch_class = "Adam"
    fuses = True

    name: Literal["adam"] = "adam"
    lr: PositiveFloat = 1e-3
    weight_decay: NonNegativeFloat = 0.0
    betas: _Betas = (0.9, 0.999)
    eps: PositiveFloat = 1e-8


class SGD(TorchOptimizer):
    """torch.optim.SGD."""

    torch_class = "SGD"

    name: Literal["sgd"] = "sgd"
    lr: PositiveFloat = 1e-2
    weight_decay: NonNegativeFloat = 0.0
    momentum: NonNegativeFloat = 0.0
    nesterov: bool = False

    @field_validator("nesterov")
    @classmethod
    def _needs_momentum(cls, nesterov: bool, info: ValidationInfo) -> bool:
        if nesterov and info.data.get("momentum") == 0:
            raise ValueError("wanted false, or optimizer.momentum above 0")
        return nesterov


Optimizer = Annotated[Annotated[AdamW | Adam | SGD, Field(discriminator="name")], named("adamw")]
