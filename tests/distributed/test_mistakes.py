"""G7: what a user can get wrong in training is told in one line: what happened, where, and what to do."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep import Loss, Mean
from lockstep.errors import (
    DeterminismError,
    DriftError,
    JobError,
    LockstepError,
    NumericsError,
    SpecError,
    TransientStorageError,
)
from lockstep.training.step.optimizer_step import Stepper
from tests.distributed.pool import Pool
from tests.distributed.small_jobs import Plain, points
from tests.distributed.training import Document, train, train_job, train_mixed_numerics

USE = "tests.distributed.small_jobs:Plain"


def document(use: str = USE, params: dict[str, Any] | None = None, **more: Any) -> Document:
    """Eight steps of two micro-batches."""
    return {"job": {"use": use, "params": params or {}}, "batch": {"global": 8, "micro": 4}, **more}


@contextmanager
def told(kind: type[LockstepError], *words: str) -> Iterator[None]:
    """The block fails with exactly this kind of error, in one line that holds these words."""
    with pytest.raises(kind) as info:
        yield
    text = str(info.value)
    assert type(info.value) is kind
    assert "\n" not in text and text.strip()
    assert [word for word in words if word not in text] == [], text


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
    ("data", "kind", "words"),
    [
        (Points(Fails(ValueError("no index\nfile"))), JobError, ("__len__ of Points, train_data", "ValueError: no index file")),
        (Points(lambda: 3.5), JobError, ("__len__ of Points, train_data", "'float' object")),
        (Points(own=Fails(FileNotFoundError(2, "none", "list.json"))), JobError, ("in fingerprint of train_data", "list.json")),
        (Points(own=lambda full: {}), JobError, ("in fingerprint of train_data", "TypeError")),
        (Points(own=Fails(TimeoutError(110, "timed out"))), TransientStorageError, ("in fingerprint of train_data",)),
    ],
)  # fmt: skip
def test_data_whose_own_methods_fail(data: Any, kind: type[LockstepError], words: tuple[str, ...]) -> None:
    with told(kind, *words):
        train_job(document(), with_data(data))


def test_an_order_that_is_drawn_anew_in_every_process() -> None:
    """A resume would visit other samples."""

    class Ordered(Points):
        def epoch_order(self, seed: int, epoch: int, shuffle: str) -> Any:
            return np.random.default_rng().permutation(64)

    with told(JobError, "epoch_order of Ordered gives other ids", "epoch 0 again"):
        train_job(document(), with_data(Ordered()))


# --- the loss ---------------------------------------------------------------------------------------------


def test_loss_that_is_nan_at_once() -> None:
    job = with_loss(lambda model, x, y: lockstep.Loss(cross_entropy(model, x, y) * float("nan"), 4))
    with told(NumericsError, "nan", "very first micro-batch", "labels"):
        train_job(document(), job)


def test_loss_that_is_nan_later() -> None:
    """It names step and micro-batch, counted from 1 and from 0 as everywhere."""
    seen = iter(range(100))  # 0 is the rehearsal

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> lockstep.Loss:
        return lockstep.Loss(cross_entropy(model, x, y) * (float("nan") if next(seen) == 6 else 1), 4)

    with told(NumericsError, "step 3", "micro-batch 1", "nan", "optimizer.lr", "0.001"):
        train_job(document(rehearsal="off"), with_loss(loss))


def test_loss_that_is_not_finite_on_another_worker(pool: Pool) -> None:
    """Sample 19 alone overflows: it is in step 3, and in micro-batch 3 of the second worker."""
    params = {"bombs": [19, 20], "force": 1e38 * 3.4}
    use = "tests.distributed.small_jobs:Overflowing"
    with told(NumericsError, "step 3", "micro-batch 3", "inf"):
        pool.run(
            2, train, {**document(use, params, data={"shuffle": "none"}), "batch": {"global": 8, "micro": 2}}
        )


def test_gradient_that_is_not_finite_though_the_loss_is() -> None:
    job = with_loss(lambda model, x, y: lockstep.Loss((model(x) * 0).abs().sqrt().sum(), 4))
    with told(NumericsError, "gradient of step 1", "nan", "square root"):
        train_job(document(), job)


def test_loss_that_has_no_gradient() -> None:
    job = with_loss(lambda model, x, y: lockstep.Loss(cross_entropy(model, x, y).detach(), 4))
    with told(JobError, "job.loss", "no gradient", "detach"):
        train_job(document(), job)


def test_loss_that_is_no_scalar() -> None:
    job = with_loss(lambda model, x, y: lockstep.Loss(F.cross_entropy(model(x), y, reduction="none"), 4))
    with told(JobError, "job.loss", "shape (4,)", "no dimension"):
        train_job(document(), job)


def test_loss_that_is_no_tensor() -> None:
    with told(JobError, "job.loss", "total is float", "tensor"):
        train_job(document(), with_loss(lambda model, x, y: lockstep.Loss(1.0, 4)))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [None, torch.ones(())])
def test_loss_that_is_no_loss(value: Any) -> None:
    with told(JobError, "job.loss", f"returned {type(value).__name__}", "lockstep.Loss(total, weight)"):
        train_job(document(), with_loss(lambda model, x, y: value))


def test_part_that_is_no_mean() -> None:
    job = with_loss(lambda model, x, y: lockstep.Loss(cross_entropy(model, x, y), 4, {"accuracy": 0.5}))  # type: ignore[dict-item]
    with told(JobError, "job.loss", "part 'accuracy' is float", "lockstep.Mean"):
        train_job(document(), job)


@pytest.mark.parametrize("weight", [-1.0, float("nan")])
def test_weight_that_is_no_count(weight: float) -> None:
    with told(JobError, "job.loss", f"weight is {weight}", "at least 0"):
        train_job(
            document(), with_loss(lambda model, x, y: lockstep.Loss(cross_entropy(model, x, y), weight))
        )


def test_weights_that_add_up_to_nothing() -> None:
    with told(JobError, "job.loss", "step 1", "0.0", "more than 0"):
        train_job(document(), with_loss(lambda model, x, y: lockstep.Loss(cross_entropy(model, x, y), 0.0)))


def test_label_out_of_range() -> None:
    job = with_loss(lambda model, x, y: lockstep.Loss(cross_entropy(model, x, y + 1), 4))
    with told(JobError, "job.loss", "label", "3 is out of bounds", "classes - 1"):
        train_job(document(), job)


def test_exception_in_the_loss_is_told_with_its_place() -> None:
    seen = iter(range(100))

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> lockstep.Loss:
        if next(seen) == 4:
            raise KeyError("vocabulary\nof two lines")
        return lockstep.Loss(cross_entropy(model, x, y), 4)

    with told(JobError, "step 2, micro-batch 1, rank 0", "KeyError", "vocabulary"):
        train_job(document(rehearsal="off"), with_loss(loss))


def later(change: Callable[[lockstep.Loss], Any]) -> Plain:
    """A job whose loss is changed from the second step on."""
    seen = iter(range(100))  # 0 is the rehearsal, 1 and 2 the first step

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        found = lockstep.Loss(cross_entropy(model, x, y), 4, {"early": lockstep.Mean(1.0, 1)})
        return change(found) if next(seen) > 2 else found

    return with_loss(loss)


EARLY, LATE = ({name: lockstep.Mean(1.0, 1)} for name in ("early", "late"))


@pytest.mark.parametrize("parts", [LATE, {}, EARLY | LATE], ids=["another", "none", "one more"])
def test_parts_that_change_from_one_micro_batch_to_the_next(parts: dict[str, Any]) -> None:
    with told(
        JobError, "job.loss: parts are", "(step 2, micro-batch 0, rank 0)", "wanted 'early' as in the first"
    ):
        train_job(document(rehearsal="off"), later(lambda loss: replace(loss, parts=parts)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda loss: None, ("returned NoneType", "wanted lockstep.Loss(total, weight)")),
        (lambda loss: loss.total, ("returned Tensor", "wanted lockstep.Loss(total, weight)")),
        (lambda loss: replace(loss, total=3.0), ("total is float", "the sum of the losses")),
        (lambda loss: replace(loss, total=loss.total.view(1)), ("total is a tensor of shape (1,)",)),
        (lambda loss: replace(loss, parts=[]), ("parts is list", "a dict of lockstep.Mean")),
    ],
)
def test_a_later_loss_that_is_none(change: Callable[[lockstep.Loss], Any], words: tuple[str, ...]) -> None:
    """What the rehearsal looks at is looked at in each micro-batch."""
    with told(JobError, "job.loss: ", "(step 2, micro-batch 0, rank 0)", *words):
        train_job(document(rehearsal="off"), later(change))


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_later_weight_that_is_no_count(weight: float) -> None:
    """Though the weights of the step add up to more than 0."""
    seen = iter(range(100))

    def changed(loss: lockstep.Loss) -> lockstep.Loss:
        return replace(loss, weight=torch.tensor(weight)) if next(seen) == 1 else loss

    with told(
        JobError,
        f"job.loss: the weight of step 2, micro-batch 1 is {weight}, wanted a number of samples",
        "at least 0",
    ):
        train_job(document(rehearsal="off"), later(changed))


def test_a_part_that_is_a_vector() -> None:
    with told(JobError, "job.loss", "total of part 'each' is a tensor of shape (3,)", "wanted one number"):
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
    with told(JobError, "job.loss", f"{name!r} is no name for a part", f"train/{name}", "another name"):
        train_job(document(rehearsal="off"), with_parts({name: lockstep.Mean(1.0, 1)}))


@pytest.mark.parametrize("name", ["", "a\nb", "\ud800", "a\x00"])
def test_a_part_whose_name_cannot_be_shown_in_a_line(name: str) -> None:
    with told(JobError, "job.loss", f"got {name!r} as a name", "text that one line can show"):
        train_job(document(rehearsal="off"), with_parts({name: lockstep.Mean(1.0, 1)}))


def test_a_part_whose_name_is_a_number() -> None:
    with told(JobError, "job.loss", "got 5 as a name", "wanted text"):
        train_job(document(rehearsal="off"), with_parts({5: lockstep.Mean(1.0, 1)}))


def test_parts_that_are_no_mapping() -> None:
    with told(JobError, "job.loss", "parts is list", "wanted a dict of lockstep.Mean"):
        train_job(document(rehearsal="off"), with_parts([lockstep.Mean(1.0, 1)]))  # type: ignore[arg-type]


def test_a_part_that_no_float_can_hold() -> None:
    with told(
        JobError,
        "job.loss",
        "total of part 'big' is int beyond 1.8e308",
        "wanted a number that a float64 can hold",
    ):
        train_job(document(rehearsal="off"), with_parts({"big": lockstep.Mean(10**400, 1)}))


def test_a_part_that_is_a_row_of_numpy() -> None:
    with told(JobError, "job.loss", "weight of part 'row' is ndarray", "wanted one number"):
        train_job(document(rehearsal="off"), with_parts({"row": lockstep.Mean(1.0, np.ones(3))}))  # type: ignore[arg-type]


@pytest.mark.parametrize(("value", "kind"), [("0.5", "str"), (b"0.5", "bytes"), (None, "None")])
def test_a_metric_that_is_text(value: Any, kind: str) -> None:
    """Also where it reads as a number: what "1e3" or "nan" stand for is for the job to say."""

    class Spelled(Plain):
        def eval_data(self) -> Any:
            return TensorDataset(*points(8))

        def metrics(self, model: nn.Module, batch: Any) -> Any:
            return {"accuracy": lockstep.Mean(value, len(batch[1]))}

    with told(JobError, "job.metrics", f"total of 'accuracy' is {kind}", "wanted one number"):
        train_job(document(rehearsal="off"), Spelled(Plain.Params()))
    with told(JobError, "job.loss", f"total of part 'one' is {kind}", "wanted one number"):
        train_job(document(rehearsal="off"), with_parts({"one": lockstep.Mean(value, 1)}))


def test_a_part_that_evaluation_alone_gives_is_looked_at_as_well() -> None:
    class Later(Plain):
        def eval_data(self) -> Any:
            return TensorDataset(*points(8))

        def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
            parts = {} if model.training else {"loss": lockstep.Mean(1.0, 1)}
            return lockstep.Loss(cross_entropy(model, *batch), 4, parts)

    with told(JobError, "job.loss", "'loss' is no name for a part"):
        train_job(document(rehearsal="off"), Later(Plain.Params()))


def test_parts_of_any_other_name_are_recorded() -> None:
    names = ["loss/ce", "step", "epoch", "weight", "acc@5", "gén 精度", "a|b"]
    trained = train_job(document(), with_parts(dict.fromkeys(names, lockstep.Mean(1e300, 1))))
    assert list(trained.steps[-1].parts) == names


# --- the model --------------------------------------------------------------------------------------------


def test_model_that_is_no_module() -> None:
    with told(JobError, "job.model", "returned int", "torch.nn.Module"):
        train_job(document(), with_model(lambda: 3))


def test_model_that_cannot_be_made() -> None:
    def model() -> nn.Module:
        raise ValueError("width\nis missing")

    with told(JobError, "while its model was made", "ValueError: width is missing"):
        train_job(document(), with_model(model))


def test_model_without_a_parameter_to_train() -> None:
    with told(JobError, "job.model", "no parameter asks for a gradient"):
        train_job(document(), with_model(lambda: nn.Linear(8, 3).requires_grad_(False)))


def test_sync_batch_norm_is_refused() -> None:
    with told(JobError, "job.model", "'1' is a SyncBatchNorm", "BatchNorm", "GroupNorm"):
        train_job(document(), with_model(lambda: nn.Sequential(nn.Linear(8, 3), nn.SyncBatchNorm(3))))


@pytest.mark.scenario
def test_batch_norm_that_would_meet_one_sample_is_refused() -> None:
    """Before the first step, though it would happen in the epoch's last."""
    params = {"norm": "batch", "samples": 33}
    with told(JobError, "'1' is a BatchNorm", "33 samples", "one sample", "data.drop_last=true"):
        train(document(params=params, data={"drop_last": False}))
    train(document(params=params, data={"drop_last": True}))
    train(document(params={**params, "samples": 36}, data={"drop_last": False}))
    train(document(params=params, data={"drop_last": False}, length={"steps": 4}))  # never gets there


