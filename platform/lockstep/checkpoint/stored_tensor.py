"""A tensor that is still in its file: whoever needs some of its rows reads these alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.tensor_bytes import bytes_of


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A contiguous tensor of a verified file. `read` fills a buffer with the bytes from a place within the tensor on."""

    dtype: torch.dtype
    shape: torch.Size
    read: Callable[[int, memoryview], None]

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def elements(self, start: int, stop: int) -> Tensor:
        """The elements `start … stop - 1` in logical order, as a row in memory of its own. StorageError where they cannot be read."""
        row = torch.empty(max(0, stop - start), dtype=self.dtype)
        if row.numel():
            self.read(start * self.dtype.itemsize, bytes_of(row))
        return row

    def of_bytes(self, content: memoryview) -> Tensor:
        """The tensor, of its bytes that were read before, in memory of its own."""
        row = torch.empty(self.shape.numel(), dtype=self.dtype)
        bytes_of(row)[:] = content
        return row.view(self.shape)

    def __getitem__(self, rows: slice) -> Tensor:
        """The rows of a slice without a step, in memory of their own."""
        start, stop, _ = rows.indices(self.shape[0])
        inner = self.shape[1:].numel()
        return self.elements(start * inner, stop * inner).view(-1, *self.shape[1:])

    def whole(self) -> Tensor:
        """All of it."""
        return self.elements(0, self.shape.numel()).view(self.shape)


def in_memory(value: Any) -> Any:
    """A value of a state as it is; of a stored tensor all elements."""
    return value.whole() if isinstance(value, StoredTensor) else value
