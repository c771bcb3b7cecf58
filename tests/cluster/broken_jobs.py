"""Jobs with a mistake each."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Dataset

import lockstep
from tests.distributed.flipped_jobs import flip
from tests.fading import Fading
from tests.untraced_jobs import UntracedDigits


class LabelsOutOfRange(UntracedDigits):
    """Ten classes in the data, nine in the loss."""

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        images, labels = batch
        return lockstep.Loss(F.cross_entropy(model(images)[:, :9], labels, reduction="sum"), len(labels))


class LabelsOutOfRangeLater(LabelsOutOfRange):
    """As if such labels came late."""

    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        self.calls += 1
        return (LabelsOutOfRange if self.calls > 8 else UntracedDigits).loss(self, model, batch)


def _rank() -> int:
    """Ray's own way: a job sees neither a process group nor RANK in the environment."""
    import ray.train

    try:
        return ray.train.get_context().get_world_rank() or 0
    except RuntimeError:  # no worker
        return 0


class SlowDigits(UntracedDigits):
    """Gives a test the time to do something to a run."""

    class Params(UntracedDigits.Params):
        pause_s: float = 0.0
        gate: str = ""
        """A file: without it there is no pause. Empty: always."""

    params: Params

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        if not self.params.gate or Path(self.params.gate).exists():
            time.sleep(self.params.pause_s)
        return super().loss(model, batch)


class Uneven(SlowDigits):
    """The pause is rank 1's alone."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.rank = _rank()

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        if self.rank != 1:
            return UntracedDigits.loss(self, model, batch)
        return super().loss(model, batch)


class Greedy(UntracedDigits):
    """Takes 100 MB more with every micro-batch, and lets none of it go."""

    held: list[bytearray] = []  # noqa: RUF012 - it is meant to be the class's

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        self.held.append(bytearray(b"x") * 100_000_000)
        return super().loss(model, batch)


class Held(UntracedDigits):
    """Half a second a micro-batch until a file is there, whatever the machine: time to do something to a run, and then none lost."""

    class Params(UntracedDigits.Params):
        until: str

    params: Params

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        if not Path(self.params.until).exists():
            time.sleep(0.5)
        return super().loss(model, batch)


class Talking(UntracedDigits):
    """Prints in every micro-batch, and at length at the end."""

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        print(f"a batch of {len(batch[1])}")
        print(f"to standard error é {len(batch[1])}", file=sys.stderr)
        return super().loss(model, batch)


class Witness(Talking):
    """Writes down how many runs there are whenever its loss is computed, and how many have been told."""

    class Params(Talking.Params):
        runs: str
        told: str

    params: Params

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        runs, told = len([*Path(self.params.runs).glob("*")]), Path(self.params.told).exists()
        with Path(self.params.told).with_suffix(".seen").open("a") as file:
            file.write(f"{runs} {told} {model.training}\n")
        return super().loss(model, batch)


class Dying(UntracedDigits):
    """Its process is killed, as by the kernel for want of memory, in the third micro-batch that it sees."""

    class Params(UntracedDigits.Params):
        at_sample: int = 3

    params: Params
    seen = 0

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        self.seen += 1
        if self.seen > self.params.at_sample:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


class Forgetful(SlowDigits):
    """Exact for as long as nothing happens: what its optimizer remembers is lost with a worker."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Fading(model.parameters(), lr=0.05)


class FailingDevice(SlowDigits):
    """The GPU of one node has an uncorrectable error in every attempt: the node of the first rank 1, which a file remembers."""

    class Params(SlowDigits.Params):
        file: lockstep.Placement[str]

    params: Params

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        import ray.train

        file, node = Path(self.params.file), ray.get_runtime_context().get_node_id()
        if ray.train.get_context().get_world_rank() == 1 and not file.exists():
            file.write_text(node)
        if file.exists() and file.read_text() == node:
            raise RuntimeError(
                "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be "
                "asynchronously reported at some other API call"
            )
        return super().loss(model, batch)


class FullDisk(SlowDigits):
    """In its first attempt every node's disk is full: a real ENOSPC, once."""

    class Params(SlowDigits.Params):
        file: lockstep.Placement[str]

    params: Params

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        file = Path(self.params.file)
        if not file.exists():
            file.touch()
            with Path("/dev/full").open("wb", buffering=0) as full:
                full.write(b"x")
        return super().loss(model, batch)


class TornAtFirst(FullDisk):
    """A sample that was read once cannot be read again, once: an EIO before the first step."""

    def train_data(self) -> Any:
        return _Torn(super().train_data(), Path(self.params.file))

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        return SlowDigits.loss(self, model, batch)


