"""Loss scaling: a step whose gradients overflow is skipped, counted and recorded, and leaves the schedule where it was."""

from __future__ import annotations

import math

import pytest
from torch.amp.grad_scaler import GradScaler

from lockstep.training.step import problems
from tests.distributed.pool import Pool
from tests.distributed.training import Document, Trained, bits, train
from tests.raised import raises

FIRST_SCALE = GradScaler("cpu").get_scale()


def document(*, steps: int, bombs: tuple[int, int], epoch: int = 32, force: float = 1e18) -> Document:
    """Steps of eight samples in the order of the data; the samples in `bombs` overflow in fp16."""
    return {
        "job": {
            "use": "tests.distributed.small_jobs:Overflowing",
            "params": {"samples": epoch, "bombs": list(bombs), "force": force},
        },
        "length": {"steps": steps},
        "batch": {"global": 8, "micro": 2},
        "data": {"shuffle": "none"},
        "schedule": {"name": "linear", "warmup_steps": 3},
        "precision": "fp16",
        "clip_norm": 0.5,
        "workers": {"bucket_mb": 0.00005},
    }


ONE_BOMB = document(steps=6, bombs=(19, 20), epoch=64)  # sample 19 is in step 3


@pytest.fixture(scope="module")
def trained() -> Trained:
    return train(ONE_BOMB)


def test_an_overflow_skips_its_step_and_halves_the_scale(trained: Trained) -> None:
    assert [row.skipped for row in trained.steps] == [False, False, True, False, False, False]
    assert [row.scale for row in trained.steps] == [FIRST_SCALE] * 3 + [FIRST_SCALE / 2] * 3
    assert not math.isfinite(trained.steps[2].grad_norm)
    assert math.isfinite(trained.steps[2].loss)
    assert trained.digests[2] == trained.digests[1]
    assert trained.digests[3] != trained.digests[2]


def test_a_skipped_step_consumes_its_data_and_leaves_the_schedule(trained: Trained) -> None:
    assert [row.samples for row in trained.steps] == [8, 16, 24, 32, 40, 48]
    assert [row.step for row in trained.steps] == [1, 2, 3, 4, 5, 6]
    rates = [row.lr for row in trained.steps]
    assert rates[2] == rates[3] == 1e-3
    assert rates == [1e-3 * factor for factor in (1 / 3, 2 / 3, 1.0, 1.0, 1.0, 1 - 1 / 3)]


def test_a_skipped_step_is_counted(trained: Trained) -> None:
    assert trained.summary["skipped"] == 1
    assert trained.summary["step"] == 6
    assert trained.summary["samples"] == 48


@pytest.mark.scenario
def test_skipping_keeps_the_bits_on_any_number_of_workers(pool: Pool, trained: Trained) -> None:
    """G1: whichever rank met the overflow, all of them skip."""
    for workers in (1, 2, 3, 4):
        assert pool.run(workers, train, ONE_BOMB) == [trained] * workers


def test_without_an_overflow_nothing_is_skipped() -> None:
    rows = train(document(steps=6, bombs=(0, 0))).steps
    assert [bits(row.scale) for row in rows] == [bits(FIRST_SCALE)] * 6
    assert not any(row.skipped for row in rows)


def test_the_same_data_overflow_in_no_other_precision() -> None:
    for precision in ("fp32", "bf16"):
        rows = train({**ONE_BOMB, "precision": precision}).steps
        assert [row.scale for row in rows] == [1.0] * 6
        assert not any(row.skipped for row in rows)


def test_fifty_skips_in_a_row_end_the_run() -> None:
    with raises(problems.SCALE_FELL, got="50 steps in a row overflowed") as info:
        train(document(steps=60, bombs=(0, 32)))
    assert "\n" not in str(info.value)


def test_forty_nine_skips_do_not() -> None:
    """They are counted in a row: a good step in between begins the count anew."""
    trained = train(document(steps=60, bombs=(0, 49 * 8), epoch=50 * 8, force=1e25))
    assert [row.step for row in trained.steps if not row.skipped] == [50]
    assert trained.summary["skipped"] == 59
