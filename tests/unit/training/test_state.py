"""The counters, and the best evaluation with the weights that belong to it."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.checkpoint.tree import pack
from lockstep.checkpoint.tree_decoder import unpack
from lockstep.job.interface import Job
from lockstep.plan import Plan
from lockstep.spec.fields import EarlyStop
from lockstep.training.auxiliary_state import beside_weights
from lockstep.training.integrity.state_digest import tree_digest
from lockstep.training.problems import OTHER_STATE, SHARED_APART
from lockstep.training.state import (
    Best,
    TrainState,
    power_of_two,
)
from lockstep.training.step import problems
from lockstep.training.step.precision import Precision
from tests.nested import Nested
from tests.raised import raises

NAN, INF = math.nan, math.inf


def judged(rule: EarlyStop, values: list[float]) -> tuple[Best, list[bool]]:
    """The state after evaluations at steps 10, 20, …, of a model whose weight is then 0, 1, …"""
    best, model = Best(), nn.Linear(1, 1, bias=False)
    stops = []
    for i, value in enumerate(values):
        with torch.no_grad():
            model.weight.fill_(float(i))
        stops.append(best.judge(rule, value, 10 * (i + 1), model.state_dict(), dict))
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
    found, stopped = judged(EarlyStop(metric="eval/score", mode=mode, patience=2), values)  # type: ignore[arg-type]
    assert stopped == stops
    assert (found.value, found.step) == (values[best], 10 * (best + 1))
    assert found.weights is not None
    assert found.weights["weight"].item() == float(best)


def test_nothing_is_best_where_every_evaluation_was_nan() -> None:
    best, stops = judged(EarlyStop(patience=3), [NAN] * 3)
    assert (best.value, best.weights, stops) == (None, None, [False, False, True])


class Warm(Job):
    """A job with state of its own."""

    heat = 2.0

    def state_dict(self) -> dict[str, float]:
        return {"heat": self.heat}


def test_best_weights_are_a_copy_with_buffers_and_what_is_beside_them() -> None:
    best, model, job = Best(), nn.BatchNorm1d(2), Warm(Job.Params())
    model.register_buffer("unlisted", torch.zeros(1), persistent=False)
    best.judge(EarlyStop(), 1.0, 1, model.state_dict(), lambda: beside_weights(model, job, {}))
    job.heat = 5.0
    with torch.no_grad():
        model.running_mean.fill_(5.0)  # type: ignore[union-attr]
        model.weight.fill_(5.0)
        model.unlisted.fill_(5.0)  # type: ignore[union-attr,operator]
    assert best.weights is not None
    assert set(best.weights) == set(model.state_dict())
    assert best.weights["running_mean"].tolist() == [0.0, 0.0]
    assert best.weights["weight"].tolist() == [1.0, 1.0]
    assert best.beside == {"buffers": {"unlisted": torch.zeros(1)}, "job": {"heat": 2.0}}


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
    with raises(
        problems.PARAMETER_ORDER,
        where="parameter 0 of group 0",
        got="1.weight",
        here="here",
        wanted="0.weight",
        there="in the state that is taken over",
    ):
        other.restore(saved)
    assert tree_digest(other.sections()) == before


@pytest.mark.parametrize(
    ("section", "change", "told"),
    [
        ("model", lambda saved: saved["state"].pop("0.bias"), "Missing key"),
        (
            "model",
            lambda saved: saved["state"].update({"0.bias": torch.zeros(3)}),
            "size mismatch for 0.bias",
        ),
        ("model", lambda saved: saved["state"].update({"2.bias": torch.zeros(3)}), "Unexpected key"),
        ("counters", lambda saved: saved.update(steps=3), "unexpected keyword argument 'steps'"),
        ("best", lambda saved: saved.update(stop=1), "unexpected keyword argument 'stop'"),
        ("optimizer", lambda saved: saved["param_groups"].append({"params": []}), "param"),
        ("scaler", None, "'scaler'"),
        ("model", lambda saved: saved.pop("order"), "'order'"),
    ],
)
def test_a_state_that_does_not_fit_is_one_line_of_the_checkpoint(
    section: str, change: Callable[[Any], Any] | None, told: str
) -> None:
    """Not the traceback of the library that meets it, and not an error of the job. The control is what `sections` gave."""
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    saved = copy.deepcopy(dict(state_over(names).sections()))
    state_over(names).restore(copy.deepcopy(saved))
    if change is None:
        del saved[section]
    else:
        change(saved[section])
    with raises(OTHER_STATE, got=re.compile(told)) as info:
        state_over(names).restore(saved)
    assert "\n" not in str(info.value)


def test_state_of_an_optimizer_within_lists_and_mappings_is_restored_as_it_was() -> None:
    """torch casts what is in them to the type of the parameter, and takes a word for a list."""

    def state() -> TrainState:
        model = nn.Linear(2, 2).bfloat16()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.1)
        return TrainState(
            TwoAlike(), model, Nested(model.parameters()), Precision("fp32", torch.device("cpu"))
        )

    trained, restored = state(), state()
    optimizer_of = trained.optimizer_of("")
    optimizer_of.step()
    packed = pack(trained.sections(), "state")
    restored.restore(unpack(packed.skeleton, {name: one.clone() for name, one in packed.tensors.items()}))  # type: ignore[union-attr]
    assert tree_digest(restored.sections()) == tree_digest(trained.sections())
    held = next(iter(restored.optimizer_of("").state.values()))
    assert (held["mode"], held["sums"][0].dtype) == ("down", torch.float64)
    assert type(held["sums"][1]["deep"]) is tuple
    for one in (trained, restored):
        one.optimizer_of("").step()
    assert tree_digest(restored.sections()) == tree_digest(trained.sections())


class Window(Job):
    """A history, and its tail as a view of it; it may take them back each by itself."""

    def __init__(self, *, apart: bool) -> None:
        super().__init__(None)
        self.history, self.apart = torch.zeros(4), apart
        self.newest = self.history[-1:]

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history, "newest": self.newest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history, self.newest = (
            state["history"],
            state["newest"].clone() if self.apart else state["newest"],
        )


@pytest.mark.parametrize("apart", [False, True])
def test_what_a_job_holds_in_one_memory_is_in_one_memory_again_or_refused(apart: bool) -> None:
    model = nn.Linear(1, 1)

    def state(job: Window) -> TrainState:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return TrainState(job, model, optimizer, Precision("fp32", torch.device("cpu")))

    packed = pack(state(Window(apart=False)).sections(), "state")
    job = Window(apart=apart)
    with raises(SHARED_APART, name="job/history", other="job/newest") if apart else nullcontext():
        state(job).restore(
            unpack(packed.skeleton, {name: one.clone() for name, one in packed.tensors.items()})
        )  # type: ignore[union-attr]
        job.newest.fill_(3)
        assert job.history.tolist() == [0, 0, 0, 3]


class Watched(Job):
    """A weight of the model under a name of the job's own, taken back by itself or looked up again."""

    def __init__(self, model: nn.Linear, *, apart: bool) -> None:
        super().__init__(None)
        self.linear, self.apart = model, apart
        self.watched: torch.Tensor = model.weight.detach()

    def state_dict(self) -> dict[str, Any]:
        return {"watched": self.watched}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.watched = state["watched"] if self.apart else self.linear.weight.detach()


