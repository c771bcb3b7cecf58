"""The real jobs with less data. Apart from the small ones, since importing scikit-learn takes as long as torch."""

from __future__ import annotations

from torch import Tensor
from torch.utils.data import Dataset, Subset

from jobs.digits.job import Digits
from jobs.stdlib_gpt.job import StdlibGPT


class FewDigits(Digits):
    """jobs.digits on its first images: dropout, BatchNorm, augmentation from three generators."""

    class Params(Digits.Params):
        train_samples: int
        eval_samples: int

    params: Params

    def train_data(self) -> Dataset[tuple[Tensor, int]]:
        return Subset(super().train_data(), range(self.params.train_samples))

    def eval_data(self) -> Dataset[tuple[Tensor, int]]:
        return Subset(super().eval_data(), range(self.params.eval_samples))


class FewPieces(StdlibGPT):
    """jobs.stdlib_gpt on its first pieces: dropout, weights that are counts of bytes."""

    class Params(StdlibGPT.Params):
        train_samples: int
        eval_samples: int

    params: Params

    def train_data(self) -> Dataset[Tensor]:
        return Subset(super().train_data(), range(self.params.train_samples))

    def eval_data(self) -> Dataset[Tensor]:
        return Subset(super().eval_data(), range(self.params.eval_samples))
