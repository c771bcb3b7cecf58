"""Jobs in which faults can be planted while they run: whichever worker finds the file of a fault first takes it, and has it once."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Any

from torch import nn

import lockstep
from jobs.stdlib_gpt.job import StdlibGPT
from lockstep.training.step.optimizer_step import Stepper
from tests.cluster.broken_jobs import SlowDigits
from tests.distributed.flipped_jobs import flip


def full_disk() -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:
        full.write(b"x")


def broken_disk() -> None:
    raise OSError(errno.EIO, "Input/output error")


def broken_memory() -> None:
    raise RuntimeError(
        "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be "
        "asynchronously reported at some other API call"
    )


def broken_link() -> None:
    raise RuntimeError(
        "NCCL error in: ProcessGroupNCCL.cpp:2356, remote process exited or there was a network error, "
        "NCCL version 2.27.3\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
    )


def no_memory() -> None:
    raise MemoryError


ERRORS = {
    "enospc": full_disk,
    "eio": broken_disk,
    "ecc": broken_memory,
    "nccl": broken_link,
    "memory": no_memory,
}
"""Faults that a worker's own call meets, by name: real ones where this machine has them, else the libraries' own texts."""

FLIP = "flip"
"""A bit of a worker's weights flips, as in faulty memory, and no call fails."""

PLANTED = (*ERRORS, FLIP)


def group_size() -> int:
    """The workers of the group that takes the step in which this is called; 1 in a rehearsal, which takes none."""
    frame = sys._getframe(1)
    while frame is not None:
        if isinstance(stepper := frame.f_locals.get("self"), Stepper):
            return stepper.group.size
        frame = frame.f_back
    return 1


class Exposed(lockstep.Job):
    """Goes before a job. Its `params.faults` is a folder: of the file `ecc` in it the first worker makes that error, once."""

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        for name, fail in ERRORS.items():
            if self._takes(name):
                fail()
        return super().loss(model, batch)  # type: ignore[safe-super]

    def after_step(self, model: nn.Module, step: int) -> None:
        if group_size() > 1 and self._takes(FLIP):  # one worker alone has nobody to compare its weights with
            flip(next(model.parameters()), bit=22)

    def _takes(self, name: str) -> bool:
        faults: str = self.params.faults  # type: ignore[attr-defined]
        try:
            Path(faults, name).unlink()
        except FileNotFoundError:
            return False
        return True


class ExposedDigits(Exposed, SlowDigits):
    class Params(SlowDigits.Params):
        faults: lockstep.Placement[str] = ""

    params: Params


class ExposedGPT(Exposed, StdlibGPT):
    class Params(StdlibGPT.Params):
        faults: lockstep.Placement[str] = ""

    params: Params
