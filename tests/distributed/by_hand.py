"""Data-parallel training as torch's own documentation writes it, to hold `fit` against."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from lockstep.job.loading import load_job
from lockstep.randomness import model_key, seed_all
from lockstep.spec.loading import load_spec
from lockstep.training.determinism import determinism
from lockstep.training.integrity.state_digest import weights_digest
from tests.distributed.training import Document


def clip_in_float64(gradients: list[Tensor], most: float) -> None:
    """`clip_grad_norm_` with the norm in double precision, which it takes in that of the gradients."""
    norm = math.sqrt(math.fsum(float(gradient.double().square().sum()) for gradient in gradients))
    for gradient in gradients:
        gradient.mul_(min(1.0, most / (norm + 1e-6)))


def train_by_hand(document: Document, new_order_each_epoch: bool = True) -> list[str]:
    """The digest of this rank's model after every step."""
    spec = load_spec(document)
    job = load_job(spec.job.use, spec.job.params)
    assert spec.length.epochs is not None
    digests = []
    with determinism("strict", threads=1):
        seed_all(model_key(spec.seed))
        model = DistributedDataParallel(job.model())
        data = job.train_data()
        sampler = DistributedSampler(data, shuffle=True, seed=spec.seed, drop_last=True)
        loader = DataLoader(data, batch_size=spec.batch.micro, sampler=sampler, drop_last=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.05)
        for epoch in range(spec.length.epochs):
            if new_order_each_epoch:
                sampler.set_epoch(epoch)
            for inputs, labels in loader:
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16) if spec.precision == "bf16" else nullcontext():
                    loss = F.cross_entropy(model(inputs), labels)
                loss.backward()
                clip_in_float64([p.grad for p in model.parameters()], 1.0)
                optimizer.step()
                digests.append(weights_digest(model.module.state_dict()))
    return digests
