"""Digits without what costs each worker process seconds: scikit-learn's import, and tracing the final model for MLflow."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

import lockstep
from jobs.digits.job import DigitImages, Digits, part


def read() -> tuple[np.ndarray, np.ndarray]:
    """The pixels (1797, 64) and labels (1797) of scikit-learn's file."""
    package = find_spec("sklearn")
    assert package is not None and package.origin is not None
    table = np.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    return table[:, :-1], table[:, -1].astype(np.int64)


class UntracedDigits(Digits):
    """jobs.digits, with the same images, without an example input."""

    def train_data(self) -> Dataset[tuple[Tensor, int]]:
        return DigitImages(*part(*read(), held_out=False), augment=self.params.augment)

    def eval_data(self) -> Dataset[tuple[Tensor, int]]:
        return DigitImages(*part(*read(), held_out=True), augment=False)

    def example_input(self) -> None:
        return None


class PacedDigits(UntracedDigits):
    """The same bits at a pace that leaves time to do something to a run."""

    class Params(Digits.Params):
        pause_s: float = 0.0

    params: Params

    def loss(self, model: Any, batch: Any) -> lockstep.Loss:
        time.sleep(self.params.pause_s)
        return super().loss(model, batch)


class InTheWay(UntracedDigits):
    """After its third step a file lies where the first attempt would write its checkpoints, below `disk`, where it has one."""

    class Params(Digits.Params):
        disk: lockstep.Placement[str] = ""

    params: Params

    def after_step(self, model: Any, step: int) -> None:
        if step == 3 and self.params.disk:
            (run,) = Path(self.params.disk).iterdir()
            (run / "attempt-0001").write_text("in the way")
