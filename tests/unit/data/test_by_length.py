"""Orders by length: each sample once, within the bound, and a pure function of lengths, seed and epoch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.by_length import LengthWindows, TokenBatches, lengths_digest, token_cuts
from lockstep.plan import BatchSize, Plan

LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=80)


def greedy(lengths: list[int], tokens: int, most: int) -> list[int]:
    """The cuts of a loop that takes sample after sample."""
    cuts, begin = [0], 0
    for i, length in enumerate(lengths):
        if i - begin == most or (i + 1 - begin) * length > tokens:
            begin = i
            cuts.append(i)
    return [*cuts, len(lengths)]


def batches_of(lengths: list[int], tokens: int, most: int, seed: int = 1) -> TokenBatches:
    row = np.array(lengths)
    return TokenBatches(row, tokens, most, seed, lengths_digest(row))


@settings(max_examples=400, deadline=None)
@given(LENGTHS, st.integers(30, 200), st.integers(1, 9))
def test_micro_batches_are_those_of_a_loop_that_fills_one_after_another(
    lengths: list[int], tokens: int, most: int
) -> None:
    row = np.sort(np.array(lengths))
    starts = np.flatnonzero(np.diff(row, prepend=-1))
    cuts = token_cuts(row[starts], np.append(starts, len(row)), tokens, most)
    assert cuts.tolist() == greedy(row.tolist(), tokens, most)


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(30, 200), st.integers(1, 9), st.booleans())
def test_each_sample_comes_once_in_a_micro_batch_that_keeps_the_bound(
    lengths: list[int], tokens: int, most: int, drop_last: bool
) -> None:
    """G2, for three steps of epochs that are as long as each other."""
    by_length = batches_of(lengths, tokens, most)
    sizes = [BatchSize(most, until_steps=2), BatchSize(2 * most)]
    if drop_last and by_length.count < 4:
        return
    plan = Plan.of(
        len(lengths), sizes, most, drop_last=drop_last, epochs=2, tokens=tokens, by_length=by_length
    )
    seen: list[list[int]] = [[], []]
    for position in plan.positions():
        order = by_length.order(position.epoch, plan.whole_steps(position.epoch))
        assert position.micro_batches <= position.full
        first = position.start
        for m in range(position.micro_batches):
            places = plan.neighbours(position, m)
            assert places.start == first
            ids = order[places].tolist()
            assert 1 <= len(ids) == plan.micro_batch_size(position, m) <= most
            assert len(ids) * max(lengths[i] for i in ids) <= tokens
            seen[position.epoch] += ids
            first = places.stop
        assert first == position.start + position.samples
        assert {plan.step_at(position.epoch, at) for at in range(position.start, first)} == {position.step}
    for ids in seen:
        assert len(set(ids)) == len(ids)
        assert drop_last or sorted(ids) == list(range(len(lengths)))


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))
def test_windows_have_each_sample_once_and_like_lengths_together(
    lengths: list[int], micro: int, count: int, window: int
) -> None:
    size = micro * count
    order = LengthWindows(np.array(lengths), micro, window * size, 3)
    whole = len(lengths) - len(lengths) % size
    ids = np.asarray(order.order(0, whole)[0 : len(lengths)])
    assert sorted(ids.tolist()) == list(range(len(lengths)))
    for start in range(0, whole, window * size):
        stop = min(start + window * size, whole)
        spans = [sorted(lengths[i] for i in ids[at : at + micro]) for at in range(start, stop, micro)]
        spans.sort()
        assert [length for span in spans for length in span] == sorted(lengths[i] for i in ids[start:stop]), (
            "cut out of a sorted window"
        )


@pytest.mark.parametrize("kind", ["tokens", "windows"])
def test_an_order_follows_from_lengths_seed_and_epoch_alone(kind: str) -> None:
    """Whatever was asked before; and the control: another seed, another epoch or other lengths give another one."""
    lengths = [3 + i * 7 % 11 for i in range(200)]

    def order(lengths: list[int], seed: int, epoch: int, before: tuple[int, ...] = ()) -> list[int]:
        made = (
            batches_of(lengths, 60, 8, seed)
            if kind == "tokens"
            else LengthWindows(np.array(lengths), 8, 64, seed)
        )
        for other in before:
            made.order(other, 192)[0:50]
        return list(made.order(epoch, 192)[0:200])

    first = order(lengths, 1, 4)
    assert order(lengths, 1, 4, before=(0, 1, 2, 3, 9, 4, 5)) == first
    others = [order(lengths, 2, 4), order(lengths, 1, 5), order([*lengths[1:], 30], 1, 4)]
    assert all(other != first for other in others)
    assert lengths_digest(np.array(lengths)) != lengths_digest(np.array([*lengths[1:], 30]))


def test_slices_agree_however_they_are_cut() -> None:
    by_length = batches_of([3 + i * 5 % 9 for i in range(100)], 50, 7)
    order = by_length.order(2, 0)
    whole = order[0:100]
    assert (
        np.concatenate([order[i : i + 13] for i in range(0, 91, 13)] + [order[91:100]]).tolist()
        == whole.tolist()
    )
    assert order[3:90:7].tolist() == whole[3:90:7].tolist()


def test_the_largest_micro_batch_has_the_most_tokens_or_the_most_pairs_of_them() -> None:
    """Which of the two needs more memory depends on the model, so both are measured."""

    def largest(lengths: list[int], bound: int) -> list[list[int]]:
        return [[lengths[i] for i in ids.tolist()] for ids in batches_of(lengths, bound, 100).largest()]

    assert largest([3] * 40 + [20] * 6, 60) == [[20] * 3]
    assert largest([10] * 6 + [29], 60) == [[10] * 6, [29]]
    windows = LengthWindows(np.array([3] * 40 + [20] * 5 + [30]), 4, 8, 0)
    assert [ids.tolist() for ids in windows.largest()] == [[45, 40, 41, 42]]
