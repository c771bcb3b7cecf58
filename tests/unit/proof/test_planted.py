"""What can be planted in a record, in a spec, in data or in a machine is found at its step, and its micro-batch where it has one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from lockstep import train
from lockstep.data.sampler import MicroBatchSampler
from lockstep.plan import Plan
from lockstep.training.state import TrainState
from lockstep.training.step import optimizer_step as training_step
from lockstep.training.step.learning_rate import FunctionOfUpdates
from tests.unit.proof.test_verify import (
    GLOBAL,
    MICRO,
    SAMPLES,
    SEED,
    STEPS,
    change_ledger,
    document,
    first,
    flip,
    verified,
)
from tests.unit.proof.test_verify import nothing_planted as nothing_planted
from tests.unit.proof.test_verify import run as run
from tests.unit.proof.verified_jobs import PLANTED, Points


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 12 steps with an average of its weights, and with checkpoints after 4, 8 and 12."""
    spec = document(tmp_path_factory.mktemp("recorded"), ema=0.9, clip_norm=1.0, rehearsal="off")
    return Path(train({**spec, "schedule": {"name": "cosine"}}, local=True).folder)


@pytest.mark.scenario
def test_nothing_is_found_where_nothing_is_planted(recorded: Path) -> None:
    assert verified(recorded, all_steps=True).same_bits
    assert verified(recorded, from_step=6, steps=4).same_bits


# --- in the record ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "tensor", "quantity"),
    [
        ("model", "hidden.weight", "weights_digest"),
        pytest.param("model", "norm.running_var", "weights_digest", marks=pytest.mark.exact),
        pytest.param("model", "norm.num_batches_tracked", "weights_digest", marks=pytest.mark.exact),
        ("optimizer", "exp_avg", "optimizer_digest"),
        ("optimizer", "exp_avg_sq", "optimizer_digest"),
        pytest.param("optimizer", "step", "optimizer_digest", marks=pytest.mark.exact),
        ("ema", "out.bias", "ema_digest"),
    ],
)
def test_a_flipped_bit_of_a_checkpoint_is_found(run: Path, section: str, tensor: str, quantity: str) -> None:
    """Where it is started from, before a step is taken."""
    flip(run, 8, section, tensor)
    assert first(verified(run, from_step=9, steps=1)) == (8, None, quantity)


def test_a_flipped_bit_of_an_average_that_is_passed_is_found(run: Path) -> None:
    flip(run, 8, "ema", "hidden.weight")
    assert first(verified(run, from_step=5, steps=5)) == (8, None, "ema_digest of the checkpoint")


@pytest.mark.parametrize(
    ("column", "change"),
    [
        pytest.param("epoch", lambda value: value + 1, marks=pytest.mark.exact),
        pytest.param("weight", lambda value: value + 1.0, marks=pytest.mark.exact),
        pytest.param("scale", lambda value: value / 2, marks=pytest.mark.exact),
        ("skipped", lambda value: not value),
        pytest.param("clipped_norm", lambda value: math.nextafter(value, 0.0), marks=pytest.mark.exact),
        ("lr", lambda value: math.nextafter(value, 1.0)),
        ("ema_digest", lambda value: value ^ 1 << 40),
    ],
)
def test_a_changed_value_of_any_column_is_found(run: Path, column: str, change: Callable[[Any], Any]) -> None:
    change_ledger(run, 10, column, change)
    found = verified(run, from_step=9)
    assert first(found) == (10, None, column)
    assert found.cause == "this one value was changed after it was recorded: all else is equal"


# --- in the spec ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "value", "where"),
    [
        ("optimizer", {"lr": 1.0000001e-3}, (1, None, "lr")),
        pytest.param(
            "optimizer", {"betas": [0.9, 0.99]}, (1, None, "weights_digest"), marks=pytest.mark.exact
        ),
        pytest.param(
            "optimizer", {"weight_decay": 0.02}, (1, None, "weights_digest"), marks=pytest.mark.exact
        ),
        pytest.param("schedule", {"name": "linear"}, (2, None, "lr"), marks=pytest.mark.exact),
        ("schedule", {"name": "cosine", "final": 1e-9}, (2, None, "lr")),
        ("ema", 0.91, (2, None, "ema_digest")),
        pytest.param("clip_norm", 0.75, (1, None, "clipped_norm"), marks=pytest.mark.exact),
        ("precision", "bf16", (1, 0, "gradient_digest")),
        pytest.param("batch", {"global": 12, "micro": 4}, (1, 0, "gradient_digest"), marks=pytest.mark.exact),
        pytest.param("data", {"drop_last": True}, (5, 0, "gradient_digest"), marks=pytest.mark.exact),
    ],
)
def test_a_changed_field_is_found_where_it_first_acts(
    run: Path, section: str, value: Any, where: tuple[int, int | None, str]
) -> None:
    spec = yaml.safe_load((run / "spec.yaml").read_text())
    if isinstance(value, dict) and section == "optimizer":
        value = {**spec[section], **value}
    (run / "spec.yaml").write_text(yaml.safe_dump({**spec, section: value}))
    found = verified(run, from_step=1, steps=6)
    assert first(found) == where
    assert section in (found.cause or "")


