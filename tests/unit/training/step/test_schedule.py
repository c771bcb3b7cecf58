"""The learning rate: exact factors, as a function of the updates that were really taken."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from lockstep.checkpoint.tree import pack
from lockstep.checkpoint.tree_decoder import unpack
from lockstep.errors import SpecError
from lockstep.spec.schedules import (
    Constant,
    Cosine,
    CosineRestarts,
    InverseSquareRoot,
    Linear,
    OneCycle,
    Polynomial,
    Schedule,
    StepDecay,
    WarmupStableDecay,
)
from lockstep.training.step.learning_rate import (
    FunctionOfUpdates,
    Rates,
    TorchScheduler,
    base_rates,
    rates_of,
    set_rates,
)
from lockstep.training.step.phase_step import runs_own_code


def factors(schedule: Schedule, total: int) -> list[float]:
    return [schedule.factor(update, total) for update in range(total)]


def test_constant() -> None:
    assert factors(Constant(), 4) == [1.0] * 4


def test_warmup_rises_in_a_straight_line_to_the_full_rate() -> None:
    assert factors(Constant(warmup_steps=4), 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_reaches_its_end_just_after_the_last_update() -> None:
    assert factors(Linear(), 4) == [1.0, 0.75, 0.5, 0.25]
    assert Linear().factor(4, 4) == 0.0
    assert factors(Linear(warmup_steps=2, final=0.5), 6) == [0.5, 1.0, 1.0, 0.875, 0.75, 0.625]


def test_cosine_is_half_a_cosine() -> None:
    assert factors(Cosine(), 3) == [0.5 * (1 + math.cos(math.pi * i / 3)) for i in range(3)]
    assert factors(Cosine(warmup_steps=2, final=0.2), 4) == [
        0.5,
        1.0,
        1.0,
        0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 2)),
    ]
    assert Cosine(final=0.1).factor(9, 9) == 0.1


@pytest.mark.parametrize("schedule", [Cosine(final=0.25), Linear(final=0.25)])
def test_the_fall_stays_at_its_end(schedule: Schedule) -> None:
    """More updates than the run was planned for are no reason to rise again."""
    assert [schedule.factor(update, 8) for update in (8, 9, 100)] == [0.25] * 3


def test_step_decay_counts_from_the_end_of_the_warmup() -> None:
    assert factors(StepDecay(every=2, gamma=0.5), 6) == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    assert factors(StepDecay(every=2, gamma=0.5, warmup_steps=1), 6) == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25]


@pytest.mark.parametrize(
    "schedule", [Cosine(warmup_steps=10), Linear(warmup_steps=10), StepDecay(every=3, warmup_steps=10)]
)
def test_warmup_longer_than_the_run(schedule: Schedule) -> None:
    assert factors(schedule, 5) == [0.1, 0.2, 0.3, 0.4, 0.5]


def test_every_factor_is_a_rate() -> None:
    for total in range(1, 30):
        for warmup in range(total + 2):
            for kind in (Constant, Linear, Cosine):
                values = factors(kind(warmup_steps=warmup), total)
                assert all(0.0 < value <= 1.0 for value in values)
                assert values[:warmup] == sorted(values[:warmup])
                assert values[warmup:] == sorted(values[warmup:], reverse=True)


def test_groups_keep_their_own_rates() -> None:
    """A job's optimizer may have several; the first is the one that is recorded."""
    layers = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    groups = [{"params": layers[0].parameters(), "lr": 0.5}, {"params": layers[1].parameters(), "lr": 0.125}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    base = base_rates(optimizer)
    assert set_rates(optimizer, base, 0.5) == 0.25
    assert set_rates(optimizer, base, 0.25) == 0.125
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.03125]


def sgd(lr: float) -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=lr)


