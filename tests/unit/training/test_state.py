"""The counters, and the best evaluation with the weights that belong to it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lockstep.errors import JobError
from lockstep.job.interface import Job
from lockstep.plan import Plan
from lockstep.spec.fields import EarlyStop
from lockstep.training.digest import tree_digest
from lockstep.training.precision import Precision
from lockstep.training.state import Best, TrainState, power_of_two

NAN, INF = math.nan, math.inf


def judged(rule: EarlyStop, values: list[float]) -> tuple[Best, list[bool]]:
    """The state after evaluations at steps 10, 20, …, of a model whose weight is then 0, 1, …"""
    best, model = Best(), nn.Linear(1, 1, bias=False)
    stops = []
    for i, value in enumerate(values):
        with torch.no_grad():
            model.weight.fill_(float(i))
        stops.append(best.judge(rule, value, 10 * (i + 1), model))
    return best, stops


@pytest.mark.parametrize(
    ("mode", "values", "best", "stops"),
    [
        ("min", [3.0, 2.0, 2.5, 1.0], 3, [False] * 4),
        ("max", [3.0, 2.0, 2.5, 4.0], 3, [False, False, True, False]),
        ("min", [1.0, 2.0, 3.0], 0, [False, False, True]),
        ("min", [2.0, 2.0, 2.0], 0, [False, False, True]),  # as good is not better
        ("min", [2.0, 3.0, 1.0, 3.0, 3.0], 2, [False, False, False, False, True]),
        ("min", [NAN, 2.0, NAN, NAN], 1, [False, False, False, True]),
        ("max", [NAN, NAN, 1.0], 2, [False, True, False]),
        ("min", [INF, 2.0], 1, [False, False]),
        ("max", [-INF, 2.0], 1, [False, False]),
    ],
)
def test_judge(mode: str, values: list[float], best: int, stops: list[bool]) -> None:
    """With a patience of two: which evaluation is kept, and after which the run should stop."""
    found, stopped = judged(EarlyStop(mode=mode, patience=2), values)  # type: ignore[arg-type]
    assert stopped == stops
    assert (found.value, found.step) == (values[best], 10 * (best + 1))
    assert found.weights is not None
    assert found.weights["weight"].item() == float(best)


def test_nothing_is_best_where_every_evaluation_was_nan() -> None:
    best, stops = judged(EarlyStop(patience=3), [NAN] * 3)
    assert (best.value, best.weights, stops) == (None, None, [False, False, True])


def test_best_weights_are_a_copy_with_buffers() -> None:
    best, model = Best(), nn.BatchNorm1d(2)
    best.judge(EarlyStop(), 1.0, 1, model)
    with torch.no_grad():
        model.running_mean.fill_(5.0)  # type: ignore[union-attr]
        model.weight.fill_(5.0)
    assert best.weights is not None
    assert set(best.weights) == set(model.state_dict())
    assert best.weights["running_mean"].tolist() == [0.0, 0.0]
    assert best.weights["weight"].tolist() == [1.0, 1.0]


def test_counters_move_together() -> None:
    """A skipped step consumes its samples and is a step, but no update."""
    model = nn.Linear(1, 1)
    plan = Plan.of(10, 4, 2, drop_last=False, epochs=2)
    state = TrainState(
        Job(None), model, torch.optim.SGD(model.parameters(), lr=1.0), Precision("fp32", torch.device("cpu"))
    )
    for step, skipped in enumerate((False, True, False, False)):
        state.advance(plan.position(step), skipped=skipped, weight=12.0)
    counters = state.counters
    assert (counters.step, counters.skipped, counters.updates, counters.samples) == (4, 1, 3, 14)
    assert counters.weight_exponent == 3
    assert state.epoch(plan) == 1


@pytest.mark.parametrize(
    ("weight", "exponent"),
    [(1.0, 0), (1.5, 0), (2.0, 1), (3.99, 1), (4.0, 2), (0.75, -1), (0.5, -1), (1e-300, -997)],
)
def test_power_of_two_is_the_one_at_or_below(weight: float, exponent: int) -> None:
    assert power_of_two(weight) == exponent
    assert 2.0**exponent <= weight < 2.0 ** (exponent + 1)


class TwoAlike(Job):
    def __init__(self) -> None:
        super().__init__(None)


def state_over(names: list[str]) -> TrainState:
    """A model of parameters of one shape, of which the optimizer has those of `names` in this order, after an update."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    every = dict(model.named_parameters())
    optimizer = torch.optim.Adam([every[name] for name in names], lr=0.1)
    for i, parameter in enumerate(every.values()):
        parameter.grad = torch.full_like(parameter, float(i))
    optimizer.step()
    return TrainState(TwoAlike(), model, optimizer, Precision("fp32", torch.device("cpu")))


def test_an_optimizer_with_its_parameters_in_another_order_takes_no_state() -> None:
    """Shapes are equal, so torch itself would give each parameter the moments of another one."""
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    saved = state_over(names).sections()
    state_over(names).restore(saved)
    other = state_over(["1.weight", "0.bias", "0.weight", "1.bias"])
    before = tree_digest(other.sections())
    with pytest.raises(JobError) as info:
        other.restore(saved)
    assert str(info.value).startswith(
        "job.optimizer: parameter 0 of group 0 is '1.weight' here and '0.weight' in the state that is taken over: "
    )
    assert "a set has another order" in str(info.value)
    assert tree_digest(other.sections()) == before


def test_a_state_of_an_older_version_has_no_order() -> None:
    saved = state_over(["0.weight", "0.bias", "1.weight", "1.bias"]).sections()
    del saved["model"]["order"]
    state_over(["0.weight", "0.bias", "1.weight", "1.bias"]).restore(saved)
