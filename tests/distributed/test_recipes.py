"""The recipes of docs/recipes.md: what the page shows runs, is one run on any number of workers, and is the plain loop."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.randomness import model_key, seed_all, update_key
from lockstep.training.determinism import determinism
from lockstep.training.integrity.state_digest import weights_digest
from tests.distributed.kinds import RUN, taken_up
from tests.distributed.pool import Pool
from tests.distributed.recipe_jobs import Private, Quantised, clipped_gradients
from tests.distributed.training import Document, train, train_attempt

HERE, PAGE = Path(__file__).with_name("recipe_jobs.py"), Path(__file__).parents[2] / "docs" / "recipes.md"


def document(job: str, **more: Any) -> Document:
    """Four steps of four micro-batches."""
    params = more.pop("params", {})
    return {
        "job": {"use": f"tests.distributed.recipe_jobs:{job}", "params": params},
        "batch": {"global": 12, "micro": 3},
        **more,
    }


@pytest.mark.parametrize("name", ["private", "quantised"])
def test_the_page_has_the_jobs(name: str) -> None:
    (code,) = re.findall(rf"# {name}: begin\n(.*?)\n+# {name}: end", HERE.read_text(), re.DOTALL)
    assert code.strip() in PAGE.read_text()


CASES = [("Private", {}), ("Quantised", {}), ("Quantised", {"observes": True})]


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize(("job", "params"), CASES)
@pytest.mark.parametrize("workers", [3, *(pytest.param(w, marks=pytest.mark.exact) for w in (1, 2, 4))])
def test_recipes_have_one_value(pool: Pool, job: str, params: Document, workers: int) -> None:
    """G1; and none is warned of."""
    alone = train(document(job, params=params))
    assert pool.run(workers, train, document(job, params=params, rehearsal="off")) == [alone] * workers
    assert len(set(alone.digests)) == 4
    assert alone.warnings == ()


@pytest.mark.every(2)
@pytest.mark.parametrize(("job", "params"), CASES[:2])
def test_recipes_are_taken_up(pool: Pool, job: str, params: Document, tmp_path: Path) -> None:
    run = document(job, params=params, rehearsal="off", checkpoint={"storage": str(tmp_path), "every": None})
    pool.run(2, train_attempt, run, RUN, AttemptOrigin(), 2)
    (found,) = [train_attempt(run, RUN, taken_up(run))]
    assert found.weights_digest == train(document(job, params=params)).weights_digest


def test_private_training_is_the_plain_loop() -> None:
    """G3, with one micro-batch of a power of two of samples a step: each sample's gradient clipped, summed, noise added, divided, and the loss as it is."""
    params = {"batch": 16}
    spec = document("Private", params=params, batch={"global": 16, "micro": 16}, data={"shuffle": "none"})
    trained, job = train(spec), Private(Private.Params(**params))
    seed_all(model_key(0))
    model, digests, losses = job.model(), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    x, y = job.train_data().tensors
    with determinism("strict", threads=1):
        for step in range(3):
            some = slice(16 * step, 16 * step + 16)
            losses.append(float(F.cross_entropy(model(x[some]), y[some], reduction="sum").detach()) / 16)
            sums = clipped_gradients(model, x[some], y[some], 0.5)
            seed_all(update_key(0, step))
            for name, parameter in model.named_parameters():
                parameter.grad = (sums[name] / 16).add_(torch.randn_like(parameter), alpha=1.1 * 0.5 / 16)
            optimizer.step()
            digests.append(weights_digest(model.state_dict()))
    assert list(trained.digests) == digests
    assert [row.loss for row in trained.steps] == losses


@pytest.mark.parametrize("observes", [False, True])
def test_quantised_training_is_the_plain_loop(observes: bool) -> None:
    """With one micro-batch a step: calibrated batches, then torch's own loop. The control calibrates with one batch."""

    def by_hand(calibration: int) -> list[str]:
        job = Quantised(Quantised.Params(observes=observes, calibration=calibration))
        seed_all(model_key(0))
        model, digests = job.model(), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        x, y = job.train_data().tensors
        for step in range(3):
            some = slice(16 * step, 16 * step + 16)
            optimizer.zero_grad()
            F.cross_entropy(model(x[some]), y[some]).backward()
            optimizer.step()
            digests.append(weights_digest(model.state_dict()))
        return digests

    spec = document(
        "Quantised",
        params={"observes": observes},
        batch={"global": 16, "micro": 16},
        data={"shuffle": "none"},
    )
    trained = train(spec)
    with determinism("strict", threads=1):
        assert list(trained.digests) == by_hand(4)
        assert list(trained.digests) != by_hand(1)


@pytest.mark.scenario
def test_the_noise_and_the_bound_take_part() -> None:
    """Without either the run is another one."""
    digests = {
        train(document("Private", params=p)).weights_digest for p in ({}, {"noise": 0.0}, {"most": 9.0})
    }
    assert len(digests) == 3


@pytest.mark.scenario
def test_the_calibration_takes_part() -> None:
    digests = {train(document("Quantised", params={"calibration": n})).weights_digest for n in (1, 4)}
    assert len(digests) == 2