def test_parameter_that_gets_no_gradient() -> None:
    def model() -> nn.Module:
        net = nn.Linear(8, 3)
        net.spare, net.extra = nn.Linear(2, 2), nn.Parameter(torch.zeros(1))
        return net

    with told(
        JobError,
        "parameters 'extra', 'spare.weight', 'spare.bias' got no gradient",
        "before training",
        "requires_grad",
        "conditional_parameters",
    ):
        train_job(document(), with_model(model))


BRANCHING = "tests.distributed.small_jobs:Branching"


def branching(**params: Any) -> Document:
    """The second head is used in the first three steps' micro-batches only."""
    return document(BRANCHING, {"first": 24, **params}, data={"shuffle": "none"})


def test_parameter_that_gets_no_gradient_later() -> None:
    with told(
        JobError,
        "parameters 'second.weight', 'second.bias' got no gradient",
        "step 4, micro-batch 0, rank 0",
        "conditional_parameters",
    ):
        train(branching())


def test_parameter_that_gets_no_gradient_later_on_two_workers(pool: Pool) -> None:
    """DDP itself would fail a step later, in words about find_unused_parameters."""
    with told(
        JobError,
        "parameters 'second.weight', 'second.bias' got no gradient",
        "step 4, micro-batch",
        "conditional_parameters",
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

    with told(JobError, "job.conditional_parameters", "'head.weight'"):
        train_job(document(), Changed(Plain.Params()))


@pytest.mark.scenario
def test_gradient_that_comes_twice_in_a_backward(pool: Pool) -> None:
    """By torch's reentrant checkpoint, which DDP does not allow; as the message says, the other way trains."""
    use = "tests.distributed.small_jobs:Checkpointed"
    with told(JobError, "gradient came twice", "step 1, micro-batch", "rank", "use_reentrant=False"):
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

    with told(
        JobError,
        "parameters 'left.weight', 'left.bias', 'right.weight' got no gradient",
        "use them in the loss, set requires_grad to False, or name them in conditional_parameters",
    ):
        train_job(document(), with_model(Forgetful))


def test_what_still_has_its_graph_is_detached_quietly() -> None:
    """A part, a weight or a metric: torch would warn of a file that is not the job's, and here a warning is an error."""

    class Attached(Plain):
        def eval_data(self) -> Any:
            return TensorDataset(*points(8))

        def loss(self, model: nn.Module, batch: Any) -> Loss:
            x, y = batch
            with torch.enable_grad():
                logits = model(x)
                weight = len(y) + 0 * logits.sum()
                size = Mean(logits.square().sum(), weight)
                return Loss(F.cross_entropy(logits, y, reduction="sum"), weight, {"size": size})

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

    with told(
        JobError,
        "the job asked for torch's process group (while its optimizer was made",
        "jobs see none",
        "sharding=optimizer",
    ):
        train_job(document(), Sharding(Plain.Params()))


def test_optimizer_that_leaves_a_parameter_out() -> None:
    class Changed(Plain):
        def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model[0].parameters(), lr=0.1)  # type: ignore[index]

    with told(JobError, "job.optimizer", "'1.weight' and 3 more", "in no group"):
        train_job(document(), Changed(Plain.Params()))


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

    with told(
        JobError, "the job failed (the update of step 3", "test_mistakes.py", "ValueError: singular matrix"
    ):
        train_job(document(precision=precision), Changed(Plain.Params()))


