"""Jobs whose final model is not traced for MLflow: that takes longer than a short run, and is shown in test_final_model."""

from __future__ import annotations

import time
from typing import Any

import lockstep
from jobs.digits.job import Digits


class UntracedDigits(Digits):
    """jobs.digits without an example input."""

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
