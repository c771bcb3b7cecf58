"""G7: what a user can get wrong in training is told in one line: what happened, where, and what to do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep import Loss, Mean
from lockstep.checkpoint.problems import UNSTORABLE
from lockstep.checkpoint.runs.run_folder import AttemptOrigin, RunFolder
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.data import problems as data_problems
from lockstep.errors import LockstepError, Problem
from lockstep.problems import STORAGE_FAILED
from lockstep.training import problems
from lockstep.training.integrity import problems as integrity_problems
from lockstep.training.integrity.rehearsal.step_rehearsal import StepRehearsal
from lockstep.training.step import problems as step_problems
from lockstep.training.step.optimizer_step import Stepper
from tests.distributed.kinds import document as document_of_kind
from tests.distributed.mode_kinds import ScheduleFree
from tests.distributed.pool import Pool
from tests.distributed.small_jobs import Plain, points
from tests.distributed.training import Document, train, train_attempt, train_job, train_mixed_numerics
from tests.raised import raises

USE = "tests.distributed.small_jobs:Plain"


def document(use: str = USE, params: dict[str, Any] | None = None, **more: Any) -> Document:
    """Eight steps of two micro-batches."""
    return {"job": {"use": use, "params": params or {}}, "batch": {"global": 8, "micro": 4}, **more}


def with_loss(loss: Callable[[nn.Module, Tensor, Tensor], Any], **params: Any) -> Plain:
    """A job with another loss."""

    class Changed(Plain):
        def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
            return loss(model, *batch)

    return Changed(Plain.Params(**params))


def with_model(model: Callable[[], Any]) -> Plain:
    """A job with another model."""

    class Changed(Plain):
        def model(self) -> nn.Module:
            return model()

    return Changed(Plain.Params())


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="sum")


# --- the data ---------------------------------------------------------------------------------------------


class Points(TensorDataset):
    """Points whose length and fingerprint may fail."""

    def __init__(self, length: Any = None, own: Any = None) -> None:
        super().__init__(*points(64))
        self.length = length
        if own is not None:
            self.fingerprint = own

    def __len__(self) -> int:
        return 64 if self.length is None else self.length()  # type: ignore[no-any-return]


IN_LENGTH: dict[str, object] = {"where": re.compile("__len__ of Points, train_data")}
IN_FINGERPRINT: dict[str, object] = {"where": re.compile("in fingerprint of train_data")}


class Fails:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self) -> Any:
        raise self.error


def with_data(data: Any) -> Plain:
    """A job with other data."""

    class Changed(Plain):
        def train_data(self) -> Any:
            return data

    return Changed(Plain.Params())


@pytest.mark.parametrize(
    ("data", "problem", "facts"),
    [
        (Points(Fails(ValueError("no index\nfile"))), problems.JOB_FAILED, IN_LENGTH | {"kind": "ValueError", "got": "no index file"}),
        (Points(lambda: 3.5), problems.JOB_FAILED, IN_LENGTH | {"got": re.compile("'float' object")}),
        (Points(own=Fails(FileNotFoundError(2, "none", "list.json"))), problems.JOB_FAILED, IN_FINGERPRINT | {"got": re.compile("list.json")}),
        (Points(own=lambda full: {}), problems.JOB_FAILED, IN_FINGERPRINT | {"kind": "TypeError"}),
        (Points(own=Fails(TimeoutError(110, "timed out"))), STORAGE_FAILED, IN_FINGERPRINT),
    ],
)  # fmt: skip
def test_data_whose_own_methods_fail(data: Any, problem: Problem[Any], facts: dict[str, object]) -> None:
    with raises(problem, **facts):
        train_job(document(), with_data(data))


def test_an_order_that_is_drawn_anew_in_every_process() -> None:
    """A resume would visit other samples."""

    class Ordered(Points):
        def epoch_order(self, seed: int, epoch: int, shuffle: str) -> Any:
            return np.random.default_rng().permutation(64)

    with raises(data_problems.ORDER_CHANGES, dataset="Ordered", epoch=0):
        train_job(document(), with_data(Ordered()))


# --- the state ---------------------------------------------------------------------------------------------


class LearnsLater(Plain):
    """From step 3 on its state has a tensor that learns."""

    later: Any = None

    def after_step(self, model: nn.Module, step: int, *statistics: Any, **_: Any) -> None:
        if step == 3:
            self.later = {"weights": [torch.ones(2, requires_grad=True)]}

    def state_dict(self) -> dict[str, Any]:
        return {"later": self.later}

    def load_state_dict(self, state: Any) -> None:
        self.later = state["later"]


def test_a_tensor_of_the_state_that_learns_is_told_at_the_first_save_that_has_it(tmp_path: Path) -> None:
    """A resumed run would get one that does not."""
    saving = {"storage": str(tmp_path), "every": {"steps": 1}}
    with raises(problems.STATE_LEARNS, name="job['later']['weights'][0]"):
        train_attempt(
            {
                "job": {"use": "tests.distributed.test_mistakes:LearnsLater"},
                "batch": {"global": 16, "micro": 4},
                "length": {"steps": 6},
                "checkpoint": saving,
            },
            "0123456789abcdef0123456789abcdef",
            AttemptOrigin(),
        )


# --- the loss ---------------------------------------------------------------------------------------------


def test_loss_that_is_nan_at_once() -> None:
    job = with_loss(lambda model, x, y: lockstep.Loss(cross_entropy(model, x, y) * float("nan"), 4))
    with raises(integrity_problems.FIRST_NOT_FINITE, label="job.loss", got="nan"):
        train_job(document(), job)


def test_loss_that_is_nan_later() -> None:
    """It names step and micro-batch, counted from 1 and from 0 as everywhere."""
    seen = iter(range(100))  # 0 is the rehearsal

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> lockstep.Loss:
        return lockstep.Loss(cross_entropy(model, x, y) * (float("nan") if next(seen) == 6 else 1), 4)

    with raises(step_problems.LOSS_NOT_FINITE, step=3, micro_batch=1, got="nan", rate=0.001):
        train_job(document(rehearsal="off"), with_loss(loss))


def test_loss_that_is_not_finite_on_another_worker(pool: Pool) -> None:
    """Sample 19 alone overflows: it is in step 3, and in micro-batch 3 of the second worker."""
    params = {"bombs": [19, 20], "force": 1e38 * 3.4}
    use = "tests.distributed.small_jobs:Overflowing"
    with raises(step_problems.LOSS_NOT_FINITE, step=3, micro_batch=3, got="inf"):
        pool.run(
            2, train, {**document(use, params, data={"shuffle": "none"}), "batch": {"global": 8, "micro": 2}}
        )


def test_gradient_that_is_not_finite_though_the_loss_is() -> None:
    job = with_loss(lambda model, x, y: lockstep.Loss((model(x) * 0).abs().sqrt().sum(), 4))
    with raises(step_problems.NORM_NOT_FINITE, step=1, got="nan"):
        train_job(document(), job)


def test_loss_that_has_no_gradient() -> None:
    job = with_loss(lambda model, x, y: lockstep.Loss(cross_entropy(model, x, y).detach(), 4))
    with raises(problems.TOTAL_DETACHED, label="job.loss"):
        train_job(document(), job)


def test_loss_that_is_no_scalar() -> None:
    job = with_loss(lambda model, x, y: lockstep.Loss(F.cross_entropy(model(x), y, reduction="none"), 4))
    with raises(problems.TOTAL_FORM, label="job.loss", got="a tensor of shape (4,)"):
        train_job(document(), job)


def test_loss_that_is_no_tensor() -> None:
    with raises(problems.TOTAL_FORM, label="job.loss", got="float"):
        train_job(document(), with_loss(lambda model, x, y: lockstep.Loss(1.0, 4)))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [None, torch.ones(())])
def test_loss_that_is_no_loss(value: Any) -> None:
    with raises(problems.NO_LOSS, label="job.loss", got=type(value).__name__):
        train_job(document(), with_loss(lambda model, x, y: value))


def test_part_that_is_no_mean() -> None:
    job = with_loss(lambda model, x, y: lockstep.Loss(cross_entropy(model, x, y), 4, {"accuracy": 0.5}))  # type: ignore[dict-item]
    with raises(step_problems.NO_MEAN, label="job.loss", name="part 'accuracy'", got="float"):
        train_job(document(), job)


def test_weight_that_the_model_computes() -> None:
    """A loop of torch would differentiate the quotient; a step divides by a constant."""

    def weighted(model: nn.Module, x: Tensor, y: Tensor) -> lockstep.Loss:
        weights = model(x).sigmoid().sum()
        return lockstep.Loss(cross_entropy(model, x, y) * weights, weights)

    def of_terms(model: nn.Module, x: Tensor, y: Tensor) -> lockstep.Loss:
        return lockstep.Loss.of_terms(
            {"a": lockstep.Term(cross_entropy(model, x, y), model(x).sigmoid().sum())}
        )

    for loss, what in ((weighted, "weight"), (of_terms, "the weight of term 'a'")):
        with raises(problems.WEIGHT_LEARNS, label="job.loss", what=what):
            train_job(document(), with_loss(loss))


@pytest.mark.parametrize("weight", [-1.0, float("nan")])
def test_weight_that_is_no_count(weight: float) -> None:
    with raises(problems.LOSS_WEIGHT, label="job.loss", got=weight):
        train_job(
            document(), with_loss(lambda model, x, y: lockstep.Loss(cross_entropy(model, x, y), weight))
        )


def test_weights_that_add_up_to_nothing() -> None:
    with raises(step_problems.NO_WEIGHT, label="job.loss", step=1, got=0.0):
        train_job(document(), with_loss(lambda model, x, y: lockstep.Loss(cross_entropy(model, x, y), 0.0)))


def test_label_out_of_range() -> None:
    job = with_loss(lambda model, x, y: lockstep.Loss(cross_entropy(model, x, y + 1), 4))
    with raises(problems.LABEL_RANGE, got=re.compile("3 is out of bounds")):
        train_job(document(), job)


def test_exception_in_the_loss_is_told_with_its_place() -> None:
    seen = iter(range(100))

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> lockstep.Loss:
        if next(seen) == 4:
            raise KeyError("vocabulary\nof two lines")
        return lockstep.Loss(cross_entropy(model, x, y), 4)

    with raises(
        problems.JOB_FAILED,
        where=re.compile("^step 2, micro-batch 1, rank 0"),
        kind="KeyError",
        got=re.compile("vocabulary"),
    ):
        train_job(document(rehearsal="off"), with_loss(loss))


def later(change: Callable[[lockstep.Loss], Any]) -> Plain:
    """A job whose loss is changed from the second step on."""
    seen = iter(range(100))  # 0 is the rehearsal, 1 and 2 the first step

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        found = lockstep.Loss(cross_entropy(model, x, y), 4, {"early": lockstep.Mean(1.0, 1)})
        return change(found) if next(seen) > 2 else found

    return with_loss(loss)


EARLY, LATE = ({name: lockstep.Mean(1.0, 1)} for name in ("early", "late"))


LATER: dict[str, object] = {"label": "job.loss", "where": " (step 2, micro-batch 0, rank 0)"}
PARTS_NO_MAPPING: dict[str, object] = {
    "what": re.compile("^job.loss: parts is"),
    "got": re.compile(r"^list \(step 2, micro-batch 0, rank 0\)"),
}


@pytest.mark.parametrize("parts", [LATE, {}, EARLY | LATE], ids=["another", "none", "one more"])
def test_parts_that_change_from_one_micro_batch_to_the_next(parts: dict[str, Any]) -> None:
    with raises(
        problems.OTHER_PARTS, label="job.loss", where=" (step 2, micro-batch 0, rank 0)", wanted="'early'"
    ):
        train_job(document(rehearsal="off"), later(lambda loss: replace(loss, parts=parts)))


@pytest.mark.parametrize(
    ("change", "problem", "facts"),
    [
        (lambda loss: None, problems.NO_LOSS, LATER | {"got": "NoneType"}),
        (lambda loss: loss.total, problems.NO_LOSS, LATER | {"got": "Tensor"}),
        (lambda loss: replace(loss, total=3.0), problems.TOTAL_FORM, LATER | {"got": "float"}),
        (
            lambda loss: replace(loss, total=loss.total.view(1)),
            problems.TOTAL_FORM,
            LATER | {"got": "a tensor of shape (1,)"},
        ),
        (lambda loss: replace(loss, parts=[]), step_problems.NO_MAPPING, PARTS_NO_MAPPING),
    ],
)
def test_a_later_loss_that_is_none(
    change: Callable[[lockstep.Loss], Any], problem: Problem[Any], facts: dict[str, object]
) -> None:
    """What the rehearsal looks at is looked at in each micro-batch."""
    with raises(problem, **facts):
        train_job(document(rehearsal="off"), later(change))


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_later_weight_that_is_no_count(weight: float) -> None:
    """Though the weights of the step add up to more than 0."""
    seen = iter(range(100))

    def changed(loss: lockstep.Loss) -> lockstep.Loss:
        return replace(loss, weight=torch.tensor(weight)) if next(seen) == 1 else loss

    with raises(step_problems.STEP_WEIGHT, label="job.loss", step=2, micro_batch=1, got=weight):
        train_job(document(rehearsal="off"), later(changed))


def test_a_part_that_is_a_vector() -> None:
    with raises(
        step_problems.MEAN_NUMBER,
        label="job.loss",
        part="total",
        name="part 'each'",
        got="a tensor of shape (3,)",
    ):
        train_job(
            document(),
            with_loss(
                lambda model, x, y: lockstep.Loss(
                    cross_entropy(model, x, y), 4, {"each": lockstep.Mean(torch.ones(3), 4)}
                )
            ),
        )


def with_parts(parts: dict[Any, Any]) -> Plain:
    """A job whose loss has these parts."""
    return with_loss(lambda model, x, y: lockstep.Loss(cross_entropy(model, x, y), 4, parts))


@pytest.mark.parametrize("name", ["loss", "lr", "grad_norm", "clipped_norm", "scale", "skipped"])
def test_a_part_by_a_name_that_a_step_has_already(name: str) -> None:
    with raises(problems.PART_NAME_TAKEN, label="job.loss", got=name, recorded=f"train/{name}"):
        train_job(document(rehearsal="off"), with_parts({name: lockstep.Mean(1.0, 1)}))


@pytest.mark.parametrize("name", ["", "a\nb", "\ud800", "a\x00"])
def test_a_part_whose_name_cannot_be_shown_in_a_line(name: str) -> None:
    with raises(step_problems.MEAN_NAME, label="job.loss", got=repr(name)):
        train_job(document(rehearsal="off"), with_parts({name: lockstep.Mean(1.0, 1)}))


def test_a_part_whose_name_is_a_number() -> None:
    with raises(step_problems.MEAN_NAME, label="job.loss", got=5):
        train_job(document(rehearsal="off"), with_parts({5: lockstep.Mean(1.0, 1)}))


def test_parts_that_are_no_mapping() -> None:
    with raises(step_problems.NO_MAPPING, what="job.loss: parts is", got=re.compile("^list")):
        train_job(document(rehearsal="off"), with_parts([lockstep.Mean(1.0, 1)]))  # type: ignore[arg-type]


def test_a_part_that_no_float_can_hold() -> None:
    with raises(step_problems.TOO_LARGE, what="job.loss: total of part 'big'", got="int"):
        train_job(document(rehearsal="off"), with_parts({"big": lockstep.Mean(10**400, 1)}))


def test_a_part_that_is_a_row_of_numpy() -> None:
    with raises(step_problems.MEAN_NUMBER, label="job.loss", part="weight", name="part 'row'", got="ndarray"):
        train_job(document(rehearsal="off"), with_parts({"row": lockstep.Mean(1.0, np.ones(3))}))  # type: ignore[arg-type]


@pytest.mark.parametrize(("value", "kind"), [("0.5", "str"), (b"0.5", "bytes"), (None, "None")])
def test_a_metric_that_is_text(value: Any, kind: str) -> None:
    """Also where it reads as a number: what "1e3" or "nan" stand for is for the job to say."""

    class Spelled(Plain):
        def eval_data(self) -> Any:
            return TensorDataset(*points(8))

        def metrics(self, model: nn.Module, batch: Any) -> Any:
            return {"accuracy": lockstep.Mean(value, len(batch[1]))}

    with raises(step_problems.MEAN_NUMBER, label="job.metrics", part="total", name="'accuracy'", got=kind):
        train_job(document(rehearsal="off"), Spelled(Plain.Params()))
    with raises(step_problems.MEAN_NUMBER, label="job.loss", part="total", name="part 'one'", got=kind):
        train_job(document(rehearsal="off"), with_parts({"one": lockstep.Mean(value, 1)}))


def test_a_part_that_evaluation_alone_gives_is_looked_at_as_well() -> None:
    class Later(Plain):
        def eval_data(self) -> Any:
            return TensorDataset(*points(8))

        def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
            parts = {} if model.training else {"loss": lockstep.Mean(1.0, 1)}
            return lockstep.Loss(cross_entropy(model, *batch), 4, parts)

    with raises(problems.PART_NAME_TAKEN, label="job.loss", got="loss"):
        train_job(document(rehearsal="off"), Later(Plain.Params()))


def test_parts_of_any_other_name_are_recorded() -> None:
    names = ["loss/ce", "step", "epoch", "weight", "acc@5", "gén 精度", "a|b"]
    trained = train_job(document(), with_parts(dict.fromkeys(names, lockstep.Mean(1e300, 1))))
    assert list(trained.steps[-1].parts) == names


# --- the model --------------------------------------------------------------------------------------------


def test_model_that_is_no_module() -> None:
    with raises(problems.MODEL_KIND, got="int"):
        train_job(document(), with_model(lambda: 3))


def test_model_that_cannot_be_made() -> None:
    def model() -> nn.Module:
        raise ValueError("width\nis missing")

    with raises(
        problems.JOB_FAILED,
        where=re.compile("while its model was made"),
        kind="ValueError",
        got="width is missing",
    ):
        train_job(document(), with_model(model))


def test_model_without_a_parameter_to_train() -> None:
    with raises(integrity_problems.NOTHING_LEARNS):
        train_job(document(), with_model(lambda: nn.Linear(8, 3).requires_grad_(False)))


def test_sync_batch_norm_is_refused() -> None:
    with raises(integrity_problems.SYNC_BATCH_NORM, name="1"):
        train_job(document(), with_model(lambda: nn.Sequential(nn.Linear(8, 3), nn.SyncBatchNorm(3))))


@pytest.mark.scenario
def test_batch_norm_that_would_meet_one_sample_is_refused() -> None:
    """Before the first step, though it would happen in the epoch's last."""
    params = {"norm": "batch", "samples": 33}
    with raises(
        integrity_problems.BATCH_NORM,
        name="1",
        reason=re.compile("33 samples.*one sample"),
        remedy=re.compile("data.drop_last=true"),
    ):
        train(document(params=params, data={"drop_last": False}))
    train(document(params=params, data={"drop_last": True}))
    train(document(params={**params, "samples": 36}, data={"drop_last": False}))
    train(document(params=params, data={"drop_last": False}, length={"steps": 4}))  # never gets there


