"""The tree along which one rank hands on what it reads: every rank once, and every other node once."""

from __future__ import annotations

from itertools import product

import pytest

from lockstep.training.read_relay import links


@pytest.mark.parametrize("ranks", range(1, 8))
def test_every_rank_receives_once_and_every_other_node_is_entered_once(ranks: int) -> None:
    for nodes in product("abc", repeat=ranks):
        tree = [links(nodes, rank) for rank in range(ranks)]
        handed = {target: rank for rank, (_, targets) in enumerate(tree) for target in targets}
        assert handed == {rank: source for rank, (source, _) in enumerate(tree) if rank}
        assert tree[0][0] is None
        assert len(handed) == sum(len(targets) for _, targets in tree) == ranks - 1
        assert sum(nodes[source] != nodes[rank] for rank, source in handed.items()) == len(set(nodes)) - 1
        reached, front = {0}, [0]
        while front:
            front = [target for rank in front for target in tree[rank][1]]
            reached |= set(front)
        assert reached == set(range(ranks))


@pytest.mark.parametrize(("ranks", "of_a_node", "deep"), [(64, 8, 6), (64, 64, 6), (4096, 8, 12)])
def test_the_tree_is_shallow_and_nobody_hands_on_to_many(ranks: int, of_a_node: int, deep: int) -> None:
    nodes = [str(rank // of_a_node) for rank in range(ranks)]
    tree = [links(nodes, rank) for rank in range(0, ranks, max(1, ranks // 64))]
    assert max(len(targets) for _, targets in tree) <= 4
    rank, hops = ranks - 1, 0
    while (source := links(nodes, rank)[0]) is not None:
        rank, hops = source, hops + 1
    assert hops <= deep