def test_a_scheduler_that_ends_before_the_run() -> None:
    class Changed(Plain):
        def schedule(self, optimizer: torch.optim.Optimizer, updates: int) -> Any:
            return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=2)

    with told(JobError, "the job failed (the schedule after step 3", "ValueError: Tried to step 3 times"):
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

    with told(JobError, "the job failed (the schedule after the evaluation of step 2", "KeyError: 'plateau'"):
        train_job(document(evaluate={"every": {"steps": 2}}), Changed(Plain.Params()))


def test_parameters_in_half_with_a_loss_scaler() -> None:
    with told(
        JobError,
        "job.model: parameter '0.weight' is torch.float16, which precision fp16",
        "hold it in float32",
    ):
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

    with told(JobError, "optimizer/state/0/norms is a collections.deque", "which a checkpoint cannot hold"):
        train_job(document(checkpoint={"every": None}), Changed(Plain.Params()))


# --- the data ---------------------------------------------------------------------------------------------


def test_dataset_shorter_than_a_batch() -> None:
    with told(SpecError, "batch.global", "5 samples", "8", "data.drop_last=false"):
        train(document(params={"samples": 5}))
    assert train(document(params={"samples": 5}, data={"drop_last": False})).summary["step"] == 1


def test_dataset_without_a_sample() -> None:
    with told(SpecError, "batch.global", "holds no sample"):
        train(document(params={"samples": 0}))