def test_parameter_that_gets_no_gradient() -> None:
    def model() -> nn.Module:
        net = nn.Linear(8, 3)
        net.spare, net.extra = nn.Linear(2, 2), nn.Parameter(torch.zeros(1))
        return net

    with raises(
        problems.NO_GRADIENT,
        got="'extra', 'spare.weight', 'spare.bias'",
        s="s",
        where=re.compile("before training"),
    ):
        train_job(document(), with_model(model))


BRANCHING = "tests.distributed.small_jobs:Branching"


def branching(**params: Any) -> Document:
    """The second head is used in the first three steps' micro-batches only."""
    return document(BRANCHING, {"first": 24, **params}, data={"shuffle": "none"})


def test_parameter_that_gets_no_gradient_later() -> None:
    with raises(
        problems.NO_GRADIENT,
        got="'second.weight', 'second.bias'",
        s="s",
        where=re.compile("^step 4, micro-batch 0, rank 0"),
    ):
        train(branching())


def test_parameter_that_gets_no_gradient_later_on_two_workers(pool: Pool) -> None:
    """DDP itself would fail a step later, in words about find_unused_parameters."""
    with raises(
        problems.NO_GRADIENT,
        got="'second.weight', 'second.bias'",
        s="s",
        where=re.compile("^step 4, micro-batch"),
    ):
        pool.run(2, train, branching())


