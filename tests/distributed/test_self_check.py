"""G1: by default a run computes a micro-batch again in the steps 2, 4, 8 … and now and then, so that hidden state that starts late is found."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from lockstep import Loss
from lockstep.training.integrity import problems
from lockstep.training.integrity.recheck import SELDOM, is_looked_at
from tests.distributed.kinds import Kind, document
from tests.distributed.pool import Pool
from tests.distributed.training import train
from tests.raised import raises


class StartsLate(Kind):
    """From some micro-batch on its loss grows with each call: nothing that a rehearsal sees."""

    calls, begins = 0, 20

    def loss(self, model: torch.nn.Module, batch: Any) -> Loss:
        self.calls += 1
        loss = super().loss(model, batch)
        return Loss(loss.total * max(1.0, self.calls - self.begins), loss.weight, loss.parts)


class Counts(StartsLate):
    """The same, without an effect."""

    begins = 1_000_000


def late(kind: type[Kind], **more: Any) -> dict[str, Any]:
    return document(kind, length={"epochs": 12}, rehearsal="quick", **more)


def test_state_that_starts_late_is_found_by_name() -> None:
    with raises(problems.KEPT_IN_TRAINING, got="job.calls", step=re.compile("^(8|16)$")):
        train(late(StartsLate))


@pytest.mark.scenario
def test_state_that_starts_late_is_found_on_two_workers(pool: Pool) -> None:
    with raises(problems.KEPT_IN_TRAINING, got="job.calls"):
        pool.run(2, train, late(StartsLate))


def test_without_the_look_it_trains_to_its_end() -> None:
    """The negative control."""
    trained = train(late(StartsLate, determinism={"mode": "strict", "recheck": 0}))
    assert len(trained.steps) > 8


@pytest.mark.scenario
def test_the_look_changes_no_bit() -> None:
    looked, plain = (
        train(late(Counts, **more)) for more in ({}, {"determinism": {"mode": "strict", "recheck": 0}})
    )
    assert (looked.identity, looked.digests) == (plain.identity, plain.digests)


def test_looks_are_early_and_then_rare() -> None:
    steps = [step + 1 for step in range(100_000) if is_looked_at(7, step)]
    assert {2, 4, 8, 16, 32, 64} <= set(steps)
    assert 1 not in steps
    assert len(steps) < 17 + 2 * 100_000 / SELDOM
