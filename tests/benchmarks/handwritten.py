"""What Lockstep is measured against: a DistributedDataParallel loop as an expert writes it by hand."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from lockstep.job.interface import Job
from lockstep.spec.fields import Spec
from lockstep.spec.optimizers import AdamW
from lockstep.training.step.sharding_units import members_of

MeanLoss = Callable[[nn.Module, Any], Tensor]


def classification(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy over the rows of a micro-batch."""
    x, y = batch
    return F.cross_entropy(model(x), y)


def language(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy over the tokens of a micro-batch; -100 marks the padding."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())


def training(
    spec: Spec, job: Job, mean_loss: MeanLoss, tensors: tuple[Tensor, ...] | None = None
) -> Iterator[float]:
    """Train without end on what `spec` says of batches and optimizer; gives this rank's loss after each step.

    It does what is customary: micro-batches of `batch.micro`, accumulated without synchronisation, a clipped norm,
    and the loss read once a step. It reduces no metric, seeds nothing, checks nothing. With `sharding: full` it is FSDP2, with a unit a block, and the gradients
    of each micro-batch are reduced: no worker has whole ones. `tensors` take the place of the job's data.
    """
    sharded = spec.sharding.mode == "full"
    world, accumulated = dist.get_world_size(), spec.batch.micro_batches // dist.get_world_size()
    dataset: Dataset[Any] = job.train_data() if tensors is None else TensorDataset(*tensors)
    collate = job.collate if tensors is None else None
    sampler = DistributedSampler(dataset, seed=spec.seed, drop_last=True)
    loader = DataLoader(
        dataset, spec.batch.micro, sampler=sampler, collate_fn=collate, drop_last=True, num_workers=0
    )
    torch.manual_seed(spec.seed)
    model = job.model()
    wrapped = in_fsdp(model) if sharded else in_ddp(model) if world > 1 else model
    optimizer = adamw(model, spec)
    for epoch in count():
        sampler.set_epoch(epoch)
        batches = iter(loader)
        for _ in range(len(loader) // accumulated):
            optimizer.zero_grad()
            total = torch.zeros(())
            for i in range(accumulated):
                last = i == accumulated - 1
                with nullcontext() if last or sharded or world == 1 else wrapped.no_sync():
                    loss = mean_loss(wrapped, next(batches)) / accumulated
                    loss.backward()
                total += loss.detach()
            if spec.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), spec.clip_norm)
            optimizer.step()
            yield total.item()


def in_fsdp(model: nn.Module) -> nn.Module:
    """The units are those that Lockstep finds."""
    for unit in [*members_of(model), model]:
        fully_shard(unit)
    return model


def in_ddp(model: nn.Module) -> DistributedDataParallel:
    """Gradients are views of the buckets, constant buffers are not broadcast: the quicker choices."""
    known = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return DistributedDataParallel(model, gradient_as_bucket_view=True, **{buffers: False})


def adamw(model: nn.Module, spec: Spec) -> torch.optim.Optimizer:
    """torch's AdamW with the settings of the spec."""
    settings = spec.optimizer
    assert isinstance(settings, AdamW)
    return torch.optim.AdamW(
        model.parameters(),
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
