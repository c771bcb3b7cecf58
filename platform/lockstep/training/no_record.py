"""The record of every rank but 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from lockstep.record.ledger import CheckpointRow, EvaluationRow, History, StepRow


class Stop(Protocol):
    """Whether someone asks the run to stop."""

    @property
    def asked(self) -> bool: ...


class NoRecord:
    """The record of every rank but 0; under torchrun a rank hears of signals by itself."""

    def __init__(self, stop: Stop | None = None) -> None:
        self._stop = stop

    def loaded(self) -> None: ...

    def saving(self) -> bool:
        return False

    def straggling(self, text: str) -> None: ...

    def started(self, facts: Mapping[str, Any]) -> None: ...

    def restored(self, history: History) -> None: ...

    def step(self, row: StepRow) -> None: ...

    def evaluation(self, row: EvaluationRow) -> None: ...

    def finished(self, summary: Mapping[str, Any], weights: Mapping[str, Mapping[str, Tensor]]) -> None: ...

    def stopping(self) -> bool:
        return self._stop is not None and self._stop.asked

    def run_id(self) -> str:
        raise NotImplementedError("rank 0 knows the run")

    def checkpoint(self, row: CheckpointRow) -> None: ...

    def alive(self) -> None: ...

    def warn(self, text: str) -> None: ...
