"""A job in which one bit of one worker flips, as a fault of its memory would have it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.distributed.small_jobs import Plain


def flip(tensor: Tensor, bit: int = 13) -> None:
    """Flip one bit of the first element of a float32 tensor, in place and as torch counts no write."""
    words = tensor.detach().view(torch.int32).view(-1)
    words[0] ^= 1 << bit


class Flipped(Plain):
    """After step number `step`, one bit of `what` flips on the worker of rank `rank`, unless the file `until` is there."""

    class Params(Plain.Params):
        norm: Literal["none", "layer", "batch"] = "batch"
        what: Literal["weight", "moment", "buffer", "nothing"] = "weight"
        step: int = 3
        rank: int = 1
        until: str = ""
        evaluated: bool = False
        own_optimizer: bool = True

    placement_variables = ("POOL_RANK",)
    params: Params

    def eval_data(self) -> Dataset[Any] | None:
        return self.train_data() if self.params.evaluated else None

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        if not self.params.own_optimizer:
            return None
        self.held = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return self.held

    def after_step(self, model: nn.Module, step: int) -> None:
        p = self.params
        if p.what == "nothing" or step != p.step or int(os.environ.get("POOL_RANK", "0")) != p.rank:
            return
        if p.until and Path(p.until).exists():
            return
        weight = next(model.parameters())
        if p.what == "weight":
            flip(weight)
        elif p.what == "buffer":
            flip(next(buffer for name, buffer in model.named_buffers() if name.endswith("running_mean")))
        else:
            flip(self.held.state[weight]["exp_avg"])