# --- in the data ------------------------------------------------------------------------------------------------


def first_use(*samples: int) -> tuple[int, int]:
    """The step, counted from 1, and the micro-batch that have one of the samples first."""
    plan = Plan.of(SAMPLES, GLOBAL, MICRO, drop_last=False, steps=STEPS)
    order = MicroBatchSampler(Points(SAMPLES), plan, range(4), seed=SEED, shuffle="full", window=8, start=0)
    use = next(batch for batch in order if {*samples} & {*batch.ids})
    return use.step + 1, use.micro_batch


@pytest.mark.parametrize(
    "planted",
    [
        {"sample": 5},
        {"label": 12},
        {"swap": {7: 40, 40: 7}},
        pytest.param({"sample": 30}, marks=pytest.mark.exact),
        pytest.param({"label": 55}, marks=pytest.mark.exact),
    ],
    ids=str,
)
def test_another_sample_label_or_order_is_found_where_it_is_first_used(
    recorded: Path, planted: dict[str, Any]
) -> None:
    PLANTED.update(planted)
    ((name, value),) = planted.items()
    wanted = first_use(*(value if name == "swap" else [value]))
    assert first(verified(recorded, from_step=1, steps=wanted[0] + 1)) == (*wanted, "gradient_digest")


# --- in the machine ---------------------------------------------------------------------------------------------


def flip_bit(tensor: Tensor, bit: int = 3) -> None:
    with torch.no_grad():
        raw = tensor.view(-1)[:1].view(torch.uint8)
        raw[0] ^= 1 << bit


PARTS: dict[str, tuple[Callable[[TrainState], Tensor], str]] = {
    "weight": (lambda state: state.model.get_parameter("out.weight"), "weights_digest"),
    "statistic": (lambda state: state.model.get_buffer("norm.running_mean"), "weights_digest"),
    "first moment": (lambda state: moment(state, "exp_avg"), "optimizer_digest"),
    "second moment": (lambda state: moment(state, "exp_avg_sq"), "optimizer_digest"),
    "count of updates": (lambda state: moment(state, "step"), "optimizer_digest"),
    "average": (lambda state: averaged(state), "ema_digest"),
}


def moment(state: TrainState, name: str) -> Tensor:
    found: Tensor = next(iter(state.optimizer.state.values()))[name]
    return found


def averaged(state: TrainState) -> Tensor:
    assert state.average is not None
    return state.average.weights["norm.weight"]


@pytest.fixture
def lying(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, int], None]]:
    """Has this machine flip one bit of a part of the state after a step."""
    honest = training_step.follow_update

    def lie(part: str, step: int) -> None:
        def follow(state: TrainState, **keys: Any) -> None:
            honest(state, **keys)
            if state.counters.step == step:
                flip_bit(PARTS[part][0](state))

        monkeypatch.setattr(training_step, "follow_update", follow)

    yield lie


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("part", "step"), [(part, step) for step, part in enumerate(PARTS, start=3)], ids=str
)
def test_a_bit_that_a_machine_flips_in_its_state_is_found_after_that_step(
    recorded: Path, lying: Callable[[str, int], None], part: str, step: int
) -> None:
    lying(part, step)
    assert first(verified(recorded, from_step=step, steps=2)) == (step, None, PARTS[part][1])


@pytest.mark.parametrize("step", [1, 7])
def test_another_rate_at_one_step_is_found_there(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The least that it can be off by."""
    honest = FunctionOfUpdates.set

    def set_rates(self: FunctionOfUpdates, update: int) -> None:
        honest(self, update)
        if update == step - 1:
            for group in self.optimizer.param_groups:
                group["lr"] = math.nextafter(group["lr"], 1.0)

    monkeypatch.setattr(FunctionOfUpdates, "set", set_rates)
    found = first(verified(recorded, from_step=step, steps=1))
    assert found == (step, None, "lr")


@pytest.mark.parametrize(("step", "micro_batch"), [(2, 3), (8, 1)])
def test_one_flipped_bit_of_one_micro_batch_is_found_with_it(
    recorded: Path, step: int, micro_batch: int
) -> None:
    PLANTED["gradient"] = (step, micro_batch)
    found = verified(recorded, from_step=step + 1, steps=1)
    assert first(found) == (step + 1, micro_batch, "gradient_digest")


@pytest.mark.exact
@pytest.mark.parametrize("place", [(0, 0), (141, 3), (249, 2)], ids=str)
def test_one_flipped_bit_in_a_thousand_micro_batches_is_found(tmp_path: Path, place: tuple[int, int]) -> None:
    """In the run that was recorded; an honest machine takes all of it again."""
    PLANTED["gradient"] = place
    spec = document(tmp_path, length={"steps": 250}, evaluate={"every": {"epochs": 100}}, rehearsal="off")
    lied = Path(train(spec, local=True).folder)
    PLANTED.clear()
    assert first(verified(lied, all_steps=True)) == (place[0] + 1, place[1], "gradient_digest")
