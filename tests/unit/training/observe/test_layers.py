"""Gradient flow by layer group: its definition, and that looking changes nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from lockstep.training.observe.layers import MOST_GROUPS, LayerFlow, layer_groups
from lockstep.training.step.norm import GradientNorm


def test_a_group_is_as_many_levels_as_give_few_groups() -> None:
    names = [
        f"blocks.{b}.{part}.{leaf}"
        for b in range(12)
        for part in ("attn.qkv", "mlp")
        for leaf in ("weight", "bias")
    ]
    groups = layer_groups(["table.weight", *names, "scale"])
    assert list(groups) == [
        "table",
        *(f"blocks.{b}.{part}" for b in range(12) for part in ("attn.qkv", "mlp")),
        "scale",
    ]
    assert groups["blocks.1.mlp"] == [7, 8]
    deeper = [f"blocks.{b}.{part}.weight" for b in range(12) for part in ("a", "b", "c")]
    assert list(layer_groups(deeper)) == [f"blocks.{b}" for b in range(12)]


def test_neighbours_are_taken_together_where_the_first_level_gives_too_many() -> None:
    groups = layer_groups([f"{i}.weight" for i in range(100)])
    assert len(groups) == 25 <= MOST_GROUPS
    assert groups["4-7"] == [4, 5, 6, 7]


@pytest.mark.parametrize("count", [1, 31, 32, 33, 64, 65, 1000])
def test_every_parameter_is_in_one_group_and_they_are_few(count: int) -> None:
    names = [f"part{i // 3}.layer{i}.weight" for i in range(count)]
    groups = layer_groups(names)
    assert [i for members in groups.values() for i in members] == list(range(count))
    assert len(groups) <= MOST_GROUPS
    assert layer_groups([]) == {}


def stepped(model: nn.Module, loss: Tensor, conditional: tuple[str, ...] = ()) -> dict[str, float]:
    """The flow of one update of plain gradient descent."""
    names = [name for name, _ in model.named_parameters()]
    parameters = list(model.parameters())
    loss.backward()
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = GradientNorm(parameters)
    flow = LayerFlow(model, names, parameters, norm, conditional)
    norm.observe = flow.note
    norm(gradients)
    torch.optim.SGD(parameters, lr=0.25).step()
    return flow.taken()


def perceptron() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


def test_norms_and_ratios_are_those_of_the_group() -> None:
    model, x = perceptron(), torch.randn(4, 6)
    before = [p.detach().clone() for p in model.parameters()]
    values = stepped(model, model(x).square().sum())
    for group, (a, b) in {"0": (0, 1), "2": (2, 3)}.items():
        gradient, weights = (
            math.sqrt(sum(float((t.double() ** 2).sum()) for t in tensors))
            for tensors in ([list(model.parameters())[i].grad for i in (a, b)], before[a : b + 1])
        )
        # no `==`: the definition adds in blocks, and these sums in another order; an update in fp32 is rounded
        assert values[f"layers/{group}/gradient_norm"] == pytest.approx(gradient, rel=1e-12)
        assert values[f"layers/{group}/update_ratio"] == pytest.approx(0.25 * gradient / weights, rel=1e-5)


def test_units_without_a_gradient_are_counted() -> None:
    model, x = perceptron(), torch.rand(4, 6)
    with torch.no_grad():
        model[0].bias[:3] = -100.0  # type: ignore[index, operator]
        model[0].bias[3:] = 100.0  # type: ignore[index, operator]
    values = stepped(model, model(x).square().sum())
    assert values["layers/0/silent_units"] == 3 / 8
    assert values["layers/2/silent_units"] == 0.0


def test_rows_of_a_table_and_what_may_be_left_out_are_no_units() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.rare = nn.Embedding(9, 4), nn.Linear(4, 4)
            self.zero = nn.Parameter(torch.zeros(3))

    model = Model()
    loss = model.table(torch.tensor([1])).sum() + 0 * model.rare(torch.ones(4)).sum() + model.zero.sum()
    values = stepped(model, loss, conditional=("rare.weight",))
    assert not [name for name in values if name.endswith("silent_units")]
    assert "layers/zero/update_ratio" not in values  # of weights that are all zero there is none
    assert values["layers/zero/gradient_norm"] == math.sqrt(3)


def test_nothing_is_kept_and_nothing_taken_that_was_not_noted() -> None:
    model = perceptron()
    parameters = list(model.parameters())
    flow = LayerFlow(model, [n for n, _ in model.named_parameters()], parameters, GradientNorm(parameters))
    assert flow.taken() == {}
    flow.note([torch.ones_like(p) for p in parameters], [1.0] * 4)
    assert flow.taken()["layers/0/update_ratio"] == 0.0
    assert flow.taken() == {}
