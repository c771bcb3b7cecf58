"""The tree sum: one value for every way to share out the micro-batches (G1)."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from lockstep.reduction_tree import nodes, worker_ranges
from lockstep.training.step.reduction import TreeSum, in_pairs, pairs_up


def gradients(leaves: int) -> list[Tensor]:
    """One gradient a micro-batch, of such different sizes that every order of addition rounds otherwise."""
    generator = torch.Generator().manual_seed(leaves)
    return [torch.randn(40, generator=generator) * 10.0 ** ((7 * m) % 5) for m in range(leaves)]


def recursive(values: list[Tensor]) -> Tensor:
    """Level by level: neighbours pair up from the left, an odd one is promoted."""
    while len(values) > 1:
        pairs = [a + b for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + ([values[-1]] if len(values) % 2 else [])
    return values[0]


def summed(values: list[Tensor]) -> Tensor:
    tree = TreeSum(len(values))
    for m, value in enumerate(values):
        tree.add(range(m, m + 1), [value.clone()])
    ((node, (total,)),) = tree.sums
    assert node == range(len(values))
    return total


@pytest.mark.parametrize("leaves", range(1, 34))
def test_tree_sum_is_the_recursive_sum(leaves: int) -> None:
    assert torch.equal(summed(gradients(leaves)), recursive(gradients(leaves)))


def closed(leaves: int, own: range) -> list[Tensor]:
    """The partial sums of a range, the last leaf's own gradient coming after the others', as in a step."""
    every = gradients(leaves)
    tree = TreeSum(leaves)
    for m in own[:-1]:
        tree.add(range(m, m + 1), [every[m]])
    folded, apart = tree.close(own[-1])
    last = every[own[-1]]
    for (total,) in folded:
        last.add_(total)
    assert tree.sums == []
    return [*(total for (total,) in apart), last]


@pytest.mark.every(3)
@pytest.mark.parametrize("leaves", range(1, 13))
def test_partial_sums_of_any_ranges_add_up_to_the_same_bits(leaves: int) -> None:
    """Every way to cut the leaves into contiguous ranges, not only those that a plan chooses."""
    wanted = recursive(gradients(leaves))
    for inner in itertools.product((False, True), repeat=leaves - 1):
        cuts = [0, *(i + 1 for i, cut in enumerate(inner) if cut), leaves]
        tree = TreeSum(leaves)
        for own in (range(a, b) for a, b in itertools.pairwise(cuts)):
            for node, part in zip(nodes(own, leaves), closed(leaves, own), strict=True):
                tree.add(node, [part])
        ((_, (total,)),) = tree.sums
        assert torch.equal(total, wanted), cuts


def test_other_orders_round_otherwise() -> None:
    """Without this, the tests above would pass for any sum."""
    for leaves in range(3, 34):
        every = gradients(leaves)
        left = every[0].clone()
        for value in every[1:]:
            left += value
        assert torch.equal(left, recursive(gradients(leaves))) == (leaves == 3)


def test_memory_grows_with_the_logarithm() -> None:
    """Over n leaves at most log2(n) + 1 sets of gradients are held."""
    tree = TreeSum(256)
    for m in range(256):
        tree.add(range(m, m + 1), [torch.ones(1)])
        assert len(tree.sums) <= 9
    assert tree.sums[0][1][0].item() == 256.0


def test_the_plans_ranges_send_few_partial_sums() -> None:
    for micro_batches in range(1, 17):
        for workers in range(1, micro_batches + 1):
            for own in worker_ranges(micro_batches, workers):
                assert len(closed(micro_batches, own)) == len(nodes(own, micro_batches)) <= 4


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_rows_added_in_pairs_are_the_recursive_sum(ranks: int) -> None:
    every = gradients(ranks)
    assert torch.equal(in_pairs(torch.stack(every)), recursive(every))


def test_the_ranks_that_pair_up_are_those_whose_ranges_are_one_level_of_the_tree() -> None:
    """Where they do not, pairs of them would be another sum: six leaves on four ranks, or five ranks."""
    fits = [
        (leaves, ranks)
        for leaves in range(1, 17)
        for ranks in range(1, leaves + 1)
        if pairs_up([nodes(own, leaves) for own in worker_ranges(leaves, ranks)], leaves)
    ]
    powers = [(leaves, ranks) for leaves, ranks in fits if ranks > 2]
    assert powers == [
        (4, 4),
        (7, 4),
        (8, 4),
        (8, 8),
        (13, 4),
        (14, 4),
        (15, 4),
        (15, 8),
        (16, 4),
        (16, 8),
        (16, 16),
    ]
    for leaves, ranks in fits:
        sums = [closed(leaves, own) for own in worker_ranges(leaves, ranks)]
        rows = torch.stack([own[0] for own in sums])
        assert torch.equal(in_pairs(rows), recursive(gradients(leaves))), (leaves, ranks)
