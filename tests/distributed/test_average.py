"""`ema` in the spec: the average by hand, bit for bit; what is evaluated, kept and told is the average."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.training import problems
from lockstep.training.integrity.state_digest import weights_digest
from lockstep.training.step.weight_average import Average
from tests.distributed.kinds import RUN, Kind, document, taken_up
from tests.distributed.step_kinds import Averaged
from tests.distributed.training import Trained, train, train_attempt
from tests.raised import raises

AFTER: list[dict[str, Tensor]] = []
"""The weights after each update, as the job saw them."""


class Watched(Averaged):
    def after_step(self, model: nn.Module, step: int) -> None:
        AFTER.append({name: value.clone() for name, value in model.state_dict().items()})


def kept(folder: Path, **more: Any) -> dict[str, Any]:
    return document(Watched, checkpoint={"storage": str(folder), "every": None}, **more)


def averaged_by_hand(decay: float) -> dict[str, Tensor]:
    """torch's own average over the weights of `AFTER`."""
    model = Averaged(None).model()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    for weights in AFTER:
        model.load_state_dict(weights)
        average.update_parameters(model)
    return average.module.state_dict()


def test_the_average_is_that_of_torch(tmp_path: Path) -> None:
    """In `weights/`, in the result and in what is evaluated: `AveragedModel` over the weights after each update."""
    AFTER.clear()
    trained = train_attempt(kept(tmp_path, rehearsal="off"), RUN, AttemptOrigin())
    assert len(AFTER) == 3
    wanted = averaged_by_hand(0.7)
    written = load_file(tmp_path / RUN / "weights" / "ema.safetensors")
    assert weights_digest(written) == weights_digest(wanted) == trained.summary["ema_digest"]
    final = load_file(tmp_path / RUN / "weights" / "final.safetensors")
    assert weights_digest(final) == weights_digest(AFTER[-1]) == trained.weights_digest
    assert trained.weights_digest != trained.summary["ema_digest"]
    assert evaluated(trained) == loss_by_hand(wanted) != loss_by_hand(final)


def evaluated(trained: Trained) -> str:
    return dict(trained.evaluations[-1][2])["eval/loss"]


def loss_by_hand(weights: dict[str, Tensor]) -> str:
    """The loss over the held-out data in micro-batches of three, added up in order."""
    job = Averaged(None)
    model = job.model().eval()
    model.load_state_dict(weights)
    data, total, count = job.eval_data(), 0.0, 0
    assert data is not None
    with torch.no_grad():
        for start in range(0, 7, 3):
            batch = job.collate([data[i] for i in range(start, min(start + 3, 7))])
            loss = job.loss(model, batch)
            total, count = total + float(loss.total), count + int(loss.weight)
    return (total / count).hex()


@pytest.mark.scenario
def test_an_average_that_no_checkpoint_keeps_is_another_one(tmp_path: Path) -> None:
    """The negative control of what a resumed run does with it. In a run with digests it is refused where it is taken up."""
    whole = train_attempt(kept(tmp_path / "whole"), RUN, AttemptOrigin())
    found = []
    for kept_by in ("checkpoint", "nothing"):
        run = kept(tmp_path / kept_by, record={"digest_every": None})
        train_attempt(run, RUN, AttemptOrigin(), 2)
        forgets = mock.patch.object(Average, "load_state_dict", lambda self, state: None)
        if kept_by == "nothing":
            with forgets:
                found.append(train_attempt(run, RUN, taken_up(run)))
            digested = kept(tmp_path / "digested")
            train_attempt(digested, RUN, AttemptOrigin(), 2)
            with forgets, raises(problems.OTHER_POSITION, name="ema_digest"):
                train_attempt(digested, RUN, taken_up(digested))
        else:
            found.append(train_attempt(run, RUN, taken_up(run)))
    assert found[0].summary["ema_digest"] == whole.summary["ema_digest"]
    assert found[1].weights_digest == whole.weights_digest
    assert found[1].summary["ema_digest"] != whole.summary["ema_digest"]


@pytest.mark.scenario
def test_the_average_is_part_of_the_identity_and_leaves_the_weights_alone() -> None:
    plain, one, other = (train(document(Averaged, ema=decay)) for decay in (None, 0.7, 0.9))
    assert len({run.identity for run in (plain, one, other)}) == 3
    assert plain.digests == one.digests == other.digests
    assert plain.summary["ema_digest"] is None
    assert len({run.evaluations for run in (plain, one, other)}) == 3


class Seen(Kind):
    steps: ClassVar[list[int]] = []

    def after_step(self, model: nn.Module, step: int) -> None:
        self.steps.append(step)
        assert not torch.is_grad_enabled()
        model[0].weight[0, 0] = step  # type: ignore[index]


class Skipping(Seen):
    """In fp16 the gradient of the sixteenth sample overflows."""

    more: ClassVar = {
        "precision": "fp16",
        "data": {"shuffle": "none", "drop_last": False},
        "ema": 0.5,
        "clip_norm": None,
    }

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, _ = batch
        loss = super().loss(model, batch)
        bomb = 1e18 if bool((x == self.train_data()[15][0]).all(1).any()) else 1.0
        return type(loss)(loss.total.float() * bomb, loss.weight)


def test_after_step_is_told_the_step_and_skipped_ones_are_no_updates() -> None:
    Seen.steps.clear()
    train(document(Seen, rehearsal="off", length={"epochs": 2}))
    assert Seen.steps == [1, 2, 3, 4, 5, 6]
    Seen.steps.clear()
    trained = train(document(Skipping, rehearsal="off"))
    assert [row.skipped for row in trained.steps] == [False, True, False]
    assert Seen.steps == [1, 3]


RULES: list[dict[str, Any]] = [
    {"early_stop": {"patience": 9}},
    {"checkpoint": {"every": None, "keep_best": {"metric": "eval/loss"}}},
]


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize("rule", RULES)
def test_an_average_that_is_not_one_yet_is_told_where_it_decides(rule: dict[str, Any]) -> None:
    """Once, with the number of updates after which it is one; 0.7 has left half of its start behind after three."""
    every = {"evaluate": {"every": {"steps": 1}}, **rule}
    (told,) = train(document(Averaged, **every)).warnings
    assert told.startswith(f"ema: {'early_stop' if 'early_stop' in rule else 'checkpoint.keep_best'} judges")
    assert "after 1 updates" in told and "100%" in told and "from update 3 on" in told
    assert train(document(Averaged, **{**every, "evaluate": {"every": {"epochs": 1}}})).warnings == ()
    assert train(document(Averaged, evaluate={"every": {"steps": 1}})).warnings == ()  # nothing is decided


@pytest.mark.scenario
def test_an_average_that_never_becomes_one_is_told_at_the_start() -> None:
    """With the largest decay, and the fewest updates, that would do; and not a second time where it decides."""
    (told,) = train(document(Averaged, ema=0.9999, early_stop={"patience": 9})).warnings
    assert (
        "100% of the average is still the weights after the first update when the run ends after 3 updates"
        in told
    )
    assert "lower ema to at most 0.7071, or train for at least 6933 updates" in told
    assert train(document(Averaged, ema=0.707)).warnings == ()
    (nearly,) = train(document(Averaged, ema=0.708)).warnings
    assert nearly.startswith("ema: with 0.708, 50%")
