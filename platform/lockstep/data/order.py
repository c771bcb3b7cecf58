"""The order of the samples in an epoch: a pure function of (seed, epoch, number of samples)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def epoch_order(seed: int, epoch: int, samples: int, shuffle: Literal["full", "none"]) -> Tensor:
    """Sample ids in the order in which an epoch visits them, int64 of shape [samples].

    `full` is bit for bit the permutation of `torch.utils.data.DistributedSampler` after `set_epoch(epoch)`.
    """
    if shuffle == "none":
        return torch.arange(samples)
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(samples, generator=generator)