@pytest.mark.parametrize("strategy", ["cos", "linear"])
@pytest.mark.parametrize("peak", [1.0, 2.0**-9])
@pytest.mark.parametrize(("total", "pct_start"), [(10, 0.3), (101, 0.25), (1000, 0.5), (4, 0.5)])
def test_one_cycle_is_that_of_torch(strategy: str, peak: float, total: int, pct_start: float) -> None:
    """`OneCycleLR`, bit for bit; a peak that is no power of two is one rounding away."""
    optimizer = sgd(peak)
    theirs = lr_scheduler.OneCycleLR(
        optimizer,
        peak,
        total,
        pct_start=pct_start,
        anneal_strategy=strategy,
        cycle_momentum=False,  # type: ignore[arg-type]
    )
    ours = OneCycle(pct_start=pct_start, anneal_strategy=strategy)  # type: ignore[arg-type]
    for update in range(total):
        assert peak * ours.factor(update, total) == rates_of(optimizer)[0]
        optimizer.step()
        if update < total - 1:
            theirs.step()
    assert ours.factor(total, total) == ours.factor(total - 1, total)


@pytest.mark.parametrize("total", [1, 2, 3])
def test_one_cycle_of_a_run_that_is_too_short_for_one(total: int) -> None:
    assert all(0 < value <= 1 for value in factors(OneCycle(), total))


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0, 3.7])
def test_polynomial_is_the_closed_form_of_torch(power: float) -> None:
    optimizer = sgd(0.3)
    theirs = lr_scheduler.PolynomialLR(optimizer, total_iters=50, power=power)
    for update in range(52):
        theirs.last_epoch = update
        assert [0.3 * Polynomial(power=power).factor(update, 50)] == theirs._get_closed_form_lr()
    assert factors(Polynomial(warmup_steps=2, power=2.0, final=0.5), 4) == [0.5, 1.0, 1.0, 0.625]


def test_inverse_square_root_goes_on_from_the_warmup() -> None:
    """Vaswani et al.: min(update / warmup, sqrt(warmup / update)) for updates counted from 1."""
    wanted = [min(u / 4, math.sqrt(4 / u)) for u in range(1, 101)]
    assert factors(InverseSquareRoot(warmup_steps=4), 100) == wanted
    assert factors(InverseSquareRoot(), 3) == [1.0, math.sqrt(1 / 2), math.sqrt(1 / 3)]


@pytest.mark.parametrize("period", [1, 2, 8, 64])
def test_cosine_restarts_are_those_of_torch(period: int) -> None:
    """`CosineAnnealingWarmRestarts` bit for bit; a period that is no power of two is one rounding away."""
    optimizer = sgd(1.0)
    theirs = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, period, eta_min=0.0)
    ours = CosineRestarts(period=period)
    for update in range(300):
        assert [ours.factor(update, 300)] == rates_of(optimizer)
        optimizer.step()
        theirs.step()


def test_cosine_restarts_count_from_the_end_of_the_warmup_and_not_by_the_length() -> None:
    fall = [0.5 + 0.5 * value for value in factors(Cosine(), 3)]
    restarts = CosineRestarts(warmup_steps=2, period=3, final=0.5)
    assert factors(restarts, 9) == factors(restarts, 99)[:9] == [0.5, 1.0, *fall, *fall, fall[0]]


def test_warm_up_stable_decay() -> None:
    """Full rate in the middle, whatever the length; then one of three falls, which ends just after the last update."""
    linear = WarmupStableDecay(warmup_steps=2, decay_steps=4, final=0.5)
    assert factors(linear, 10) == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.875, 0.75, 0.625]
    assert linear.factor(10, 10) == 0.5
    assert factors(linear, 1000)[:994] == [0.5, *[1.0] * 993]
    root = WarmupStableDecay(decay_steps=4, decay="sqrt")
    assert factors(root, 5) == [1.0, *(1 - math.sqrt(i / 4) for i in range(4))]
    cosine = WarmupStableDecay(decay_steps=4, decay="cosine")
    assert factors(cosine, 5) == [1.0, *factors(Cosine(), 4)]


def test_a_run_that_is_too_short_for_its_fall_is_refused() -> None:
    WarmupStableDecay(warmup_steps=6, decay_steps=4).check_length(10)
    with pytest.raises(
        SpecError, match=r"^schedule\.decay_steps: got 4 after 7 of warm-up, wanted at most the 10"
    ):
        WarmupStableDecay(warmup_steps=7, decay_steps=4).check_length(10)


