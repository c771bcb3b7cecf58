"""What a bench takes are the steps of a run, bit for bit on every number of workers; other bits are told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.checks.bench import WARM_UP, BenchResult, as_text, first_difference, shortened, speed_of
from lockstep.checks.bench_worker import take_steps
from lockstep.communication.group import Group
from lockstep.spec.loading import load_spec
from tests.distributed.pool import Pool
from tests.distributed.training import Document, train

STEPS = 3


def document(job: str, **more: Any) -> Document:
    return {
        "job": {"use": f"tests.distributed.small_jobs:{job}"},
        "batch": {"global": 16, "micro": 4},
        "record": {"uri": "off"},
        **more,
    }


def worker(spec: Document, workers: int) -> dict[str, Any]:
    """What a worker of a bench does, in the process group at hand."""
    short = shortened(load_spec(spec), workers, STEPS)
    return take_steps(short, Group.join(torch.device("cpu")), WARM_UP, STEPS)


def benched(pool: Pool, spec: Document, *workers: int) -> BenchResult:
    speeds = [speed_of(pool.run(count, worker, spec, count)[0]) for count in workers]
    return BenchResult(STEPS, speeds, True, first_difference(speeds), 2)


def test_two_workers_take_the_steps_of_one_and_of_a_run(pool: Pool) -> None:
    found = benched(pool, document("Plain", early_stop={"metric": "eval/loss"}, data={"drop_last": False}), 1, 2)  # fmt: skip
    assert found.same_bits is True
    run = train(document("Plain", length={"steps": WARM_UP + STEPS}, data={"drop_last": False}))
    one, two = found.speeds
    assert one.losses == tuple(row.loss.hex() for row in run.steps)
    assert set(one.digests) | set(two.digests) == {run.weights_digest}
    assert (one.workers, two.workers, len(two.digests)) == (1, 2, 2)
    assert one.step_times.reduction_s == 0 < two.step_times.reduction_s
    assert all(part >= 0 for speed in found.speeds for part in speed.step_times)
    assert one.samples_per_s == pytest.approx(16 / one.step_s)
    assert found.efficiency(one) == 1
    assert found.efficiency(two) + sum(found.lost(two).values()) == pytest.approx(1)


def test_bits_that_depend_on_the_number_of_workers_are_told(pool: Pool) -> None:
    """A job that counts its calls: the rehearsal, which a bench leaves out, would refuse it."""
    found = benched(pool, document("Counting"), 1, 2)
    assert found.same_bits is False
    assert found.first_difference.startswith("step 1: the loss is ")
    assert f"different: {found.first_difference}" in as_text(found)
