"""The weights' digest, against the formula that the command line's page gives."""

from __future__ import annotations

import hashlib
import struct

import torch
from torch import nn

from lockstep.training.integrity.state_digest import weights_digest


def test_digest_of_a_linear_layer_by_hand() -> None:
    state = {
        "weight": torch.tensor([[1.0, -2.0], [0.5, 3.0], [0.0, -0.0]]),
        "bias": torch.tensor([1.0, 2.0, 3.0]),
    }
    wanted = hashlib.sha256(
        b"bias|torch.float32|(3,)" + struct.pack("<3f", 1.0, 2.0, 3.0)
        + b"weight|torch.float32|(3, 2)" + struct.pack("<6f", 1.0, -2.0, 0.5, 3.0, 0.0, -0.0)
    ).hexdigest()  # fmt: skip
    assert weights_digest(state) == wanted


def test_every_kind_of_tensor_has_its_bytes() -> None:
    state = {
        "scalar": torch.tensor(7),
        "flags": torch.tensor([True, False]),
        "half": torch.tensor([1.0], dtype=torch.float16),
        "brain": torch.tensor([1.0], dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "double": torch.tensor([0.1], dtype=torch.float64),
    }
    wanted = hashlib.sha256(
        b"brain|torch.bfloat16|(1,)" + b"\x80\x3f"
        + b"double|torch.float64|(1,)" + struct.pack("<d", 0.1)
        + b"empty|torch.float32|(0, 3)"
        + b"flags|torch.bool|(2,)" + b"\x01\x00"
        + b"half|torch.float16|(1,)" + b"\x00\x3c"
        + b"scalar|torch.int64|()" + struct.pack("<q", 7)
    ).hexdigest()  # fmt: skip
    assert weights_digest(state) == wanted


def test_digest_does_not_depend_on_layout_or_order() -> None:
    weight = torch.randn(4, 3)
    strided = weight.t().contiguous().t()
    assert not strided.is_contiguous()
    assert weights_digest({"a": strided, "b": weight}) == weights_digest({"b": weight, "a": weight})
    image = torch.randn(2, 3, 4, 4)
    assert weights_digest({"a": image.to(memory_format=torch.channels_last)}) == weights_digest({"a": image})


def test_digest_sees_every_bit() -> None:
    base = {"weight": torch.tensor([0.0, 1.0])}
    others = [
        {"weight": torch.tensor([-0.0, 1.0])},
        {"weight": torch.tensor([0.0, 1.0 + 2**-23])},
        {"weight": torch.tensor([[0.0, 1.0]])},
        {"weight": torch.tensor([0.0, 1.0]).double()},
        {"wait": torch.tensor([0.0, 1.0])},
        {"weight": torch.tensor([0.0, 1.0]), "bias": torch.zeros(0)},
    ]
    assert len({weights_digest(state) for state in (base, *others)}) == len(others) + 1


def test_digest_covers_buffers_and_passes_over_other_state() -> None:
    norm = nn.BatchNorm1d(2)
    before = weights_digest(norm.state_dict())
    norm(torch.randn(4, 2))
    assert weights_digest(norm.state_dict()) != before
    assert weights_digest({**norm.state_dict(), "extra": {"a": 1}}) == weights_digest(norm.state_dict())
