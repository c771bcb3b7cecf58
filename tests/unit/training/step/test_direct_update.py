"""A small model's update without torch's `step` leaves the bits of `step`: parameters, gradients, and the whole state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.checkpoint.tree import pack
from lockstep.training.step import direct_update
from lockstep.training.step.direct_update import DirectUpdate
from lockstep.training.step.learning_rate import FunctionOfUpdates, Rates
from tests.distributed.training import train

SHAPES = ((3,), (), (7, 13), (64, 33), (1, 0, 2), (5, 2, 3, 3))
"""Their ends lie anywhere in a vector; one has no element."""

Make = Callable[[Any], torch.optim.Optimizer]
AdamW, Adam, SGD = torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD

SETTINGS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    *((AdamW, {"lr": lr, "weight_decay": w, "betas": b}) for lr, w, b in product((1e-3, 3.0), (0, 0.1), ((0.9, 0.999), (0.3, 0.7)))),
    *((Adam, {"weight_decay": w, "eps": e}) for w, e in product((0, 0.1), (1e-8, 1e-3))),
    (AdamW, {"amsgrad": True}), (AdamW, {"maximize": True}), (SGD, {"momentum": 0.9}),
]  # fmt: skip


@pytest.fixture(autouse=True)
def tried() -> None:
    """The trial of torch's kernels steps optimizers itself."""
    for kind, dtype in product((AdamW, Adam), (torch.float32, torch.float64)):
        direct_update._agrees_with_torch(kind, dtype)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for shape in SHAPES
    ]


def gradients(step: int, of: list[nn.Parameter]) -> list[Tensor]:
    """Of any size: zeros, denormal numbers and infinities among them."""
    generator = torch.Generator().manual_seed(step)
    size = 10.0 ** torch.randint(-40, 40, (), generator=generator).item()
    return [torch.randn(p.shape, generator=generator, dtype=torch.float64).mul(size).to(p.dtype) for p in of]


def bits(optimizer: torch.optim.Optimizer) -> Iterator[bytes]:
    """All of the parameters, their gradients and the optimizer's state, in its order."""
    packed = pack(optimizer.state_dict(), "state")
    every = [p for group in optimizer.param_groups for p in group["params"]]
    yield repr((packed.skeleton, sorted(packed.tensors))).encode()
    for tensor in (*every, *(p.grad for p in every), *packed.tensors.values()):
        if isinstance(tensor, Tensor) and tensor.numel():
            yield tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def trained(
    make: Make,
    dtype: torch.dtype,
    take: Callable[[torch.optim.Optimizer], Callable[[], Any]],
    *,
    resting: bool = False,
) -> list[bytes]:
    """The bits after each of some steps; one that is `resting` passes by a parameter in some of them."""
    every = parameters(dtype)
    optimizer = make(every)
    update, result = take(optimizer), list[bytes]()
    for step in range(12):
        for parameter, gradient in zip(every, gradients(step, every), strict=True):
            parameter.grad = gradient
        if resting and step % 5 == 3:
            every[step % len(every)].grad = None
        optimizer.param_groups[0]["lr"] *= 0.9
        update()
        result += bits(optimizer)
    return result


def by_step(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    return optimizer.step


@pytest.mark.parametrize("resting", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "settings"), SETTINGS, ids=str)
def test_it_leaves_the_bits_of_torchs_step(
    kind: Any, settings: dict[str, Any], dtype: torch.dtype, resting: bool
) -> None:
    make: Make = lambda every: kind(every, **settings)  # noqa: E731
    directly = trained(make, dtype, DirectUpdate, resting=resting)
    assert directly == trained(make, dtype, by_step, resting=resting)


def test_torchs_fused_kernel_has_other_bits() -> None:
    """The comparison above would notice."""
    fused = trained(lambda every: AdamW(every, fused=True), torch.float32, by_step)
    assert trained(AdamW, torch.float32, DirectUpdate) != fused


class Called(Exception):
    """torch's `step` was called."""