def test_dataset_that_cannot_be_opened() -> None:
    class Changed(Plain):
        def train_data(self) -> Any:
            raise FileNotFoundError(2, "No such file", "digits.npz")

    with told(JobError, "while its data were opened", "FileNotFoundError", "digits.npz"):
        train_job(document(), Changed(Plain.Params()))


def test_evaluation_data_without_a_sample() -> None:
    class Changed(Plain):
        def eval_data(self) -> Any:
            return TensorDataset(*points(0))

    with told(JobError, "eval_data", "no sample", "None"):
        train_job(document(), Changed(Plain.Params()))


def test_early_stop_without_evaluation_data() -> None:
    with told(SpecError, "early_stop", "eval_data"):
        train(document(early_stop={"metric": "eval/loss"}))


class Evaluated(Plain):
    def eval_data(self) -> Any:
        return TensorDataset(*points(6))


def test_early_stop_on_a_metric_that_does_not_exist() -> None:
    with told(SpecError, "early_stop.metric", "'eval/losss'", "did you mean 'eval/loss'"):
        train_job(document(early_stop={"metric": "eval/losss"}), Evaluated(Plain.Params()))


def test_exception_in_evaluation_is_told_with_its_place() -> None:
    class Changed(Evaluated):
        def metrics(self, model: nn.Module, batch: Any) -> dict[str, lockstep.Mean]:
            raise ZeroDivisionError("division by zero")

    with told(JobError, "evaluation micro-batch 0, rank 0", "ZeroDivisionError"):
        train_job(document(), Changed(Plain.Params()))