@pytest.mark.scenario
def test_conditional_parameters_may_be_left_out(pool: Pool) -> None:
    """G1 holds for them: one value for one worker and for two, of which only one leaves them out in some steps."""
    alone = train(branching(declared=True, first=22))
    assert pool.run(2, train, branching(declared=True, first=22)) == [alone] * 2


def test_conditional_parameter_that_does_not_exist() -> None:
    class Changed(Plain):
        def conditional_parameters(self, model: nn.Module) -> list[str]:
            return ["head.weight"]

    with raises(
        step_problems.NO_SUCH_NAME, label=re.compile("^job.conditional_parameters"), got="head.weight"
    ):
        train_job(document(), Changed(Plain.Params()))


@pytest.mark.scenario
def test_gradient_that_comes_twice_in_a_backward(pool: Pool) -> None:
    """By torch's reentrant checkpoint, which DDP does not allow; as the message says, the other way trains."""
    use = "tests.distributed.small_jobs:Checkpointed"
    with raises(problems.GRADIENT_TWICE, where=re.compile("step 1, micro-batch .*rank")):
        pool.run(2, train, document(use))
    alone = train(document(use, {"reentrant": False}))
    assert pool.run(2, train, document(use, {"reentrant": False})) == [alone] * 2


def test_each_parameter_without_a_gradient_is_named() -> None:
    """A person has to see to each of them."""

    class Forgetful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.left, self.right = nn.Linear(8, 3), nn.Linear(8, 3), nn.Linear(8, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    with raises(problems.NO_GRADIENT, got="'left.weight', 'left.bias', 'right.weight'", s="s", it="them"):
        train_job(document(), with_model(Forgetful))


def test_what_still_has_its_graph_is_detached_quietly() -> None:
    """A part, its weight, or a metric: torch would warn of a file that is not the job's, and here a warning is an error."""

    class Attached(Plain):
        def eval_data(self) -> Any:
            return TensorDataset(*points(8))

        def loss(self, model: nn.Module, batch: Any) -> Loss:
            x, y = batch
            with torch.enable_grad():
                logits = model(x)
                size = Mean(logits.square().sum(), len(y) + 0 * logits.sum())
                return Loss(F.cross_entropy(logits, y, reduction="sum"), len(y), {"size": size})

        def metrics(self, model: nn.Module, batch: Any) -> dict[str, Mean]:
            with torch.enable_grad():
                return {"logits": Mean(model(batch[0]).sum(), len(batch[1]))}

    with warnings.catch_warnings(action="error"):
        trained = train_job(document(), Attached(Plain.Params()))
    assert trained.evaluations


def test_a_distributed_optimizer_is_told_that_jobs_see_no_process_group() -> None:
    class Sharding(Plain):
        def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            with warnings.catch_warnings(action="ignore"):  # its module uses torch.jit.script
                from torch.distributed.optim import ZeroRedundancyOptimizer
            return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

    with raises(problems.NO_PROCESS_GROUP, where=re.compile("^while its optimizer was made")):
        train_job(document(), Sharding(Plain.Params()))


def test_optimizer_that_leaves_a_parameter_out() -> None:
    class Changed(Plain):
        def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model[0].parameters(), lr=0.1)  # type: ignore[index]

    with raises(step_problems.NO_GROUP, label="job.optimizer", got="'1.weight' and 3 more"):
        train_job(document(), Changed(Plain.Params()))