@pytest.mark.parametrize("apart", [False, True])
def test_a_weight_that_a_job_holds_is_the_weight_again_or_refused(apart: bool) -> None:
    """Each section is a file of its own, in which the job's tensor is one by itself."""
    model = nn.Linear(1, 1)
    job = Watched(model, apart=apart)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainState(job, model, optimizer, Precision("fp32", torch.device("cpu")))
    packed = {name: pack(section, name) for name, section in state.sections().items()}
    sections = {
        name: unpack(one.skeleton, {place: tensor.clone() for place, tensor in one.tensors.items()})  # type: ignore[union-attr]
        for name, one in packed.items()
    }
    with raises(SHARED_APART, name="job/watched", other="model/weight") if apart else nullcontext():
        state.restore(sections)
    assert (job.watched.data_ptr() == model.weight.data_ptr()) is not apart


@pytest.mark.parametrize("fused", [True, None])
def test_an_update_that_overflows_begins_no_state(fused: bool | None) -> None:
    """A fused optimizer is stepped by torch's scaler all the same: it would have a state where a sharded one has none."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=fused)
    precision = Precision("fp16", torch.device("cpu"))
    for gradient, updates in (INF, False), (1.0, True):
        parameter.grad = torch.full((3,), gradient) * precision.scale
        precision.unscale(optimizer)
        assert precision.update(optimizer) is updates
        assert bool(optimizer.state) is updates
        precision.settle()
    assert (parameter < 1.0).all()
