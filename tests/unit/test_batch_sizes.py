"""A global batch whose size changes during the run: the plan's arithmetic against a loop that counts sample by sample."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.plan import BatchSize, Plan
from lockstep.reduction_tree import worker_ranges


class Step(NamedTuple):
    """A step as a loop without arithmetic takes it."""

    epoch: int
    index: int
    start: int
    samples: int
    size: int


def counted(samples: int, sizes: list[BatchSize], drop_last: bool) -> Iterator[Step]:
    """The steps of a run without end, one after another."""
    step = trained = epoch = index = start = 0
    while True:
        size = next(
            each.size
            for each in sizes
            if (each.until_steps is None or step < each.until_steps)
            and (each.until_samples is None or trained < each.until_samples)
        )
        left = samples - start
        if left == 0 or (left < size and drop_last):
            if start == 0:
                return
            epoch, index, start = epoch + 1, 0, 0
            continue
        taken = min(size, left)
        yield Step(epoch, index, start, taken, size)
        step, trained, index, start = step + 1, trained + taken, index + 1, start + taken
        if (
            samples - start < size and drop_last
        ):  # a smaller size that follows does not take what this one has left
            epoch, index, start = epoch + 1, 0, 0


@st.composite
def schedules(draw: st.DrawFn) -> list[BatchSize]:
    """Sizes whose ends rise, some by steps and some by samples."""
    by_steps, end, sizes = draw(st.booleans()), 0, []
    for _ in range(draw(st.integers(0, 3))):
        end += draw(st.integers(1, 60))
        size = 2 * draw(st.integers(1, 6))
        sizes.append(BatchSize(size, until_steps=end) if by_steps else BatchSize(size, until_samples=end))
    return [*sizes, BatchSize(2 * draw(st.integers(1, 6)))]


@pytest.mark.scenario
@settings(max_examples=150, deadline=None)
@given(st.integers(1, 50), schedules(), st.booleans())
def test_every_position_is_where_a_loop_that_counts_arrives(
    samples: int, sizes: list[BatchSize], drop_last: bool
) -> None:
    """G2: epoch, place and size of each step, whatever the sizes and wherever epochs end between them."""
    steps = list(islice(counted(samples, sizes, drop_last), 150))
    if not steps:
        with pytest.raises(
            ValueError, match=f"{samples} samples give no step of batch.global = {sizes[0].size}"
        ):
            Plan.of(samples, sizes, 2, drop_last=drop_last, steps=1)
        return
    plan = Plan.of(samples, sizes, 2, drop_last=drop_last, steps=len(steps))
    positions = list(plan.positions())
    assert [Step(p.epoch, p.index, p.start, p.samples, p.full * 2) for p in positions] == steps
    for position, following in pairwise(positions):
        assert position.ends_epoch == (following.epoch > position.epoch), position
    for position in positions:
        places = [
            i for m in range(position.micro_batches) for i in range(samples)[plan.sample_slice(position, m)]
        ]
        expected = list(range(position.start, position.start + position.samples))
        assert sorted(places) == expected
        together = [
            i for m in range(position.micro_batches) for i in range(samples)[plan.neighbours(position, m)]
        ]
        assert together == expected
        assert {plan.step_at(position.epoch, place) for place in expected} == {position.step}
    smallest = min(plan.micro_batch_size(p, m) for p in positions for m in range(p.micro_batches))
    assert plan.smallest_micro_batch in (smallest, 2)
    sizes_met = [step.size for step in steps]
    changed = [i for i, size in enumerate(sizes_met) if i == 0 or size != sizes_met[i - 1]]
    assert list(plan.changes()) == [(sizes_met[i], i, steps[i].epoch) for i in changed]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 50), schedules(), st.booleans(), st.integers(1, 6))
def test_epochs_end_where_a_loop_that_counts_ends_them(
    samples: int, sizes: list[BatchSize], drop_last: bool, epochs: int
) -> None:
    steps = list(islice(counted(samples, sizes, drop_last), 400))
    expected = sum(step.epoch < epochs for step in steps)
    if not steps or steps[-1].epoch + 1 < epochs:
        with pytest.raises(ValueError, match="give no step of"):
            Plan.of(samples, sizes, 2, drop_last=drop_last, epochs=epochs)
        return
    plan = Plan.of(samples, sizes, 2, drop_last=drop_last, epochs=epochs)
    assert (plan.total_steps, plan.epochs) == (expected, epochs)
    assert sum(map(plan.steps_in_epoch, range(epochs))) == expected


def test_a_schedule_that_forgets_where_the_size_changed_is_noticed() -> None:
    """The control of the tests above: a plan of the first size alone has other positions from the change on."""
    sizes = [BatchSize(4, until_steps=3), BatchSize(8)]
    plan, fixed = (Plan.of(40, given, 2, drop_last=True, steps=6) for given in (sizes, 4))
    assert [p.start for p in plan.positions()][:4] == [p.start for p in fixed.positions()][:4]
    assert [p.start for p in plan.positions()] != [p.start for p in fixed.positions()]


def test_a_size_is_found_without_walking_to_it() -> None:
    """A step a million epochs ahead, in less time than a walk of a thousand steps would take."""
    sizes = [BatchSize(4, until_samples=10**12), BatchSize(8)]
    plan = Plan.of(101, sizes, 2, drop_last=False, steps=10**12)
    position = plan.position(10**12 - 1)
    assert position.full == 4
    assert plan.position(26 * 10**6).epoch == 10**6


@pytest.mark.parametrize("workers", range(1, 9))
def test_every_micro_batch_has_one_worker_whatever_the_size_of_the_step(workers: int) -> None:
    """Also where a step has fewer micro-batches than there are workers."""
    sizes = [BatchSize(4, until_steps=2), BatchSize(6, until_steps=4), BatchSize(16)]
    plan = Plan.of(61, sizes, 2, drop_last=False, epochs=3)
    for position in plan.positions():
        ranges = plan.ranges(workers, position.micro_batches)
        assert [m for assigned in ranges for m in assigned] == list(range(position.micro_batches))
        if position.micro_batches == position.full >= workers:
            assert ranges == worker_ranges(position.full, workers), (
                "a full step is shared out for its own size"
            )
    with pytest.raises(ValueError, match="9 workers for 8 micro-batches"):
        plan.ranges(9)
