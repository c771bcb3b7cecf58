"""A wide table: a small network on rows of Parquet files that tells two classes apart."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

import lockstep
from lockstep.data import Column, Table


class Tabular(lockstep.Job):
    """Predicts a label from the numbers of a row."""

    class Params(lockstep.Params):
        train: lockstep.Placement[str] = "data/tabular/train"
        """Parquet or Arrow: a file, a folder, a glob, or a URI such as s3://bucket/train."""
        evaluation: lockstep.Placement[str | None] = "data/tabular/eval"
        features: tuple[str, ...] = ("features",)
        """Columns of numbers, or one column of vectors."""
        label: str = "label"
        width: PositiveInt = 64
        inputs: PositiveInt = 64
        """Numbers in a row."""
        memory_mb: lockstep.Placement[float | None] = None
        """Most memory that a table's rows may take, in MiB; a larger one is read by row group, with data.shuffle=blocks."""

    params: Params

    def model(self) -> nn.Module:
        width = self.params.width
        return nn.Sequential(nn.Linear(self.params.inputs, width), nn.ReLU(), nn.Linear(width, 1))

    def train_data(self) -> Table:
        return self._table(self.params.train)

    def eval_data(self) -> Table | None:
        return self._table(self.params.evaluation) if self.params.evaluation is not None else None

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> lockstep.Loss:
        logits, labels = model(batch["features"]).squeeze(1), batch["label"]
        right = (logits > 0) == (labels > 0.5)
        return lockstep.Loss(
            total=F.binary_cross_entropy_with_logits(logits, labels, reduction="sum"),
            weight=len(labels),
            parts={"accuracy": lockstep.Mean(right.sum(), len(labels))},
        )

    def example_input(self) -> tuple[Tensor]:
        return (self.train_data().__getitems__([0, 1])["features"],)

    def _table(self, source: str) -> Table:
        names = self.params.features
        features = Column(names[0] if len(names) == 1 else names, dtype="float32")
        label = Column(self.params.label, dtype="float32")
        return Table(source, {"features": features, "label": label}, memory_mb=self.params.memory_mb)