class WithoutLossInEvaluation(Plain):
    def eval_data(self) -> Any:
        return TensorDataset(*points(8))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch) if model.training else 0.0


class MetricCalledLoss(Plain):
    def eval_data(self) -> Any:
        return TensorDataset(*points(8))

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Mean]:
        return {"loss": Mean(1.0, 1)}


class NoOptimizer(Plain):
    def optimizer(self, model: nn.Module) -> Any:
        return 0.1


class Exits(Plain):
    def train_data(self) -> Any:
        sys.exit(3)


class GivesBatches(Plain):
    def train_data(self) -> Any:
        return DataLoader(TensorDataset(*points(32)))


class ChangedInPlace(Plain):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        exponential = model(batch[0]).exp()
        exponential += 1  # backward of exp wants its result as it was
        return Loss(exponential.sum(), len(batch[0]))


@pytest.mark.parametrize(
    ("kind", "more", "problem", "facts"),
    [
        (WithoutLossInEvaluation, {}, step_problems.EVALUATION_LOSS, {"got": "float"}),
        (MetricCalledLoss, {}, step_problems.METRIC_NAME_TAKEN, {"got": "loss"}),
        (NoOptimizer, {}, step_problems.OPTIMIZER_KIND, {"label": "job.optimizer", "got": "float"}),
        (Plain, {"activation_checkpointing": True}, step_problems.NO_MODULE_RECOMPUTED, {}),
        (Exits, {}, problems.JOB_EXITED, {"where": re.compile("while its data were opened"), "got": 3}),
        (GivesBatches, {}, problems.NO_MAP_STYLE, {"name": "train_data", "got": "a DataLoader"}),
        (ChangedInPlace, {}, problems.CHANGED_IN_PLACE, {"kind": "RuntimeError"}),
    ],
)
def test_a_job_that_breaks_a_rule_of_its_methods(
    kind: type[Plain], more: Document, problem: Problem[Any], facts: dict[str, object]
) -> None:
    with raises(problem, **facts):
        train_job(document(**more), kind(Plain.Params()))


