"""The learning-rate range test: one short run, the same each time, that ends where the loss explodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.checks.lr_finder import as_text, lr_find
from lockstep.errors import SpecError

PLAIN = {
    "job": {"use": "tests.distributed.small_jobs:Plain"},
    "batch": {"global": 32},
    "optimizer": {"name": "sgd", "lr": 0.1},
    "clip_norm": 1.0,
    "early_stop": {"metric": "eval/loss"},
}


def test_the_rate_rises_to_where_the_loss_explodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = lr_find(PLAIN, lowest=1e-4, highest=1e5, steps=60)
    ratios = [after / before for before, after in zip(found.rates, found.rates[1:], strict=False)]
    assert found.rates[0] == 1e-4
    assert max(ratios) - min(ratios) < 1e-9, "a geometric rise"
    assert found.diverged is not None
    assert 1e-3 < found.suggestion < found.diverged / 5
    assert min(found.smoothed) < found.smoothed[0], "on the way there the job learns"
    assert f"optimizer.lr={found.suggestion:g}" in as_text(found)
    assert lr_find(PLAIN, lowest=1e-4, highest=1e5, steps=60) == found
    assert not list(tmp_path.iterdir()), "nothing is kept"


def test_a_range_without_divergence_is_told() -> None:
    found = lr_find(PLAIN, lowest=1e-6, highest=1e-4, steps=20)
    assert found.diverged is None
    assert len(found.rates) == 20


def test_bounds_that_are_none_are_refused() -> None:
    with pytest.raises(SpecError, match="wanted 0 < lowest < highest"):
        lr_find(PLAIN, lowest=1.0, highest=0.1)
