"""The bytes of a tensor are its memory, and whoever reads them leaves the tensor as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lockstep.data.contents import digest
from lockstep.tensor_bytes import bytes_of, row_of
from lockstep.training.integrity.checksum import checksum
from lockstep.training.integrity.digests import Digester
from lockstep.training.integrity.rehearsal.object_state import same_bits, tensor_digest
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


def test_one_element_may_have_any_stride() -> None:
    """As `table[i : i + 1, 8]` has; such a view is contiguous for torch, and still none that can be viewed as bytes."""
    element, plain = torch.arange(6.0)[1::6], torch.ones(1)
    assert element.is_contiguous() and element.stride() == (6,)
    with pytest.raises(RuntimeError, match="stride"):
        element.contiguous().reshape(-1).view(torch.uint8)
    assert row_of(element).view(torch.uint8).tolist() == plain.view(torch.uint8).tolist()
    digester = Digester(torch.device("cpu"))
    for read in (
        digest,
        tensor_digest,
        lambda tensor: weights_digest({"": tensor}),
        lambda tensor: digester.digest({"": tensor}),
        lambda tensor: int(checksum([tensor])),
    ):
        assert read(element) == read(plain)
    assert same_bits(element, plain)


def test_a_row_has_logical_order() -> None:
    tensor = torch.arange(6).view(2, 3)
    assert row_of(tensor.t()).tolist() == [0, 3, 1, 4, 2, 5]
    assert row_of(tensor).data_ptr() == tensor.data_ptr()
