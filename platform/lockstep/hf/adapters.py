"""LoRA: adapters of low rank beside the frozen weights of a model of transformers."""

from __future__ import annotations

import warnings
from typing import Any

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import nn

from lockstep.errors import first_line, nearest
from lockstep.hf import problems
from lockstep.hf.libraries import peft
from lockstep.job.interface import Params


class Lora(Params):
    """Adapters of low rank (Hu et al. 2021, arXiv 2106.09685), by peft: they learn, and the model below them is frozen."""

    r: PositiveInt = 8
    alpha: PositiveFloat = 16.0
    dropout: NonNegativeFloat = Field(default=0.0, lt=1)
    targets: tuple[str, ...] | None = None
    """Names of the modules that get adapters, such as `q_proj`; None: peft's own choice for this kind of model."""


def with_adapters(model: Any, lora: Lora, task: str) -> Any:
    """A model of transformers with adapters that learn, for a `task` by its name in peft. SpecError for targets that it does not have."""
    library = peft()
    modules = {
        name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    config = library.LoraConfig(
        task_type=task,
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=None if lora.targets is None else list(lora.targets),
    )
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # libraries about each other
            adapted = library.get_peft_model(model, config)
    except ValueError as error:
        raise problems.LORA_TARGETS(got=first_line(error)) from error
    for target in lora.targets or ():
        if not any(f".{name}".endswith(f".{target}") for name in adapted.targeted_module_names):
            kinds = {name.rpartition(".")[2] for name in adapted.targeted_module_names} | modules
            raise problems.NO_MODULE(target=target, hint=nearest(target, kinds))
    return adapted
