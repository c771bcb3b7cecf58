"""Complex tensors as the real numbers that they are made of.

A complex gradient is added, scaled and measured number by number, its real parts by themselves and its imaginary parts by themselves. That is
also what torch's own addition of complex tensors does; backends that send no complex numbers send these.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def real_view(tensor: Tensor) -> Tensor:
    """A complex tensor with a last dimension of 2 for its real and imaginary parts, in the same memory; a real one as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def real_views(tensors: Iterable[Tensor]) -> list[Tensor]:
    """`real_view` of each."""
    return [*map(real_view, tensors)]