class Singular(torch.optim.SGD):
    """Its third update fails."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        group["taken"] = group.get("taken", 0) + 1
        if group["taken"] == 3:
            raise ValueError("singular\nmatrix")
        super().step(closure)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_optimizer_that_fails_in_a_later_update(precision: str) -> None:
    class Changed(Plain):
        def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            return Singular(model.parameters(), lr=0.1)

    with raises(
        problems.JOB_FAILED,
        where=re.compile("^the update of step 3.*test_mistakes.py"),
        kind="ValueError",
        got="singular matrix",
    ):
        train_job(document(precision=precision), Changed(Plain.Params()))


def test_a_scheduler_that_ends_before_the_run() -> None:
    class Changed(Plain):
        def schedule(self, optimizer: torch.optim.Optimizer, updates: int) -> Any:
            return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=2)

    with raises(
        problems.JOB_FAILED,
        where=re.compile("^the schedule after step 3"),
        kind="ValueError",
        got=re.compile("^Tried to step 3 times"),
    ):
        train_job(document(), Changed(Plain.Params()))


def test_a_scheduler_that_fails_after_an_evaluation() -> None:
    class Particular(torch.optim.lr_scheduler.ReduceLROnPlateau):
        def step(self, metrics: Any, epoch: int | None = None) -> None:  # type: ignore[override]
            raise KeyError("plateau")

    class Changed(Plain):
        def eval_data(self) -> Any:
            return TensorDataset(*points(8))

        def schedule(self, optimizer: torch.optim.Optimizer, updates: int) -> Any:
            return Particular(optimizer)

    with raises(
        problems.JOB_FAILED,
        where=re.compile("^the schedule after the evaluation of step 2"),
        kind="KeyError",
        got="'plateau'",
    ):
        train_job(document(evaluate={"every": {"steps": 2}}), Changed(Plain.Params()))


def test_parameters_in_half_with_a_loss_scaler() -> None:
    with raises(step_problems.HALF_PARAMETER, name="0.weight"):
        train_job(document(precision="fp16"), with_model(lambda: nn.Sequential(nn.Linear(8, 3)).half()))


class Queued(torch.optim.SGD):
    """Keeps in its state what no checkpoint can hold."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("norms", deque(maxlen=3)).append(
                    float(parameter.detach().norm())
                )


