"""A model that is made without memory for its parameters gets the bits of one that is made as usual."""

from __future__ import annotations

import copy
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lockstep.training import deferred_model
from lockstep.training.deferred_model import DeferredModel, NotDeferredError
from tests.live_bytes import counted


def layers() -> nn.Module:
    model = nn.Sequential(
        nn.Embedding(11, 7, padding_idx=0),
        nn.Linear(7, 7),
        nn.BatchNorm1d(7),
        nn.Conv1d(3, 5, 2),
        nn.LSTM(5, 6, 2),
        nn.TransformerEncoderLayer(8, 2, 16),
        nn.Linear(40, 3, dtype=torch.bfloat16),
    )
    model[2].weight.requires_grad_(False)
    return model


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))
    model[1].weight = model[0].weight
    return model


def written_later() -> nn.Module:
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
    for layer in (model[1], model[0]):
        layer.weight.data.normal_(0, 0.02)  # type: ignore[union-attr, operator]
        layer.weight.data[3].zero_()  # type: ignore[index, union-attr]
    with torch.no_grad():
        model[1].bias.copy_(torch.arange(20.0) / model[0].weight.abs().sum())  # type: ignore[operator, union-attr]
    return model


def drawn_until_they_fit() -> nn.Module:
    """What is drawn depends on what was drawn before, as torch's truncated normal distribution does since 2.13."""
    model = nn.Linear(40, 40)
    nn.init.trunc_normal_(model.weight, std=0.02, a=-0.03, b=0.03)
    nn.init.orthogonal_(nn.Linear(3, 3).weight)
    while float(model.bias.detach().abs().max()) < 0.155:
        nn.init.uniform_(model.bias, -0.16, 0.16)
    return model


