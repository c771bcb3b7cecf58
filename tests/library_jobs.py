"""Jobs whose data are datasets of other libraries."""

from __future__ import annotations

from typing import Any

import torch

import lockstep
from jobs.tabular.job import Tabular
from tests import lake


class Library(Tabular):
    """Trains on points of which a library makes the dataset."""

    class Params(Tabular.Params):
        train: lockstep.Placement[str] = ""
        evaluation: lockstep.Placement[str | None] = None
        inputs: int = lake.FEATURES  # type: ignore[assignment]
        width: int = 8  # type: ignore[assignment]
        rows: int = 400
        transformed: bool = False

    params: Params

    def rows(self) -> Any:
        return lake.points(self.params.rows, 1)


class Hub(Library):
    """A `datasets.Dataset` whose transform draws."""

    def train_data(self) -> Any:
        import datasets

        dataset = datasets.Dataset(self.rows()).select(range(self.params.rows - 1, -1, -1))
        dataset.set_transform(noisy if self.params.transformed else as_tensors)
        return dataset


def as_tensors(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {
        "features": [torch.tensor(row) for row in rows["features"]],
        "label": [torch.tensor(label) for label in rows["label"]],
    }


def noisy(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {
        **as_tensors(rows),
        "features": [torch.tensor(row) + torch.randn(len(row)) / 10 for row in rows["features"]],
    }