def begun(kind: Any = AdamW, dtype: torch.dtype = torch.float32, **settings: Any) -> torch.optim.Optimizer:
    """One that has taken its first step, and has gradients for the next."""
    return stepped(kind(parameters(dtype), **settings))


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def calls_step(optimizer: torch.optim.Optimizer) -> bool:
    with patch.object(type(optimizer), "step", side_effect=Called):
        try:
            DirectUpdate(optimizer)()
        except Called:
            return True
    return False


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", [AdamW, Adam])
def test_it_goes_without_torchs_step(kind: Any, dtype: torch.dtype) -> None:
    optimizer = begun(kind, dtype)
    Rates(optimizer, FunctionOfUpdates(optimizer, lambda _: 1.0))  # whose hook needs no call
    assert not calls_step(optimizer)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (AdamW, {"fused": True}), (AdamW, {"foreach": True}), (AdamW, {"amsgrad": True}),
        (AdamW, {"maximize": True}), (AdamW, {"lr": torch.tensor(0.1)}), (AdamW, {"dtype": torch.bfloat16}),
        (Adam, {"weight_decay": 0.1}), (SGD, {}), (SGD, {"momentum": 0.9}),
    ],
    ids=str,
)  # fmt: skip
def test_other_paths_of_torch_are_left_to_it(kind: Any, settings: dict[str, Any]) -> None:
    assert calls_step(begun(kind, **settings))


def test_what_would_notice_gets_a_call() -> None:
    hooked, followed = begun(), begun()
    hooked.register_step_post_hook(lambda *_: None)
    assert calls_step(hooked)
    torch.optim.lr_scheduler.StepLR(followed, 1)
    DirectUpdate(followed)()
    assert followed._opt_called  # type: ignore[attr-defined]  # else the scheduler warns of its order
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    assert calls_step(begun())
    handle.remove()
    assert not calls_step(begun())
    with torch.profiler.profile(acc_events=True):  # torch 2.11 warns without
        assert calls_step(begun())


def test_a_torch_without_these_names_updates_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_update, "_hooks_of_all", [True, True])
    assert calls_step(begun())


def test_kernels_that_compute_the_end_of_a_tensor_otherwise_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As they would with a fused multiply-add in the middle of it alone."""
    agrees = direct_update._agrees_with_torch.__wrapped__
    assert agrees(AdamW, torch.float32)
    compute = DirectUpdate._compute

    def otherwise(self: DirectUpdate, group: Any, steps: list[Tensor]) -> None:
        compute(self, group, steps)
        last = group["params"][-1]
        last[-1] = torch.nextafter(last[-1], last[-1] + 1)

    monkeypatch.setattr(DirectUpdate, "_compute", otherwise)
    assert not agrees(AdamW, torch.float32)
    monkeypatch.setattr(direct_update, "_agrees_with_torch", agrees)
    assert calls_step(begun())


def test_the_first_update_begins_the_state_by_step() -> None:
    optimizer = begun()
    optimizer.state.clear()
    assert calls_step(optimizer)
    assert not optimizer.state


def test_other_classes_groups_and_layouts_are_left_to_step() -> None:
    class Own(AdamW):
        pass

    every, turned = parameters(), nn.Parameter(torch.ones(3, 2).t())
    groups = [{"params": every[:2]}, {"params": every[2:]}]
    mixed = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.float64))]
    for optimizer in (Own(every), AdamW(groups), AdamW([turned]), AdamW(mixed)):
        assert calls_step(stepped(optimizer))


def test_a_large_model_is_left_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    elements = sum(p.numel() for p in parameters())
    monkeypatch.setattr(direct_update, "MOST_ELEMENTS", elements)
    assert not calls_step(begun())
    monkeypatch.setattr(direct_update, "MOST_ELEMENTS", elements - 1)
    assert calls_step(begun())


def test_a_state_that_was_loaded_is_gone_on_from() -> None:
    optimizer = begun()
    every, update = optimizer.param_groups[0]["params"], DirectUpdate(optimizer)
    update()
    values, state = copy.deepcopy(([p.detach() for p in every], optimizer.state_dict()))
    update()
    once = list(bits(optimizer))
    update()
    assert list(bits(optimizer)) != once
    for parameter, value in zip(every, values, strict=True):
        parameter.data.copy_(value)
    optimizer.load_state_dict(state)
    update()
    assert list(bits(optimizer)) == once


@pytest.mark.parametrize(("job", "calls"), [("Plain", 1), ("OwnAdamW", 6)])
def test_only_the_specs_optimizer_goes_without_step(
    job: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = {
        "job": {"use": f"tests.distributed.small_jobs:{job}"},
        "batch": {"global": 16, "micro": 4},
        "length": {"steps": 6},
        "rehearsal": "off",
    }
    with patch.object(AdamW, "step", autospec=True, side_effect=AdamW.step) as step:
        directly = train(document)
        assert step.call_count == calls
        monkeypatch.setattr(direct_update, "MOST_ELEMENTS", 0)
        assert train(document) == directly
        assert step.call_count == calls + 6