def test_an_optimizer_whose_state_no_checkpoint_can_hold_is_refused_before_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def taken(*_: Any, **__: Any) -> None:
        raise AssertionError("a step was taken")

    monkeypatch.setattr(Stepper, "__call__", taken)

    class Changed(Plain):
        def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            return Queued(model.parameters(), lr=0.1)

    with raises(UNSTORABLE, where="optimizer/state/0/norms", got="a collections.deque"):
        train_job(document(checkpoint={"every": None}), Changed(Plain.Params()))


# --- the data ---------------------------------------------------------------------------------------------


def test_dataset_shorter_than_a_batch() -> None:
    with raises(problems.NO_PLAN, got=re.compile("5 samples.* 8"), remedy=re.compile("data.drop_last=false")):
        train(document(params={"samples": 5}))
    assert train(document(params={"samples": 5}, data={"drop_last": False})).summary["step"] == 1


def test_dataset_without_a_sample() -> None:
    with raises(problems.NO_PLAN, got=re.compile("^0 samples "), remedy=re.compile("holds no sample")):
        train(document(params={"samples": 0}))


def test_dataset_that_cannot_be_opened() -> None:
    class Changed(Plain):
        def train_data(self) -> Any:
            raise FileNotFoundError(2, "No such file", "digits.npz")

    with raises(
        problems.JOB_FAILED,
        where=re.compile("while its data were opened"),
        kind="FileNotFoundError",
        got=re.compile("digits.npz"),
    ):
        train_job(document(), Changed(Plain.Params()))


