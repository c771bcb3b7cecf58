"""The elements of a tensor one after another, and its bytes without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def row_of(tensor: Tensor) -> Tensor:
    """The elements in logical order, in one dimension that can be viewed as another type. What has one element counts as contiguous with any stride, and such a view wants 1."""
    dense = tensor.contiguous()
    return dense.as_strided((dense.numel(),), (1,))


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor in host memory, which may be written to. (With one element, any stride counts as contiguous.)

    `Tensor.numpy` would do, but it forbids the tensor's owner to resize it ever after.
    """
    row = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    array: Any = (
        np.asarray(_Memory(row)) if row.numel() else bytearray()
    )  # an array is a buffer, which numpy's type hints do not say
    return memoryview(array)


def is_row_major(tensor: Tensor) -> bool:
    """Whether it has the strides that new memory of its shape has, also where a dimension has one element."""
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != step:
            return False
        step *= max(size, 1)
    return True


class _Memory:
    """What numpy takes for an array, and keeps for as long as it is used."""

    def __init__(self, row: Tensor) -> None:
        self.row = row
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (row.numel(),),
            "data": (row.data_ptr(), False),
        }