@pytest.mark.parametrize("data", ["train_data", "eval_data"])
def test_data_that_draw_though_they_promise_not_to(data: str) -> None:
    class Drawing(TensorDataset):
        draws_nothing = True

        def __getitem__(self, index: int) -> Any:
            x, y = super().__getitem__(index)
            return x + torch.randn(()), y

    with told(JobError, "data: Drawing says draws_nothing = True", "samples ", "draw in collate"):
        changed = type("Changed", (Evaluated,), {data: lambda self: Drawing(*points(32))})
        train_job(document(), changed(Plain.Params()))


@pytest.mark.parametrize("processes", [0, 2])
def test_exception_in_the_data_is_told_with_the_sample(processes: int) -> None:
    """From loader processes as well: no traceback of a worker process in the text."""

    class Changed(Plain):
        def train_data(self) -> Any:
            return Torn()

    with told(JobError, "data: sample 13 failed", "step 2, micro-batch 1", "ValueError: torn file"):
        train_job(document(data={"shuffle": "none", "loader_processes": processes}), Changed(Plain.Params()))


@pytest.mark.parametrize("whose", ["step ", "evaluation micro-batch 1"])
def test_a_collation_that_returns_none(whose: str) -> None:
    """As in a torch loop that goes on with the next batch: the samples would be gone, unseen."""

    class Skipping(Evaluated):
        def collate(self, samples: Any) -> Any:
            gone = len(samples) == 2 if whose.startswith("eval") else len(samples) == 4
            return None if gone else super().collate(samples)

    with told(JobError, "job.collate returned None for samples ", f"({whose}", "wanted a batch"):
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

    with told(DeterminismError, "determinism strict", "put_", "before training", "determinism=fast"):
        train_job(document(), with_loss(loss))
    train_job(document(determinism="fast", length={"steps": 1}), with_loss(loss))


def test_mixed_machines_are_refused(pool: Pool) -> None:
    with told(
        DriftError,
        "numerics_probe",
        f"rank 0 has '{0:016x}'",
        f"rank 1 has '{1:016x}'",
        "machines of one kind",
    ):
        pool.run(2, train_mixed_numerics, document())


def test_mixed_machines_may_train_fast(pool: Pool) -> None:
    assert pool.run(2, train_mixed_numerics, document(determinism="fast"))[0].summary["step"] == 8


def test_model_from_an_unseeded_source_is_refused(pool: Pool) -> None:
    with told(DriftError, "initial_weights_digest", "rank 1", "seeded generators"):
        pool.run(2, train, document("tests.distributed.small_jobs:Unseeded"))


def test_an_optimizer_in_another_order_on_another_worker_is_refused(pool: Pool, tmp_path: Path) -> None:
    use = "tests.distributed.small_jobs:BackwardsOnOne"
    with told(JobError, "job.optimizer: parameter 0 of group 0 is", "on rank 0", "on rank 1", "in a list"):
        pool.run(2, train, document(use, {"claim": str(tmp_path / "claim")}))


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
