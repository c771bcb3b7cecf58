"""A job over sequences of unlike lengths, and loops of its author in plain torch, for batches that change from step to step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import lockstep
from lockstep.data import Mixture
from lockstep.job.loading import load_job
from lockstep.randomness import model_key, seed_all
from lockstep.spec.loading import load_spec
from lockstep.training.determinism import determinism
from lockstep.training.integrity.state_digest import weights_digest
from lockstep.training.job_data import make_sampler
from lockstep.training.planning import make_plan
from tests.distributed import batch_kinds
from tests.distributed.training import Document

WORDS, LONGEST = 17, 20


class Sentences(Dataset[Tensor]):
    """Sequences of 3 … 20 tokens; some lengths are those of many, others of one."""

    def __init__(self, count: int) -> None:
        draw = torch.Generator().manual_seed(7)
        self.lengths = torch.randint(3, LONGEST + 1, (count,), generator=draw).tolist()
        self.rows = [torch.randint(1, WORDS, (n,), generator=draw) for n in self.lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class NextWord(lockstep.Job):
    """Predicts the next token from the one before; the weight of a micro-batch is its number of targets. With dropout it draws."""

    class Params(lockstep.Params):
        samples: int = 75
        dropout: float = 0.2

    params: Params

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Embedding(WORDS, 8),
            nn.Linear(8, 12),
            nn.Tanh(),
            nn.Dropout(self.params.dropout),
            nn.Linear(12, WORDS),
        )

    def train_data(self) -> Sentences:
        return Sentences(self.params.samples)

    def eval_data(self) -> Sentences:
        return Sentences(11)

    def collate(self, samples: Sequence[Tensor]) -> Tensor:
        return pad_sequence(list(samples), batch_first=True)

    def loss(self, model: nn.Module, batch: Tensor) -> lockstep.Loss:
        targets = batch[:, 1:]
        total = F.cross_entropy(
            model(batch[:, :-1]).transpose(1, 2), targets, ignore_index=0, reduction="sum"
        )
        return lockstep.Loss(total, (targets != 0).sum())


class LengthsOfTheJob(NextWord):
    """The job knows the lengths, and its dataset does not."""

    def train_data(self) -> Any:
        return Sentences(self.params.samples).rows

    def lengths(self, data: Any) -> list[int]:
        return [len(row) for row in data]


class Mixed(NextWord):
    """Its data have an order of their own."""

    def train_data(self) -> Any:
        return Mixture({"few": Sentences(20), "more": Sentences(55)}, weights={"few": 0.5, "more": 0.5})


class ByEpochs(NextWord):
    """Its schedule counts the updates of an epoch."""

    def schedule(self, optimizer: torch.optim.Optimizer, updates: Any) -> Any:
        return lambda update: 0.5 ** (update // updates.per_epoch)


class StepsByEpochs(NextWord):
    """Its scheduler is stepped when an epoch ends."""

    def schedule(self, optimizer: torch.optim.Optimizer, updates: Any) -> Any:
        assert updates.epochs == 3
        return lockstep.PerEpoch(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))


def some_lengths(data: Any) -> list[int]:
    """Lengths for points that have none."""
    return [2 + i % 5 for i in range(len(data))]


class ClipOfLengths(batch_kinds.Clip):
    def lengths(self, data: Any) -> list[int]:
        return some_lengths(data)


class QueueOfLengths(batch_kinds.QueueOfTheBatch):
    def lengths(self, data: Any) -> list[int]:
        return some_lengths(data)


def ramp(**more: Any) -> Document:
    """Three epochs of 75 samples: steps of 4, 8 and 16, each epoch with a ragged end; the sizes change inside epochs."""
    return {
        "job": {"use": "tests.distributed.changing_jobs:NextWord"},
        "length": {"epochs": 3},
        "batch": {"global": [{"size": 4, "until_samples": 30}, {"size": 8, "until_steps": 16}, {"size": 16}], "micro": 4},
        "data": {"drop_last": False},
        "optimizer": {"name": "adamw", "lr": 0.02},
        "clip_norm": 1.0,
        "evaluate": {"every": {"epochs": 1}},
        **more,
    }  # fmt: skip


def by_tokens(**more: Any) -> Document:
    """Two epochs of micro-batches of at most 64 padded tokens and 6 samples, four of them a step."""
    return {
        "job": {"use": "tests.distributed.changing_jobs:NextWord"},
        "length": {"epochs": 2},
        "batch": {"global": 24, "micro": 6, "tokens": 64},
        "data": {"shuffle": "by_length", "drop_last": False},
        "optimizer": {"name": "adamw", "lr": 0.02},
        "clip_norm": 1.0,
        "evaluate": {"every": {"epochs": 1}},
        **more,
    }


def by_windows(**more: Any) -> Document:
    """Two epochs of micro-batches of four samples of like lengths, out of windows of two steps."""
    batch = {"global": 16, "micro": 4}
    return {
        **by_tokens(),
        "batch": batch,
        "data": {"shuffle": "by_length", "window": 2, "drop_last": False},
        **more,
    }


# --- the author's own loop ------------------------------------------------------------------------------------


def ramped_batches(count: int, sizes: Sequence[int], micro: int, seed: int) -> Iterator[list[list[int]]]:
    """The micro-batches of a step of each of `sizes`, as DistributedSampler with a replica for each micro-batch would give them; no epoch has a rest."""
    epoch, order = -1, list[int]()
    for size in sizes:
        if not order:
            epoch += 1
            order = torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        step, order = order[:size], order[size:]
        yield [step[m :: size // micro] for m in range(size // micro)]


def planned_batches(document: Document) -> Iterator[list[list[int]]]:
    """The micro-batches of each step, as the plan has them."""
    spec = load_spec(document)
    job = load_job(spec.job.use, spec.job.params)
    data = job.train_data()
    plan = make_plan(spec, job, data)
    sampler = make_sampler(spec, plan, data)
    for position in plan.positions():
        yield [list(sampler.at(position, m).ids) for m in range(position.micro_batches)]


def train_by_hand(
    document: Document, steps: Iterator[list[list[int]]]
) -> tuple[list[str], list[float], nn.Module]:
    """Plain torch, as fairseq divides: the gradients of the sums added micro-batch by micro-batch, then once divided by the tokens of the step.

    Returns the digest of the weights after each step, the mean loss of each step's tokens, and the model.
    """
    spec = load_spec(document)
    job = load_job(spec.job.use, spec.job.params)
    digests, losses = [], []
    with determinism("strict", threads=1):
        seed_all(model_key(spec.seed))
        model = job.model()
        data = job.train_data()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.01)
        for micro_batches in steps:
            optimizer.zero_grad()
            tokens, total = 0, 0.0
            for ids in micro_batches:
                batch = pad_sequence([data[i] for i in ids], batch_first=True)
                logits = model(batch[:, :-1]).transpose(1, 2)
                loss = F.cross_entropy(logits, batch[:, 1:], ignore_index=0, reduction="sum")
                loss.backward()
                total += float(loss.detach())
                tokens += int((batch[:, 1:] != 0).sum())
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(1.0 / tokens)
            optimizer.step()
            digests.append(weights_digest(model.state_dict()))
            losses.append(total / tokens)
    return digests, losses, model


def padding(ids: Sequence[int], lengths: Sequence[int]) -> int:
    """Tokens of padding in a micro-batch."""
    row = np.array([lengths[i] for i in ids])
    return int(len(row) * row.max() - row.sum())