def generators() -> nn.Module:
    generator, model = torch.Generator().manual_seed(4), nn.Linear(40, 40)
    nn.init.normal_(model.weight, generator=generator)
    nn.init.xavier_uniform_(model.weight, generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(9)
        nn.init.normal_(model.bias)
    return nn.Sequential(model, nn.Linear(4, 4))


def attributes() -> nn.Module:
    model = nn.Linear(3, 3)
    model.table = torch.randn(3)  # type: ignore[assignment]
    model.register_buffer("steps", torch.arange(4.0) * 2)
    model.register_buffer("passing", torch.rand(2), persistent=False)
    return nn.utils.parametrizations.weight_norm(model)


def with_a_teacher() -> nn.Module:
    """Parameters, buffers, a number that torch keeps beside its fake tensor, and an attribute of a tensor."""
    student = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
    student.register_buffer("scale", torch.rand(3).requires_grad_(False))
    student.scale.unit = "m"  # type: ignore[union-attr]
    teacher = copy.deepcopy(student).requires_grad_(False)
    assert teacher.scale.unit == "m"  # type: ignore[union-attr]
    student[0].weight.data.add_(1.0)  # type: ignore[operator, union-attr]
    return nn.ModuleList([student, teacher, copy.deepcopy(nn.ModuleList([teacher, teacher]))])


def copies_a_number() -> nn.Module:
    model = nn.Linear(3, 3)
    model.register_buffer("steps", copy.deepcopy(torch.tensor(0)))
    return model


PRETRAINED = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


def copied_from_outside() -> nn.Module:
    return nn.Sequential(copy.deepcopy(PRETRAINED), nn.Linear(3, 3))


SOUND = [
    with_a_teacher,
    copied_from_outside,
    layers,
    tied,
    written_later,
    drawn_until_they_fit,
    generators,
    attributes,
]


def bits(model: nn.Module) -> dict[str, object]:
    def of(tensor: Tensor) -> object:
        return tensor.dtype, tensor.stride(), tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()

    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    plain = {name: value for name, value in vars(model).items() if isinstance(value, Tensor)}
    return {name: (of(value), value.requires_grad) for name, value in {**named, **plain}.items()}


def deferred(make: Callable[[], nn.Module]) -> nn.Module:
    """A model that is filled from its last parameter to its first."""
    torch.manual_seed(3)
    result = DeferredModel(make)
    for name in [name for name, _ in result.model.named_parameters()][::-1]:
        result.fill([name])
    return result.model


@pytest.mark.every(6)
@pytest.mark.thinned(2)
@pytest.mark.parametrize("make", SOUND)
def test_the_bits_and_the_generator_are_those_of_a_model_made_as_usual(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    wanted, state = bits(make()), torch.get_rng_state()
    assert bits(deferred(make)) == wanted
    assert torch.equal(torch.get_rng_state(), state)


def test_without_the_state_before_each_draw_the_bits_differ() -> None:
    """The control."""
    torch.manual_seed(3)
    wanted, call = bits(layers()), deferred_model._Recorder._call
    with mock.patch.object(
        deferred_model._Recorder,
        "_call",
        lambda self, one, values: call(self, one._replace(state=None), values),
    ):
        assert bits(deferred(layers)) != wanted


class Shelf:
    kept: Tensor


def keeps_a_tensor() -> nn.Module:
    Shelf.kept = torch.randn(3)
    return nn.Linear(3, 3)


def computes_with_one() -> nn.Module:
    model, shift = nn.Linear(3, 3), torch.randn(3)
    model.register_forward_hook(lambda module, args, output: output + shift)
    return model


def swaps_memory() -> nn.Module:
    model = nn.Linear(3, 3)
    model.weight.data = torch.ones(3, 3)
    return model


def shares_memory() -> nn.Module:
    model = nn.Linear(3, 3)
    model.weight = nn.Parameter(torch.randn(6, 3)[:3])
    return model


def copies_a_part() -> nn.Module:
    model = nn.Linear(3, 3)
    model.register_buffer("rows", copy.deepcopy(torch.randn(4, 3)[:2]))
    return model


def copies_memory_twice() -> nn.Module:
    numbers = torch.randn(6)
    model = nn.Module()
    model.plain, model.square = copy.deepcopy([numbers, numbers.view(2, 3)])
    return model


def hooks() -> nn.Module:
    model = nn.Linear(3, 3)
    model.weight.register_hook(lambda gradient: gradient)
    return model


def leaves_torch() -> nn.Module:
    model = nn.Linear(3, 3)
    model.weight.data.numpy()[:] = 3
    return model


def draws_by_values() -> nn.Module:
    model = nn.Linear(3, 3)
    model.weight.data.copy_(torch.bernoulli(torch.rand(3, 3)))
    return model


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (keeps_a_tensor, "a tensor that is no parameter or buffer of a module stays in use"),
        (computes_with_one, "a tensor that is no parameter or buffer of a module stays in use"),
        (swaps_memory, "it gives a tensor other memory"),
        (shares_memory, "parameter 'weight' is a part of other memory"),
        (copies_a_part, "it copies a tensor that is a part of other memory"),
        (copies_memory_twice, "it copies a tensor that is a part of other memory"),
        (hooks, "parameter 'weight' has a hook"),
        (leaves_torch, "numpy"),
        (draws_by_values, "aten.bernoulli.default draws in a way of its own"),
    ],
)
def test_what_cannot_be_made_again_is_told(make: Callable[[], nn.Module], why: str) -> None:
    with pytest.raises(NotDeferredError, match=why):
        DeferredModel(make)


def test_what_copies_a_tensor_is_put_back() -> None:
    usual = Tensor.__deepcopy__
    deferred(with_a_teacher)
    with pytest.raises(NotDeferredError):
        DeferredModel(copies_a_part)
    assert Tensor.__deepcopy__ is usual


def test_an_error_of_the_job_is_no_wrong_model() -> None:
    def fails() -> nn.Module:
        raise ValueError("no such file")

    with pytest.raises(NotDeferredError, match="no such file"):
        DeferredModel(fails)


def test_it_takes_the_memory_of_one_parameter_at_a_time() -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)))

    with counted() as live:
        result = DeferredModel(make)
        for name, _ in [*result.model.named_parameters()]:
            result.fill([name], again=True)
            result.empty([name])
    assert live.peak <= 2 * 256 * 256 * 4 + 400_000  # the states of the generator too
