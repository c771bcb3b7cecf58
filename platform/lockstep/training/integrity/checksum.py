"""A number that any flipped bit of some tensors changes, at the cost of reading them once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.tensor_bytes import row_of

_WORD = 8

PRIME = 2**52 - 47
"""The powers of two that one bit of 64 adds or takes away are all different here, and none is 0; a float64 holds each remainder."""


@torch.no_grad()
def checksum(tensors: Iterable[Tensor]) -> Tensor:
    """The sum of the tensors' words of 64 bits, modulo a prime below 2**52: of shape (), int64, on their device. No matter how they lie in memory.

    It tells a flipped bit, and not which words have changed places: two states of one history are compared, and no strangers'.
    """
    sums = [words.sum() for tensor in tensors for words in _words(tensor)]
    return torch.stack([each.remainder(PRIME) for each in sums]).sum().remainder(PRIME)


def _words(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor's elements in logical order, as words of 64 bits, the last one filled up with zeros."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    elements = row_of(real)
    if elements.storage_offset() * elements.element_size() % _WORD:
        elements = elements.clone()
    rest = elements.numel() % (_WORD // elements.element_size())
    whole = elements.numel() - rest
    if whole:
        yield elements[:whole].view(torch.int64)
    if rest:
        last = elements[whole:].view(torch.uint8)
        yield F.pad(last, (0, _WORD - last.numel())).view(torch.int64)
