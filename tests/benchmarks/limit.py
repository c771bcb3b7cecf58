"""The least that a step takes: a training loop with nothing between its arithmetic, which Lockstep's step is held against.

No DDP, no loader, no hook. The rows of a micro-batch are gathered at once, gradients are added up in one flat buffer, whose last number is the
loss, one all-reduce sums it over the ranks, and torch's fused AdamW updates. It seeds nothing, checks nothing and records nothing, and
adds up in whatever order is quickest, so its bits are others for another number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.job.interface import Job
from lockstep.spec.fields import Spec
from lockstep.spec.optimizers import AdamW
from tests.benchmarks.handwritten import MeanLoss

Gather = Callable[[Tensor], Any]
"""Gives the micro-batch of some samples, by their numbers."""


class Limit:
    """One rank's loop. Its methods are the parts of a step, each of which `step_costs` times by itself."""

    def __init__(
        self, spec: Spec, model: nn.Module, mean_loss: MeanLoss, samples: int, gather: Gather
    ) -> None:
        """`samples` is how many there are. The ranks' models have to be the same."""
        settings = spec.optimizer
        assert isinstance(settings, AdamW)
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.group = dist.group.WORLD  # `fit` hides it while it trains
        self.micro_batches, self.most = spec.batch.micro_batches, spec.clip_norm
        self.model, self.mean_loss, self.gather = model, mean_loss, gather
        self.rank = dist.get_rank() if self.world > 1 else 0
        self.ids = sample_ids(samples, spec.batch.micro, spec.seed, self.rank, self.world)
        parameters = list(model.parameters())
        sizes = [parameter.numel() for parameter in parameters]
        self.sums = torch.zeros(sum(sizes) + 1)
        """The gradients one after another, then the loss."""
        self.gradients, self.loss = self.sums[:-1], self.sums[-1]
        for parameter, gradient in zip(parameters, self.gradients.split(sizes), strict=True):
            parameter.grad = gradient.view_as(parameter)
        self.optimizer = torch.optim.AdamW(
            parameters,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def step(self) -> float:
        """Take a step. Returns its loss, the mean over the global batch."""
        self.sums.zero_()
        for _ in range(self.micro_batches // self.world):
            self.backward(self.forward(self.fetch()))
        self.exchange()
        self.clip()
        self.update()
        return self.loss.item()

    def fetch(self) -> Any:
        return self.gather(next(self.ids))

    def forward(self, batch: Any) -> Tensor:
        return self.mean_loss(self.model, batch) / self.micro_batches

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        self.loss.add_(loss.detach())

    def exchange(self) -> None:
        if self.world > 1:
            dist.all_reduce(self.sums, group=self.group)

    def clip(self) -> None:
        if self.most is not None:
            factor = self.most / (torch.linalg.vector_norm(self.gradients).item() + 1e-6)
            if factor < 1.0:
                self.gradients.mul_(factor)

    def update(self) -> None:
        self.optimizer.step()

    def __iter__(self) -> Iterator[float]:
        """The losses of one step after another, without end."""
        while True:
            yield self.step()


def sample_ids(samples: int, micro: int, seed: int, rank: int, world: int) -> Iterator[Tensor]:
    """The samples of one rank's micro-batches without end, each epoch in another order."""
    for epoch in count():
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed + epoch))
        mine = order[rank::world].contiguous()
        yield from mine[: len(mine) // micro * micro].split(micro)


def gathered_from(job: Job, tensors: tuple[Tensor, ...] | None = None) -> tuple[int, Gather]:
    """How many samples a job trains on, and how they are gathered: by one indexing of its `tensors`, or of those of its TensorDataset; else by its collation."""
    data: Any = job.train_data() if tensors is None else TensorDataset(*tensors)
    if not isinstance(data, TensorDataset):
        return len(data), lambda ids: job.collate([data[i] for i in ids.tolist()])
    rows = data.tensors
    return len(data), lambda ids: [tensor.index_select(0, ids) for tensor in rows]
