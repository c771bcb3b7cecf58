"""The exchange between ranks: what each put in comes out of all, whatever its value."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lockstep.communication.group import Group
from lockstep.job.interface import Loss, Mean
from lockstep.reduction_tree import worker_ranges
from lockstep.training.step.step_exchange import Exchange
from tests.distributed.pool import Pool
from tests.distributed.training import bits

VALUES = (0.1, 1e300, -1e300, 5e-324, -0.0, 2.0**53 + 2, 1 / 3)
SPECIAL = (1.0, math.inf, 2.0, -math.inf, math.nan, 3.0, 4.0)


def exchanged(values: tuple[float, ...]) -> tuple[object, ...]:
    """Two steps, so that nothing of the first is left in the second; of the second, all values are doubled."""
    group = Group.join(torch.device("cpu"))
    exchange = Exchange(group, len(values), ("part",), 3)
    outcomes = []
    for step in (1, 2):
        exchange.vote(stop=step == 2 and group.rank == group.size - 1)
        for m in worker_ranges(len(values), group.size)[group.rank]:
            value = torch.tensor(step * values[m], dtype=torch.float64)
            exchange.put(Loss(value, m + 1, {"part": Mean(value, torch.tensor(m))}))
        if group.rank == 0:
            exchange.flag([step])
        exchange.close()
        if group.size > 1:
            exchange.send()
        totals, flagged, _, stop, *_ = exchange.read(len(values))
        outcomes.append((bits(totals._asdict()), str(flagged), stop))
    return tuple(outcomes)


def test_every_rank_reads_the_same_totals(pool: Pool) -> None:
    for values in (VALUES, SPECIAL):
        alone = exchanged(values)
        assert [stop for _, _, stop in alone] == [False, True]  # type: ignore[misc]
        assert [flagged for _, flagged, _ in alone] == ["[1]", "[2]"]  # type: ignore[misc]
        for workers in (1, 2, 3, 4):
            assert pool.run(workers, exchanged, values) == [alone] * workers


def test_first_loss_that_is_not_finite_is_known_to_all(pool: Pool) -> None:
    for outcomes in pool.run(3, exchanged, SPECIAL):
        assert all(dict(totals)["first_bad"] == 1 for totals, _, _ in outcomes)


def descriptors() -> int:
    """What one more group of this size opens."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    group = dist.new_group()
    opened = len(list(Path("/proc/self/fd").iterdir())) - before
    dist.barrier()  # a rank that closes the group while others still connect breaks their connections
    dist.destroy_process_group(group)
    return opened


@pytest.mark.parametrize("workers", [2, 4])
def test_a_group_opens_as_many_descriptors_as_are_asked_for(pool: Pool, workers: int) -> None:
    assert max(pool.run(workers, descriptors)) <= workers + 3