class _Torn(Dataset[Any]):
    def __init__(self, whole: Any, file: Path) -> None:
        self.whole, self.file = whole, file
        self.read = set[int]()

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, index: int) -> Any:
        if index in self.read and not self.file.exists():
            self.file.touch()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.read.add(index)
        return self.whole[index]


class HungAtFirst(SlowDigits):
    """The first worker that opens the data never comes back from it."""

    class Params(SlowDigits.Params):
        file: lockstep.Placement[str]

    params: Params

    def train_data(self) -> Any:
        import ray

        file = Path(self.params.file)
        worker = ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
        if worker and not file.exists():
            file.touch()
            time.sleep(3600)
        return super().train_data()


class FlippedInRehearsal(SlowDigits):
    """With the file `crash` in a folder its worker is killed, once; and a bit of the weights flips while the next worker rehearses."""

    class Params(SlowDigits.Params):
        faults: lockstep.Placement[str] = ""

    params: Params

    def after_step(self, model: nn.Module, step: int) -> None:
        crash, rehearsed = Path(self.params.faults, "crash"), Path(self.params.faults, "flip")
        if step == 3 and crash.exists():
            crash.rename(rehearsed)
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 1 and rehearsed.exists():
            rehearsed.unlink()
            flip(next(model.parameters()), bit=22)


class FlippedBit(SlowDigits):
    """Once, after step number `step`, a bit of the weights of the worker of rank `rank` flips, as in faulty memory."""

    class Params(SlowDigits.Params):
        file: lockstep.Placement[str]
        step: int = 5
        rank: int = 1

    params: Params

    def after_step(self, model: nn.Module, step: int) -> None:
        if step == self.params.step and _rank() == self.params.rank and not Path(self.params.file).exists():
            Path(self.params.file).touch()
            flip(next(model.parameters()), bit=22)


class FailingSample(SlowDigits):
    """One micro-batch fails like a broken GPU wherever it is computed: the first that rank 1 sees after step 3, whose digest a file remembers."""

    class Params(SlowDigits.Params):
        file: lockstep.Placement[str]

    params: Params
    begins = False

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        file, digest = Path(self.params.file), hashlib.sha256(batch[0].numpy().tobytes()).hexdigest()
        if self.begins and not file.exists():
            file.write_text(digest)
        if file.exists() and file.read_text() == digest:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return super().loss(model, batch)

    def after_step(self, model: nn.Module, step: int) -> None:
        self.begins = step == 3 and _rank() == 1


class KilledOnce(SlowDigits):
    """One worker is killed, once, at the moment that `at` names: in an `evaluation`, in a `save`, or as a joining worker gets the state (`join`)."""

    class Params(SlowDigits.Params):
        at: lockstep.Placement[str] = ""
        file: lockstep.Placement[str] = ""

    params: Params
    steps = 0

    def _reach(self, moment: str) -> None:
        if moment == self.params.at and self.steps > 2:
            with suppress(FileExistsError):
                Path(self.params.file).touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        if not model.training:
            self._reach("evaluation")
        return super().loss(model, batch)

    def after_step(self, model: nn.Module, step: int) -> None:
        self.steps = step

    def state_dict(self) -> dict[str, Any]:
        self._reach("save")
        return {"steps": self.steps}

    def load_state_dict(self, state: Any) -> None:
        self.steps = state["steps"]
        if "JoiningWorker" in psutil.Process().cmdline()[0]:
            self._reach("join")


class _Reported(ReduceLROnPlateau):
    """Lowers no rate in a short run; it tells the job that an evaluation has decided."""

    job: LostBeforeSave

    def step(self, metrics: Any, epoch: int | None = None) -> None:
        super().step(metrics, epoch)
        type(self).job.reach("evaluated")


class LostBeforeSave(SlowDigits):
    """Every worker of a trial that is not rank 0 is killed at two steps with an evaluation and a save: when the evaluation has decided, and as the state is copied."""

    class Params(SlowDigits.Params):
        lost: lockstep.Placement[dict[str, int]] = {}  # noqa: RUF012 - pydantic copies it
        """The step at which it is killed, by moment."""

    params: Params
    steps = 0

    def reach(self, moment: str) -> None:
        if self.params.lost.get(moment) == self.steps and "ray::Peer" in psutil.Process().cmdline()[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    def after_step(self, model: nn.Module, step: int) -> None:
        self.steps = step

    def schedule(self, optimizer: torch.optim.Optimizer, updates: int) -> Any:
        _Reported.job = self
        return _Reported(optimizer)

    def state_dict(self) -> dict[str, Any]:
        self.reach("save")
        return {}
