"""The trainings of `commands.py` as people write them without Lockstep, each a program: `python -m tests.benchmarks.programs PEER CASE STEPS OUT [WORKERS]`.

`ddp`, `gather`, `limit` and `accelerate` are one rank each, as `torchrun` starts it; `lightning` and `ray` start their ranks themselves.
All draw batches of samples (`gather` by one indexing of tensors in memory, without a loader; `limit` is the loop of limit.py), clip the norm of gradients and update with AdamW, one thread a rank; none saves, evaluates or records. Rank 0 writes to OUT when
each step ended, in seconds since the epoch, the most memory that it held, in bytes, and how many ranks there were.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lockstep.job.interface import Job
from lockstep.job.loading import load_job
from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec
from tests.benchmarks.handwritten import MeanLoss, classification, in_ddp, language
from tests.benchmarks.tables import FEATURES, in_memory

LR, CLIP_NORM, SEED = 1e-3, 1.0, 17


TABLE = "LOCKSTEP_BENCH_TABLE"
"""The environment's name for the folder whose `all` has the table of `rows`."""


class Case(NamedTuple):
    """What is trained: a job's model and data, its loss as a mean, and the global batch in samples."""

    use: str
    params: dict[str, Any]
    mean_loss: MeanLoss
    batch: int
    steps: int
    tensors: Callable[[], tuple[Tensor, Tensor]] | None = None
    """The peers' data, where those of the job are no data set whose samples are fetched one at a time."""
    against: str = "ddp"
    """The peer that the others are measured against."""

    @property
    def job(self) -> Job:
        return load_job(self.use, self.params)

    def spec(self, micro_batches: int, *overrides: str) -> Spec:
        """The same as a spec, with so many micro-batches in a step."""
        return load_spec(
            {
                "job": {"use": self.use, "params": dict(self.params)},
                "seed": SEED,
                "length": {"steps": self.steps},
                "threads": 1,
                "batch": {"global": self.batch, "micro": self.batch // micro_batches},
                "data": {"drop_last": True},
                "optimizer": {"name": "adamw", "lr": LR},
                "clip_norm": CLIP_NORM,
            },
            overrides,
        )

    def loader(self, ranks: int, **more: Any) -> DataLoader[Any]:
        """The peers' DataLoader, of batches for one of so many ranks."""
        if self.tensors is None:
            data, collate = self.job.train_data(), self.job.collate
        else:
            data, collate = TensorDataset(*self.tensors()), None
        return DataLoader(data, self.batch // ranks, collate_fn=collate, drop_last=True, **more)


def rows_in_memory() -> tuple[Tensor, Tensor]:
    return in_memory(os.environ[TABLE])


def two_classes(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean binary cross entropy over the rows of a batch."""
    x, y = batch
    return F.binary_cross_entropy_with_logits(model(x).squeeze(1), y)


def cases() -> dict[str, Case]:
    """Every case by its name."""
    table = {"train": f"{os.environ.get(TABLE, '')}/all", "evaluation": None, "inputs": FEATURES}
    return {
        "tiny": Case("tests.benchmarks.mlp:MLP", {}, classification, 256, 2000),
        # Its samples are ragged: each batch is padded to its longest.
        "gpt": Case("jobs.stdlib_gpt.job:StdlibGPT", {"corpus_bytes": 400_000}, language, 32, 120),
        "rows": Case("jobs.tabular.job:Tabular", table, two_classes, 8192, 480, rows_in_memory, against="gather"),
    }  # fmt: skip


class Log:
    """When each step ended."""

    def __init__(self, out: str, steps: int) -> None:
        self._out, self.steps = Path(out), steps
        self._times: list[float] = []

    def step(self, loss: Tensor | float) -> bool:
        """A step has ended, with this loss, which is read as a progress line would. Whether it was the last."""
        float(loss)
        self._times.append(time.time())
        return len(self._times) == self.steps

    def write(self, rank: int, ranks: int) -> None:
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if rank == 0:
            self._out.write_text(json.dumps({"times": self._times, "peak_bytes": peak, "ranks": ranks}))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR)


def ddp(case: Case, log: Log, workers: int) -> None:
    """DistributedDataParallel, DistributedSampler and DataLoader, as PyTorch's tutorial has them."""

    def batches(world: int, rank: int) -> Iterator[Any]:
        loader = case.loader(world)
        sampler = DistributedSampler(loader.dataset, world, rank, seed=SEED, drop_last=True)
        yield from epochs(case.loader(world, sampler=sampler), sampler.set_epoch)

    by_hand(case, log, batches)


def gather(case: Case, log: Log, workers: int) -> None:
    """DistributedDataParallel over tensors in memory, without a loader: a batch is one indexing of them."""
    assert case.tensors is not None, "gather: this case has no tensors"
    x, y = case.tensors()

    def batches(world: int, rank: int) -> Iterator[Any]:
        size = case.batch // world
        for epoch in count():
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(SEED + epoch))
            own = order[rank::world].contiguous()
            for ids in own[: len(own) // size * size].split(size):
                yield x.index_select(0, ids), y.index_select(0, ids)

    by_hand(case, log, batches)


def limit(case: Case, log: Log, workers: int) -> None:
    """The least that a step takes."""
    from tests.benchmarks.limit import Limit, gathered_from

    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    tensors = None if case.tensors is None else case.tensors()
    loop = Limit(case.spec(workers), case.job.model(), case.mean_loss, *gathered_from(case.job, tensors))
    for loss in loop:
        if log.step(loss):
            break
    log.write(loop.rank, loop.world)
    if loop.world > 1:
        dist.destroy_process_group()


def by_hand(case: Case, log: Log, batches: Callable[[int, int], Iterator[Any]]) -> None:
    """A loop by hand on the batches of this rank: `batches(world, rank)`."""
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    model = case.job.model()
    wrapped, optimizer = in_ddp(model) if world > 1 else model, adamw(model)
    for batch in batches(world, rank):
        optimizer.zero_grad()
        loss = case.mean_loss(wrapped, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        if log.step(loss):
            break
    log.write(rank, world)
    if world > 1:
        dist.destroy_process_group()


def epochs(loader: Any, begin: Callable[[int], object]) -> Iterator[Any]:
    """The batches of one epoch after the other, without end."""
    for epoch in count():
        begin(epoch)
        yield from loader


def accelerate(case: Case, log: Log, workers: int) -> None:
    """Hugging Face's Accelerate."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    set_seed(SEED)
    accelerator = Accelerator(cpu=True)
    model, loader = case.job.model(), case.loader(accelerator.num_processes, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, adamw(model), loader)
    for batch in epochs(loader, lambda epoch: None):
        optimizer.zero_grad()
        loss = case.mean_loss(model, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        if log.step(loss):
            break
    log.write(accelerator.process_index, accelerator.num_processes)
    accelerator.end_training()


def lightning(case: Case, log: Log, workers: int) -> None:
    """Lightning's Trainer, without its checkpoints, logs and progress bar."""
    import lightning as L

    class Module(L.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = case.job.model()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return case.mean_loss(self.model, batch)

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            log.step(outputs["loss"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self)

    L.seed_everything(SEED, verbose=False)
    loader = case.loader(workers, shuffle=True)
    trainer = L.Trainer(
        accelerator="cpu", devices=workers, strategy="ddp" if workers > 1 else "auto", max_steps=log.steps, max_epochs=-1,
        gradient_clip_val=CLIP_NORM, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), loader)
    log.write(trainer.global_rank, trainer.world_size)


def in_ray(config: dict[str, Any]) -> None:
    """What a worker of `ray` runs."""
    import ray.train
    from ray.train.torch import prepare_data_loader, prepare_model

    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    case = cases()[config["case"]]
    log, context = Log(config["out"], config["steps"]), ray.train.get_context()
    loader = prepare_data_loader(case.loader(context.get_world_size(), shuffle=True))
    model = prepare_model(case.job.model())
    optimizer = adamw(model)
    for batch in epochs(loader, lambda epoch: None):
        optimizer.zero_grad()
        loss = case.mean_loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        if log.step(loss):
            break
    log.write(context.get_world_rank(), context.get_world_size())


def ray(name: str, steps: int, out: str, workers: int) -> None:
    """Ray Train's TorchTrainer on a local cluster of its own."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(address="local")
    TorchTrainer(
        in_ray,
        train_loop_config={"case": name, "steps": steps, "out": out},
        scaling_config=ScalingConfig(
            num_workers=workers, resources_per_worker={"CPU": min(1.0, 2 / workers)}
        ),
        run_config=RunConfig(storage_path=str(Path(out).parent / "results")),
    ).fit()


PEERS = {"ddp": ddp, "gather": gather, "limit": limit, "accelerate": accelerate, "lightning": lightning}


def main() -> None:
    peer, name, steps, out, *more = sys.argv[1:]
    workers = int(more[0]) if more else 1
    if peer == "ray":
        ray(name, int(steps), out, workers)
    else:
        torch.set_num_threads(1)
        PEERS[peer](cases()[name], Log(out, int(steps)), workers)


if __name__ == "__main__":
    main()