def test_a_rate_that_a_function_gives_is_the_rate_where_the_full_one_is_1() -> None:
    """nanoGPT's schedule exactly: its `get_lr`, and `optimizer.lr: 1`."""
    optimizer = sgd(1.0)
    schedule = FunctionOfUpdates(optimizer, nano_gpt)
    for update in range(700):
        schedule.set(update)
        assert rates_of(optimizer) == [nano_gpt(update)]
    assert schedule.state_dict() == {}


def nano_gpt(it: int) -> float:
    """`get_lr` of nanoGPT's train.py."""
    learning_rate, warmup_iters, lr_decay_iters, min_lr = 6e-4, 20, 600, 6e-5
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    coeff = 0.5 * (1.0 + math.cos(math.pi * decay_ratio))
    return min_lr + coeff * (learning_rate - min_lr)


def test_an_optimizer_of_torch_runs_no_code_of_the_job_whoever_notes_its_rates() -> None:
    """Each step would otherwise seed and copy buffers for it."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = FunctionOfUpdates(optimizer, lambda update: 1.0)
    Rates(optimizer, schedule)
    assert not runs_own_code(optimizer)
    optimizer.register_step_pre_hook(lambda *_: None)
    assert runs_own_code(optimizer)


@pytest.mark.parametrize("restored", range(6))
def test_a_scheduler_of_schedulers_goes_on_wherever_it_is_restored(restored: int) -> None:
    """Before the milestone too: what is to begin there counts its own milestones."""

    def made() -> TorchScheduler:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        rising = lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=2)
        falling = lr_scheduler.MultiStepLR(optimizer, [1, 1, 2], gamma=0.5)
        inner = lr_scheduler.SequentialLR(optimizer, [rising, falling], milestones=[2])
        chained = lr_scheduler.ChainedScheduler([inner, lr_scheduler.MultiStepLR(optimizer, [3])])
        return TorchScheduler(optimizer, chained)  # type: ignore[arg-type]

    def rates(schedule: TorchScheduler, updates: int) -> list[float]:
        found = []
        for _ in range(updates):
            found += rates_of(schedule.optimizer)
            schedule.optimizer.step()
            schedule.follow()
        return found

    whole, first, second = rates(made(), 6), made(), made()
    begun = rates(first, restored)
    packed = pack(first.state_dict(), "schedule")
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.load_state_dict(unpack(packed.skeleton, packed.tensors), fork=False)
    assert begun + rates(second, 6 - restored) == whole
    assert len(set(whole)) > 3


def test_a_rate_in_a_tensor_stays_in_it() -> None:
    """With a tensor torch's optimizers take other operators, with other bits."""
    weights = []
    for by_hand in (True, False):
        parameter = nn.Parameter(torch.linspace(0.1, 1.0, 16))
        optimizer = torch.optim.AdamW([parameter], lr=torch.tensor(0.05))
        rates = None if by_hand else FunctionOfUpdates(optimizer, lambda _: 1.0)
        for update in range(3):
            parameter.grad = parameter.detach() ** 2
            if rates is not None:
                rates.set(update)
            optimizer.step()
        weights.append(parameter.detach().tolist())
    assert weights[0] == weights[1]
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)


class Counting(torch.optim.lr_scheduler.LRScheduler):
    """Keeps what it has seen in a mapping with defaults."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen = defaultdict[int, int](int)
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        self.seen[self.last_epoch] += 1
        return [base / (1 + len(self.seen)) for base in self.base_lrs]


def test_a_scheduler_with_a_mapping_with_defaults_goes_on() -> None:
    made = [torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2)]
    first, second = (TorchScheduler(optimizer, Counting(optimizer)) for optimizer in made)
    for _ in range(3):
        made[0].step()
        first.follow()
    state = first.state_dict()
    assert type(state["scheduler"]["seen"]) is dict
    made[1].load_state_dict(made[0].state_dict())
    second.load_state_dict(state, fork=False)
    for optimizer, schedule in zip(made, (first, second), strict=True):
        optimizer.step()
        schedule.follow()
    assert made[0].param_groups[0]["lr"] == made[1].param_groups[0]["lr"]
    assert second.scheduler.seen == first.scheduler.seen  # type: ignore[attr-defined]
