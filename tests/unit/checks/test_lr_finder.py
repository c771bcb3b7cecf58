"""The learning-rate range test: one short run, the same each time, that ends where the loss explodes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep.calls.checking import find_rate
from lockstep.checks.lr_finder import RateRange, as_text, lr_find
from lockstep.checks.measurement_plots import draw_range
from lockstep.errors import RecordError, SpecError
from lockstep.record.measurement import keep_measurement
from lockstep.record.mirror.stores import reader
from lockstep.spec.loading import load_spec, named_store
from tests.distributed.small_jobs import Plain
from tests.empty_store import put_empty_store

PLAIN = {
    "job": {"use": "tests.distributed.small_jobs:Plain"},
    "batch": {"global": 32},
    "optimizer": {"name": "sgd", "lr": 0.1},
    "clip_norm": 1.0,
    "early_stop": {"metric": "eval/loss"},
}


@pytest.mark.scenario
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


class OwnOptimizer(Plain):
    rate = 1e-2

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        biases = [p for p in model.parameters() if p.dim() < 2]
        rest = [p for p in model.parameters() if p.dim() > 1]
        return torch.optim.SGD([{"params": rest}, {"params": biases, "lr": 2 * self.rate}], lr=self.rate)


class AtRest(OwnOptimizer):
    rate = 0.0


def test_the_range_is_that_of_an_optimizer_of_the_jobs_own_too() -> None:
    own = {**PLAIN, "job": {"use": f"{__name__}:OwnOptimizer"}}
    found = lr_find(own, lowest=1e-6, highest=1e-4, steps=20)
    # no `==`: the rates are powers, which round
    assert found.rates[0] == pytest.approx(1e-6)
    assert found.rates[-1] == pytest.approx(1e-4)
    with pytest.raises(SpecError, match=r"^lr-find: the first group of the job's optimizer has a rate of 0"):
        lr_find({**PLAIN, "job": {"use": f"{__name__}:AtRest"}}, steps=20)


@pytest.mark.parametrize(
    ("lowest", "highest"),
    [(1.0, 0.1), (1e-7, math.inf), (math.nan, 1.0), (1e-7, math.nan), (1e-300, 1e300), (math.inf, math.inf)],
)
def test_bounds_that_are_none_are_refused(lowest: float, highest: float) -> None:
    with pytest.raises(SpecError, match="wanted 0 < lowest < highest, with a finite ratio"):
        lr_find(PLAIN, lowest=lowest, highest=highest)


# --- the curve, kept --------------------------------------------------------------------------------------


def curve(*smoothed: float, diverged: float | None = None) -> RateRange:
    rates = [10.0 ** (i - 3) for i in range(len(smoothed))]
    found = RateRange(rates, list(smoothed), list(smoothed), diverged, 0.0)
    return replace(found, suggestion=found.rises_from / 10)


def test_the_reasoning_says_where_the_loss_rises_and_where_the_range_is_too_short() -> None:
    found = curve(2.0, 1.0, 3.0, 9.0, diverged=1.0)
    assert (found.rises_from, found.suggestion) == (0.01, 0.001)
    assert (
        "from 2 to 1, its least, at a rate of 0.01 and rises from there on; at 1 it has diverged"
        in found.reasoning
    )
    assert found.reasoning.endswith("optimizer.lr=0.001")
    assert "lower --lowest" in curve(1.0, 2.0, 3.0).reasoning
    assert "raise --highest" in curve(3.0, 2.0, 1.0).reasoning


def test_the_figure_has_the_curve_the_suggestion_and_why(tmp_path: Path) -> None:
    found, kept = find_rate(PLAIN, lowest=1e-4, highest=1e-2, steps=10, plot=tmp_path)
    assert kept is None, "no store is named"
    (file,) = tmp_path.iterdir()
    assert file.name == "lr-find.svg"
    drawn = file.read_text()
    assert f"<!-- suggested: {found.suggestion:g} -->" in drawn
    assert f"optimizer.lr={found.suggestion:g}" in drawn


def test_a_curve_is_kept_with_its_figure_and_the_reason(tmp_path: Path) -> None:
    """In folders: `record.uri: off` has a store too, though a range test is kept there by nobody's wish."""
    found = curve(2.0, 1.0, 3.0)
    spec = load_spec({**PLAIN, "record": {"uri": "off", "folder": str(tmp_path)}})
    kept = keep_measurement(
        spec,
        "lr-find",
        found.reasoning,
        curves={"lr_find/loss": found.losses},
        texts={"lr-find.json": "{}"},
        draw=lambda path: draw_range(found, path),
    )
    run = json.loads((kept.folder / "run.json").read_text())
    assert (run["status"], run["tags"]["lockstep.kind"]) == ("FINISHED", "lr-find")
    assert found.reasoning in run["tags"]["lockstep.note"]
    assert (kept.folder / "lr-find.json").read_text() == "{}"
    assert (kept.folder / "figures" / "lr-find.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.exact
@pytest.mark.filterwarnings("default")  # those of MLflow and SQLAlchemy, about each other
def test_where_a_store_is_named_the_curve_is_kept_there(tmp_path: Path) -> None:
    uri = put_empty_store(tmp_path / "mlflow.db")
    found, kept = find_rate({**PLAIN, "record": {"uri": uri, "folder": str(tmp_path / "runs")}}, lowest=1e-4, highest=1e-2, steps=10)  # fmt: skip
    assert kept is not None
    (run,) = reader(uri, tmp_path).runs(None, 10)
    assert (run.run_id, run.status, run.tags["lockstep.kind"]) == (kept.run_id, "FINISHED", "lr-find")
    assert run.metrics["lr_find/smoothed"] == found.smoothed[-1]
    assert found.reasoning in run.tags["mlflow.note.content"]
    files = reader(uri, tmp_path).artifacts(kept.run_id)
    assert {"lr-find.json", "figures/lr-find.png"} <= set(files)
    assert json.loads(reader(uri, tmp_path).text(kept.run_id, "lr-find.json")) == found.as_dict()


def test_a_store_is_named_by_an_option_the_spec_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert named_store(PLAIN) is None
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://env:1")
    assert named_store(PLAIN) == "http://env:1"
    assert named_store(PLAIN, ["record.uri=off"]) == "off"
    assert named_store({**PLAIN, "record": {"uri": "http://spec:1"}}) == "http://spec:1"
    assert named_store(PLAIN, ["record.uri=off"], "http://option:1") == "http://option:1"


def test_a_store_that_does_not_answer_is_told_before_anything_is_trained(tmp_path: Path) -> None:
    (tmp_path / "notes.db").write_text("no database, a text of some length\n" * 10)
    with pytest.raises(RecordError, match="a file of another kind: move it away"):
        find_rate(PLAIN, uri=f"sqlite:///{tmp_path}/notes.db", lowest=2.0, highest=1.0)
