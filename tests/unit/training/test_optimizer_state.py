"""The state of an optimizer, loaded as it was saved."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lockstep.checkpoint.tree import pack
from lockstep.checkpoint.tree_decoder import unpack
from lockstep.training.integrity.state_digest import weights_digest
from lockstep.training.optimizer_state import counts_where_they_are_read, restore_optimizer
from tests.flat_momentum import FlatMomentum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_an_optimizer_holds_in_one_memory_is_in_one_memory_again(dtype: torch.dtype) -> None:
    """torch casts and copies each tensor and each list by itself."""
    steps: list[float] = []
    for saved_after in (1, None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)).to(dtype)
        optimizer: torch.optim.Optimizer = FlatMomentum(model.parameters())
        for step in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.1 * (step + 1))
            optimizer.step()
            if step + 1 == saved_after:
                packed = pack(optimizer.state_dict())
                optimizer = FlatMomentum(model.parameters())
                copies = {
                    name: one.clone() for name, one in packed.tensors.items() if isinstance(one, Tensor)
                }
                restore_optimizer(optimizer, unpack(packed.skeleton, copies), fork=False)
        steps.append(weights_digest(model.state_dict()))
        first = optimizer.state[next(model.parameters())]
        assert (first["flat"].dtype, first["seen"]) == (torch.float32, [3])
    assert steps[0] == steps[1]


@pytest.mark.parametrize(("fused", "where"), [(True, "meta"), (None, "cpu")])
def test_numbers_of_updates_are_where_a_forks_kernels_read_them(fused: bool | None, where: str) -> None:
    """torch's `load_state_dict` goes by the groups as they were saved, and a fork's may be those of another device."""
    parameter = nn.Parameter(torch.empty(3, device="meta"))
    optimizer = torch.optim.AdamW([parameter])
    optimizer.param_groups[0]["fused"] = fused
    moments = torch.empty(3, device="meta")
    optimizer.state[parameter] = {"step": torch.tensor(7.0), "exp_avg": moments}
    counts_where_they_are_read(optimizer)
    assert optimizer.state[parameter]["step"].device.type == where
    assert optimizer.state[parameter]["exp_avg"] is moments
