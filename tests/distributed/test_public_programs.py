"""Small jobs of the kinds of well-known public programs train as they are: with one value on one worker and on two, refused nowhere and told of nothing."""

from __future__ import annotations

import pytest

from tests.distributed.kinds import Kind, document, train_every
from tests.distributed.pool import Pool
from tests.distributed.public_kinds import HELD


def test_there_are_twenty() -> None:
    assert len(HELD) >= 20


@pytest.mark.thinned(2)
@pytest.mark.scenario
@pytest.mark.parametrize(
    "own",
    [
        pytest.param(HELD[::4], id="a fourth"),
        pytest.param(
            [one for i, one in enumerate(HELD) if i % 4], marks=pytest.mark.scenario, id="the others"
        ),
    ],
)
def test_each_trains_with_one_value_and_without_a_word(pool: Pool, own: list[type[Kind]]) -> None:
    documents = [document(kind, **{"rehearsal": "full", **kind.more}) for kind in own]
    alone, shared = train_every(documents), pool.run(2, train_every, documents)
    for kind, one, *ranks in zip(own, alone, *shared, strict=True):
        identity, digests, rows, evaluations, warnings = one
        assert len(set(digests)) == len(rows) == 3, kind
        assert evaluations and warnings == (), (kind, warnings)
        for rank in ranks:
            assert rank[:2] == (identity, digests), kind
        assert ranks[0][2:] == (rows, evaluations, ()), kind
