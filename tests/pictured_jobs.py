"""The job of a picture: handwritten digits, evaluated on two named sets."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from jobs.digits.job import Digits


class Noisy(Dataset[Any]):
    """The samples of a data set with noise on their pictures, the same each time."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        image, *rest = self._data[index]
        noise = torch.randn(image.shape, generator=torch.Generator().manual_seed(index))
        return (image + 0.3 * noise, *rest)


class TwoSets(Digits):
    """Digits, clean and noisy."""

    def eval_data(self) -> Any:
        clean = super().eval_data()
        return {"clean": clean, "noisy": Noisy(clean)}
