"""Handwritten digits with DistributedDataParallel: torchrun --nproc-per-node 2 ddp.py [FOLDER]"""

from __future__ import annotations

import math
import random
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, GLOBAL, MICRO, RATE, WARMUP, SEED = 15, 128, 32, 5e-3, 10, 17


def data() -> tuple[TensorDataset, TensorDataset]:
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(pixels).float() / 16, torch.from_numpy(labels)
    held_out = torch.arange(len(y)) % 5 == 0
    return TensorDataset(x[~held_out], y[~held_out]), TensorDataset(x[held_out], y[held_out])


def factor(update: int, updates: int) -> float:
    if update < WARMUP:
        return (update + 1) / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (update - WARMUP) / (updates - WARMUP)))


def evaluate(model: nn.Module, held_out: TensorDataset) -> tuple[float, float]:
    model.eval()
    total = torch.zeros(3, dtype=torch.float64)
    x, y = held_out.tensors
    with torch.no_grad():
        for i in range(dist.get_rank() * MICRO, len(y), dist.get_world_size() * MICRO):
            logits, labels = model(x[i : i + MICRO]), y[i : i + MICRO]
            total[0] += F.cross_entropy(logits, labels, reduction="sum")
            total[1] += (logits.argmax(1) == labels).sum()
            total[2] += len(labels)
    dist.all_reduce(total)
    model.train()
    return float(total[0] / total[2]), float(total[1] / total[2])


def train(folder: Path) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    random.seed(SEED + rank)
    np.random.seed(SEED + rank)
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    model = DistributedDataParallel(net)
    torch.manual_seed(SEED + rank)
    rows, held_out = data()
    sampler = DistributedSampler(rows, seed=SEED, drop_last=True)
    loader = DataLoader(rows, MICRO, sampler=sampler, drop_last=True)
    accumulated = GLOBAL // (MICRO * world)
    updates = EPOCHS * (len(loader) // accumulated)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: factor(update, updates))
    begin, kept = 0, folder / "checkpoint.pt"
    if kept.exists():
        state = torch.load(kept, weights_only=False)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["generators"][rank])
        begin = state["epoch"]
    for epoch in range(begin, EPOCHS):
        sampler.set_epoch(epoch)
        batches = iter(loader)
        for _ in range(len(loader) // accumulated):
            optimizer.zero_grad()
            loss = torch.zeros(())
            for i in range(accumulated):
                x, y = next(batches)
                with nullcontext() if i == accumulated - 1 else model.no_sync():
                    part: Tensor = F.cross_entropy(model(x), y) / accumulated
                    part.backward()
                loss += part.detach()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            dist.all_reduce(loss)
        eval_loss, accuracy = evaluate(model.module, held_out)
        generators: list[Tensor] = [torch.get_rng_state() for _ in range(world)]
        dist.all_gather(generators, torch.get_rng_state())
        if rank == 0:
            print(
                f"epoch {epoch + 1} loss {loss / world:.4f} eval/loss {eval_loss:.4f} eval/accuracy {accuracy:.4f}"
            )
            state = {
                "model": net.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
            }
            torch.save({**state, "epoch": epoch + 1, "generators": generators}, folder / "checkpoint.tmp")
            (folder / "checkpoint.tmp").replace(kept)


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    train(folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