def test_evaluation_data_without_a_sample() -> None:
    class Changed(Plain):
        def eval_data(self) -> Any:
            return TensorDataset(*points(0))

    with raises(problems.NO_SAMPLE, field="eval_data"):
        train_job(document(), Changed(Plain.Params()))


def test_early_stop_without_evaluation_data() -> None:
    with raises(problems.NO_EVAL_DATA, field=re.compile("^early_stop")):
        train(document(early_stop={"metric": "eval/loss"}))


class Evaluated(Plain):
    def eval_data(self) -> Any:
        return TensorDataset(*points(6))


def test_early_stop_on_a_metric_that_does_not_exist() -> None:
    with raises(
        problems.NO_METRIC,
        field="early_stop.metric",
        got="eval/losss",
        hint=re.compile("did you mean 'eval/loss'"),
    ):
        train_job(document(early_stop={"metric": "eval/losss"}), Evaluated(Plain.Params()))


def test_exception_in_evaluation_is_told_with_its_place() -> None:
    class Changed(Evaluated):
        def metrics(self, model: nn.Module, batch: Any) -> dict[str, lockstep.Mean]:
            raise ZeroDivisionError("division by zero")

    with raises(
        problems.JOB_FAILED,
        where=re.compile("evaluation micro-batch 0, rank 0"),
        kind="ZeroDivisionError",
    ):
        train_job(document(), Changed(Plain.Params()))


@pytest.mark.parametrize("data", ["train_data", "eval_data"])
def test_data_that_draw_though_they_promise_not_to(data: str) -> None:
    class Drawing(TensorDataset):
        draws_nothing = True

        def __getitem__(self, index: int) -> Any:
            x, y = super().__getitem__(index)
            return x + torch.randn(()), y

    with raises(data_problems.DRAWS, dataset="Drawing", samples=re.compile("^samples ")):
        changed = type("Changed", (Evaluated,), {data: lambda self: Drawing(*points(32))})
        train_job(document(), changed(Plain.Params()))


@pytest.mark.parametrize("processes", [0, 2])
def test_exception_in_the_data_is_told_with_the_sample(processes: int) -> None:
    """From loader processes as well: no traceback of a worker process in the text."""

    class Changed(Plain):
        def train_data(self) -> Any:
            return Torn()

    with raises(
        data_problems.FETCH_FAILED,
        what="sample 13",
        where=re.compile("^step 2, micro-batch 1"),
        kind="ValueError",
        got="torn file",
    ):
        train_job(document(data={"shuffle": "none", "loader_processes": processes}), Changed(Plain.Params()))


@pytest.mark.parametrize("whose", ["step ", "evaluation micro-batch 1"])
def test_a_collation_that_returns_none(whose: str) -> None:
    """As in a torch loop that goes on with the next batch: the samples would be gone, unseen."""

    class Skipping(Evaluated):
        def collate(self, samples: Any) -> Any:
            gone = len(samples) == 2 if whose.startswith("eval") else len(samples) == 4
            return None if gone else super().collate(samples)

    with raises(data_problems.NO_BATCH, samples=re.compile("^samples "), where=re.compile(f"^{whose}")):
        train_job(document(), Skipping(Plain.Params()))


