"""The copy that a step pays for: complete, its own, and in memory that is used again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.checkpoint import problems
from lockstep.checkpoint.snapshot import SMALLEST_SHARE, _host_block, share_out, snapshot
from tests.raised import raises
from tests.unit.checkpoint.states import bits, same, state


def test_a_snapshot_does_not_change_with_the_state() -> None:
    sections = state(3)
    copied = snapshot(sections)
    before = {name: tensor.clone() for name, tensor in copied.tensors["model"].items()}
    for tensor in sections["model"].values():
        tensor.zero_()
    sections["optimizer"]["param_groups"][0]["lr"] = 0.0
    sections["optimizer"]["param_groups"][0]["params"].clear()
    assert same(copied.tensors["model"], before)
    group = copied.trees["optimizer"]["param_groups"][0]
    assert group["lr"] == 3.1 and group["params"] == [0, 1]


def test_the_memory_is_used_again() -> None:
    first = snapshot(state(1))
    places = [tensor.data_ptr() for own in first.tensors.values() for tensor in own.values()]
    second = snapshot(state(2), first)
    assert [tensor.data_ptr() for own in second.tensors.values() for tensor in own.values()] == places
    assert all(place % 64 == 0 for place in places)
    assert same(second.tensors["model"], snapshot(state(2)).tensors["model"])


def test_a_state_of_another_form_takes_the_same_memory_if_it_fits() -> None:
    """Best weights come to a run after a while, and a head may change its type."""
    copied = snapshot({"model": {"a": torch.zeros(100), "b": torch.zeros(100)}})
    start = copied.tensors["model"]["a"].data_ptr()
    copied = snapshot({"model": {"a": bits(torch.float16, 7, 3), "c": bits(torch.int64)}}, copied)
    assert same(copied.tensors["model"], {"a": bits(torch.float16, 7, 3), "c": bits(torch.int64)})
    assert copied.tensors["model"]["a"].data_ptr() == start
    larger = {"a": bits(torch.float32, 500), "b": bits(torch.bool, 0)}
    assert same(snapshot({"model": larger}, copied).tensors["model"], larger)


def test_a_state_without_tensors_is_copied_too() -> None:
    copied = snapshot({"counters": {"step": 3}, "nothing": {}, "rows": b""})
    assert (
        copied.nbytes == 0
        and copied.trees == {"counters": {"step": 3}, "nothing": {}}
        and copied.blocks == {"rows": b""}
    )


def test_blocks_of_bytes_are_rank_0s() -> None:
    assert snapshot({"ledger": b"rows"}, rank=1, ranks=2).blocks == {}


def test_a_structure_is_that_of_the_state_whoever_has_it() -> None:
    big: dict[str, Any] = {"model": {str(i): torch.zeros(SMALLEST_SHARE // 2) for i in range(4)}}
    assert snapshot(big, rank=0, ranks=2).structure() == snapshot(big, rank=1, ranks=2).structure()
    assert snapshot(state(1)).structure() != snapshot(state(2)).structure()


@pytest.mark.parametrize("name", ["", "Model", "a/b", "a.b", "receipt", "../x"])
def test_a_section_needs_a_plain_name(name: str) -> None:
    with pytest.raises(ValueError, match="cannot name a section"):
        snapshot({name: {}})


def test_too_little_memory_is_told() -> None:
    with raises(problems.NO_MEMORY):
        _host_block(1 << 62)


@given(st.lists(st.integers(0, 3 * SMALLEST_SHARE), max_size=30), st.integers(1, 9))
def test_shares_are_spans_of_nearly_the_same_size(sizes: list[int], ranks: int) -> None:
    shares = share_out(sizes, ranks)
    assert 1 <= len(shares) <= ranks
    assert [i for share in shares for i in share] == list(range(len(sizes))), "each once, in order"
    if len(shares) > 1:
        fair = sum(sizes) / len(shares)
        assert fair >= SMALLEST_SHARE
        assert all(sum(sizes[i] for i in share) <= fair + max(sizes) for share in shares)
