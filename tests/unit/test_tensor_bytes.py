"""The bytes of a tensor are its memory, and whoever reads them leaves the tensor as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lockstep.data.contents import digest
from lockstep.tensor_bytes import bytes_of
from lockstep.training.integrity.rehearsal.object_state import tensor_digest
from lockstep.training.integrity.state_digest import weights_digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_they_are_those_of_numpy_and_reach_its_memory(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(6, dtype=torch.float32)[: torch.Size(shape).numel()].to(dtype).reshape(shape)
    view = bytes_of(tensor)
    assert bytes(view) == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    view[:] = bytes(len(view))
    assert not tensor.count_nonzero()


def test_they_keep_the_memory() -> None:
    view = bytes_of(torch.full((1000,), 7, dtype=torch.uint8))
    others = [torch.zeros(1000, dtype=torch.uint8) for _ in range(100)]
    assert bytes(view) == b"\x07" * 1000
    del others


@pytest.mark.parametrize(
    "read", [bytes_of, digest, lambda tensor: weights_digest({"": tensor}), tensor_digest]
)
def test_a_tensor_that_was_read_can_grow(read: Callable[[Tensor], object]) -> None:
    tensor = torch.ones(4)
    read(tensor)
    tensor.resize_(1000)
    assert tensor.numel() == 1000


def test_numpy_would_not_let_it_grow() -> None:
    tensor = torch.ones(4)
    tensor.numpy()
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.resize_(1000)
