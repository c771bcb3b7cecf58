"""States to save, and a comparison that sees every bit."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.checkpoint.manifest import Facts

everywhere = pytest.mark.parametrize("uri", ["local", "s3"], indirect=True)
"""For tests of what holds on a disk and in an object store."""

everywhere_if_asked = pytest.mark.parametrize(
    "uri", ["local", pytest.param("s3", marks=pytest.mark.exact)], indirect=True
)
"""The same, of what others show of an object store as well: `make exact` has that one."""

FACTS = Facts(
    identity="d1",
    identity_fields={"optimizer.lr": 3e-3, "optimizer.betas": [0.9, 0.999], "clip_norm": None},
    environment={"torch": "2.13.0", "cores": 2, "deterministic_algorithms": True},
    counters={"step": 7, "weight_exponent": None, "best": math.inf},
    metrics={"eval/loss": 0.25},
)


def bits(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Any bits at all, NaNs with payloads among them."""
    size = math.prod(shape) * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


def nan(payload: int) -> float:
    """A NaN of Python's with this payload."""
    return float(struct.unpack(">d", (0x7FF8 << 48 | payload).to_bytes(8, "big"))[0])


def state(step: int, items: int = 300) -> dict[str, Any]:
    """The sections of a small run after `step`: every kind of thing that a state is made of."""
    shared = bits(torch.float32, items, seed=step)
    return {
        "model": {
            "conv.weight": bits(torch.float32, 4, 3, 2, 2, seed=step).to(memory_format=torch.channels_last),
            "embed.weight": shared,
            "head.weight": shared,
            "norm.num_batches_tracked": torch.tensor(step),
            "half": bits(torch.bfloat16, 5, 3, seed=step + 1),
        },
        "optimizer": {
            "state": {
                i: {
                    "step": torch.tensor(float(step)),
                    "exp_avg": bits(torch.float32, items, seed=step + i),
                    "max": None,
                }
                for i in range(2)
            },
            "param_groups": [{"lr": 0.1 + step, "betas": (0.9, 0.999), "fused": None, "params": [0, 1]}],
        },
        "scaler": {"scale": 65536.0, "growth_tracker": step, "worst": nan(step)},
        "ledger": bytes(range(256)) * 3,
    }


def same(a: Any, b: Any) -> bool:
    """Whether two trees are equal in types, order of keys and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return (a.dtype, a.shape, a.stride(), raw(a)) == (b.dtype, b.shape, b.stride(), raw(b))
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, dict):
        return (
            len(a) == len(b)
            and all(same(x, y) for x, y in zip(a, b, strict=True))
            and all(same(x, y) for x, y in zip(a.values(), b.values(), strict=True))
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def raw(tensor: Tensor) -> bytes:
    """A tensor's bytes in the order of its indices."""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