class Torn(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        if index == 13:
            raise ValueError("torn file")
        return torch.ones(8), 0


# --- the machine ------------------------------------------------------------------------------------------


def test_operator_without_a_deterministic_kernel_is_named() -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> lockstep.Loss:
        torch.zeros(4).put_(torch.tensor([1, 1]), torch.tensor([2.0, 3.0]))
        return lockstep.Loss(cross_entropy(model, x, y), 4)

    with raises(
        problems.NO_DETERMINISTIC_KERNEL, got=re.compile("put_"), where=re.compile("before training")
    ):
        train_job(document(), with_loss(loss))
    train_job(document(determinism="fast", length={"steps": 1}), with_loss(loss))


def test_mixed_machines_are_refused(pool: Pool) -> None:
    with raises(
        problems.IDENTITIES_DIFFER,
        name="numerics_probe",
        wanted=re.compile(f"^'{0:016x}'"),
        rank=1,
        got=re.compile(f"^'{1:016x}'"),
        remedy=re.compile("machines of one kind"),
    ):
        pool.run(2, train_mixed_numerics, document())


def test_mixed_machines_may_train_fast(pool: Pool) -> None:
    assert pool.run(2, train_mixed_numerics, document(determinism="fast"))[0].summary["step"] == 8


def test_model_from_an_unseeded_source_is_refused(pool: Pool) -> None:
    with raises(
        problems.IDENTITIES_DIFFER,
        name="initial_weights_digest",
        rank=1,
        remedy=re.compile("seeded generators"),
    ):
        pool.run(2, train, document("tests.distributed.small_jobs:Unseeded"))


def test_an_optimizer_in_another_order_on_another_worker_is_refused(pool: Pool, tmp_path: Path) -> None:
    use = "tests.distributed.small_jobs:BackwardsOnOne"
    with raises(
        step_problems.PARAMETER_ORDER,
        where="parameter 0 of group 0",
        here=re.compile("^on rank [01]$"),
        there=re.compile("^on rank [01]$"),
    ):
        pool.run(2, train, document(use, {"claim": str(tmp_path / "claim")}))


def test_a_fork_of_a_run_without_a_checkpoint(tmp_path: Path) -> None:
    storage = {"storage": str(tmp_path), "every": None}
    RunFolder.create(open_storage(str(tmp_path)), "b" * 32)
    with raises(problems.FORK_EMPTY, run="b" * 32):
        train(document(checkpoint=storage, fork={"run": "b" * 32, "storage": str(tmp_path)}))


def test_an_average_beside_weights_of_the_optimizers_own() -> None:
    with raises(problems.EMA_BESIDE, got="0.9", name="ScheduleFreeSGD"):
        train(document_of_kind(ScheduleFree, ema=0.9))


def test_no_sample_is_left_to_rehearse_on() -> None:
    run = document(length={"steps": 1}, data={"shuffle": "none", "without": "0-7"})
    with raises(integrity_problems.NO_SAMPLE_TO_REHEARSE):
        train(run)
    train({**run, "data": {"shuffle": "none", "without": "0-5,7"}})


def train_without_time(document: Document) -> None:
    """What is found out about a model in another process takes longer than it may."""
    with mock.patch.object(StepRehearsal, "_limit_s", lambda self: 0.0):
        train(document)


def test_units_that_no_process_finds_out(pool: Pool) -> None:
    with raises(integrity_problems.UNITS_UNKNOWN):
        pool.run(2, train_without_time, document(sharding="full", rehearsal="off"))


def test_what_one_worker_refuses_all_tell(pool: Pool, tmp_path: Path) -> None:
    """Instead of a lost connection, which rank is asked first does not matter."""
    use = "tests.distributed.small_jobs:FailsOnOne"
    told_by = pool.run(2, refusal, document(use, {"claim": str(tmp_path / "claim")}))
    assert told_by[0] == told_by[1]
    assert told_by[0].startswith("JobError: the job failed (first micro-batch, before training")
    assert told_by[0].endswith("ValueError: only here")


def refusal(document: Document) -> str:
    with pytest.raises(LockstepError) as info:
        train(document)
    return f"{type(info.value).__name__}: {info.value}"


SCRIPT = """
import torch
from lockstep.training.determinism import determinism
with determinism("fast", 1):
    print("fast")
with determinism("strict", 1):
    print("strict")
"""


@pytest.mark.parametrize(
    ("seed", "printed"),
    [
        pytest.param(None, "fast\n", marks=pytest.mark.scenario),
        pytest.param("7", "fast\nstrict\n", marks=pytest.mark.exact),
    ],
)
def test_random_string_hashing_is_refused_under_strict(seed: str | None, printed: str) -> None:
    """A fast run before it in the same process does not hide it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2] / "platform")
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == printed
    last = done.stderr.strip().splitlines()[-1:]
    if printed == "fast\n":
        assert last[0].startswith("lockstep.errors.DeterminismError: determinism strict")
        assert "PYTHONHASHSEED=0" in last[0]
    else:
        assert not last
