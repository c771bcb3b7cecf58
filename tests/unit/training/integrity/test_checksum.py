from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lockstep.training.integrity.checksum import checksum

TENSORS = {
    "aligned": torch.arange(12.0).view(3, 4),
    "odd": torch.arange(7.0),
    "bf16": torch.arange(5.0).bfloat16(),
    "complex": torch.arange(3.0).to(torch.complex64),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "with gaps": torch.arange(12.0)[::2],
    "a part": torch.arange(9.0)[1:],
    "scalar": torch.tensor(1.5),
    "bool": torch.tensor([True, False]),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_any_bit_changes_it(tensor: Tensor) -> None:
    beside = torch.arange(4.0)
    sound = int(checksum([beside, tensor]))
    assert 0 < sound < 2**52
    assert float(sound) == sound
    elements = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)
    for i in range(elements.numel()):
        for bit in range(8 * tensor.element_size()):
            changed = elements.clone()
            memory = changed.view(torch.uint8)
            memory[i * tensor.element_size() + bit // 8] ^= 1 << bit % 8
            assert int(checksum([beside, changed.view(tensor.shape)])) != sound
    assert int(checksum([beside, elements.clone().view(tensor.shape)])) == sound


def test_parameters_without_elements_and_those_that_learn_have_none_and_no_gradient() -> None:
    weights = torch.nn.Parameter(torch.arange(4.0))
    value = checksum([torch.empty(0), weights])
    assert not value.requires_grad
    assert value.dtype == torch.int64
    assert int(value) == int(checksum([weights]))
