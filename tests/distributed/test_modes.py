"""Modes, sizes and settings that are a job's own, optimizers with modes, and parameters that a step leaves unused: what a loop by hand computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lockstep import Loss, Mean
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.checks.check import check
from lockstep.job.interface import overrides
from lockstep.randomness import model_key, seed_all, step_key
from lockstep.spec.loading import load_spec
from lockstep.training.determinism import determinism
from lockstep.training.integrity.state_digest import weights_digest
from lockstep.training.module_modes import ModuleSettings
from lockstep.training.step.phase_step import PhaseStep
from tests.distributed import mode_kinds as kinds
from tests.distributed.kinds import RUN, Kind, document, taken_up, train_attempts, train_every
from tests.distributed.pool import Pool
from tests.distributed.training import train, train_attempt

SAMPLES = 8
"""Of a step: a power of two, so that a mean of losses has the gradient of their scaled sum, bit for bit."""


def whole(kind: type[Kind], **more: Any) -> dict[str, Any]:
    """Steps of one micro-batch each, in the order of the data."""
    data = {"shuffle": "none", "drop_last": True}
    return document(
        kind, **{"batch": {"global": SAMPLES, "micro": SAMPLES}, "data": data, "clip_norm": None, **more}
    )


def by_hand(
    kind: type[Kind], prepare: Callable[[nn.Module], object], *, micro: int = SAMPLES
) -> tuple[list[str], nn.Module, torch.optim.Optimizer]:
    """A loop as torch's tutorials write it: the digests after each step, the model, and its optimizer.

    `prepare` puts the model into the modes in which it trains. The gradients of micro-batches are added in pairs; None stays None.
    """
    job = kind(None)
    given = load_spec(document(kind)).optimizer
    with determinism("strict", threads=1):
        seed_all(model_key(0))
        model = job.model()
        prepare(model)
        own = job.optimizer(model)
        learning = [p for p in model.parameters() if p.requires_grad]
        optimizer = own or torch.optim.AdamW(learning, lr=given.lr, weight_decay=given.weight_decay)
        if isinstance(optimizer, kinds.ScheduleFreeSGD):
            optimizer.train()
        data, digests = job.train_data(), []
        for step in range(len(data) // SAMPLES):  # type: ignore[arg-type]
            first, parts = step * SAMPLES, []
            for m in range(SAMPLES // micro):
                ids = range(first + m, first + SAMPLES, SAMPLES // micro)
                seed_all(step_key(0, step, m))
                optimizer.zero_grad()
                loss = job.loss(model, job.collate([data[i] for i in ids]))
                (loss.total / SAMPLES).backward()  # type: ignore[no-untyped-call]
                parts.append([p.grad for p in learning])
            for parameter, gradients in zip(learning, zip(*parts, strict=True), strict=True):
                parameter.grad = added(gradients, parameter)
            optimizer.step()
            if overrides(job, "after_step"):
                with torch.no_grad():
                    job.after_step(model, step + 1)
            digests.append(weights_digest(model.state_dict()))
    return digests, model, optimizer


def added(gradients: tuple[Tensor | None, ...], parameter: Tensor) -> Tensor | None:
    """The sum of a power of two of gradients, in pairs; None where all are."""
    if all(one is None for one in gradients):
        return None
    row = [torch.zeros_like(parameter) if one is None else one for one in gradients]
    while len(row) > 1:
        row = [left + right for left, right in zip(row[0::2], row[1::2], strict=True)]
    return row[0]


def resting(model: nn.Module) -> None:
    model.train()
    model.teacher.eval()


TEACHERS = [kinds.TeacherAtRest, kinds.TeacherAtRestByTrain, kinds.TeacherAtRestByLoss]


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", TEACHERS)
def test_a_teacher_at_rest_trains_its_student_as_a_loop_by_hand_does(kind: type[Kind]) -> None:
    """Whoever puts it into evaluation mode: job.model, a train() of the model's own, or the loss."""
    trained = train(whole(kind))
    assert trained.digests == tuple(by_hand(kind, resting)[0])
    assert dict(trained.rows[-1])["parts"] == (("teacher_trains", (0.0).hex()),)
    assert trained.warnings == ()


def test_a_teacher_that_trains_is_another_run() -> None:
    """The negative control: what a loop that calls train() on all of the model computes."""
    assert train(whole(kinds.TeacherAtRest)).digests != tuple(
        by_hand(kinds.TeacherAtRest, nn.Module.train)[0]
    )


@pytest.mark.thinned(2)
@pytest.mark.every(3)
@pytest.mark.parametrize("kind", TEACHERS)
def test_the_checks_of_a_teacher_at_rest_find_nothing(kind: type[Kind], tmp_path: Path) -> None:
    report = check(load_spec(document(kind, checkpoint={"storage": str(tmp_path)}, record={"uri": "off"})))
    assert report.passed
    assert [one.result for one in report.checks if one.name == "modes"] == ["pass"]


LOOPED = [kinds.FreezesItsNormLater, kinds.CoolsAnAttribute, kinds.SizedByItsForward, kinds.QuantisationAware]


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", LOOPED)
def test_what_changes_in_a_module_is_what_a_loop_by_hand_has(kind: type[Kind]) -> None:
    """A mode and an attribute that after_step sets; a buffer that its first forward sizes; observers and statistics that rest later."""
    assert train(whole(kind)).digests == tuple(by_hand(kind, nn.Module.train)[0])


@pytest.mark.scenario
@pytest.mark.thinned(3)
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("stopped", [1, 2])
def test_a_resume_goes_on_with_the_modes_sizes_and_settings_of_the_run(
    pool: Pool, tmp_path: Path, stopped: int, part: int
) -> None:
    """On another number of workers, whenever it was stopped."""
    fourth = kinds.HELD[part::4]
    runs = [
        document(kind, checkpoint={"storage": str(tmp_path / kind.__name__), "every": None})
        for kind in fourth
    ]
    alone = train_every([document(kind) for kind in fourth])
    begun = pool.run(2, train_attempts, [(run, AttemptOrigin()) for run in runs], stopped)
    ended = train_attempts([(run, taken_up(run)) for run in runs], None)
    for i, kind in enumerate(fourth):
        digests = alone[i][1]
        assert begun[0][i][1] == begun[1][i][1] == digests[:stopped], kind
        assert ended[i][1] == digests[stopped:], kind


def test_settings_that_no_checkpoint_keeps_are_lost(tmp_path: Path) -> None:
    """The negative control of the test above."""
    run = document(
        kinds.CoolsAnAttribute, checkpoint={"storage": str(tmp_path), "every": None}, rehearsal="off"
    )
    with mock.patch.object(ModuleSettings, "load", lambda self, changed: None):
        train_attempt(run, RUN, AttemptOrigin(), 1)
        ended = train_attempt(run, RUN, taken_up(run))
    assert ended.digests != train(document(kinds.CoolsAnAttribute)).digests[1:]


# --- optimizers with modes ------------------------------------------------------------------------------------


def test_a_schedule_free_optimizer_trains_in_its_training_mode_and_is_evaluated_in_the_other(
    tmp_path: Path,
) -> None:
    """Evaluated, kept as the best, and written as `ema`, as it is in eval(); the weights that train come back bit for bit, however often it is evaluated."""
    run = whole(kinds.ScheduleFree, checkpoint={"storage": str(tmp_path), "every": None})
    trained = train_attempt(run, RUN, AttemptOrigin())
    digests, model, optimizer = by_hand(kinds.ScheduleFree, nn.Module.train)
    assert trained.digests == tuple(digests)
    seldom = {**run, "evaluate": {"every": {"epochs": 1}}}
    assert train(seldom).digests == trained.digests
    optimizer.eval()  # type: ignore[attr-defined]
    written = load_file(tmp_path / RUN / "weights" / "ema.safetensors")
    assert weights_digest(written) == weights_digest(model.state_dict()) == trained.summary["ema_digest"]
    assert trained.summary["ema_digest"] != trained.weights_digest
    assert (
        trained.summary["best_digest"] == trained.summary["ema_digest"]
    )  # the last evaluation is the best one
    assert dict(trained.evaluations[-1][2])["eval/loss"] == loss_of(kinds.ScheduleFree(None), model.eval())


def loss_of(job: Kind, model: nn.Module) -> str:
    """The loss over the held-out data, which are fewer than a micro-batch."""
    data = job.eval_data()
    assert data is not None
    with torch.no_grad():
        loss = job.loss(model, job.collate([data[i] for i in range(len(data))]))  # type: ignore[arg-type]
    return (float(loss.total) / float(loss.weight)).hex()


# --- parameters that a step leaves unused -----------------------------------------------------------------------


@pytest.mark.every(2)
@pytest.mark.parametrize("micro", [8, 2])
def test_an_update_skips_what_no_micro_batch_of_its_step_used(pool: Pool, micro: int) -> None:
    """As an optimizer does in a loop by hand: neither decay nor momentum moves the head of a task without samples."""
    run = whole(kinds.HeadsOfTasks, batch={"global": SAMPLES, "micro": micro})
    wanted = tuple(by_hand(kinds.HeadsOfTasks, nn.Module.train, micro=micro)[0])
    assert train(run).digests == wanted
    for workers in range(2, SAMPLES // micro + 1):
        assert {rank.digests for rank in pool.run(workers, train, run)} == {wanted}, workers


@pytest.mark.scenario
def test_a_sharded_optimizer_skips_it_as_well(pool: Pool) -> None:
    run = document(kinds.HeadsOfTasks)
    sharded = {**run, "sharding": "optimizer"}
    assert {rank.digests for rank in pool.run(2, train, sharded)} == {train(run).digests}


def test_with_zeros_in_place_of_no_gradient_it_would_move() -> None:
    """The negative control: a rule that gives each parameter a gradient in each step."""
    run = document(kinds.HeadsOfTasks)
    with mock.patch.object(PhaseStep, "rest_unused", lambda self: None):
        moved = train(run)
    assert moved.digests != train(run).digests


# --- what a loss returns ----------------------------------------------------------------------------------------


class PartsAsTheyAre(Kind):
    """Parts with their graph, as "return tensors as they are" has it."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        out = model(batch[0])
        squared, absolute = out.square().sum(), out.abs().sum()
        n = len(out)
        return Loss(squared + absolute, n, {"squared": Mean(squared, n), "absolute": Mean(absolute, n)})


def test_a_part_may_keep_its_graph() -> None:
    """torch warns where such a tensor becomes a number, and a warning is an error here."""
    assert train(document(PartsAsTheyAre, rehearsal="full")).warnings == ()


def test_the_rate_falls_where_the_named_metric_no_longer_rises() -> None:
    """As ReduceLROnPlateau does by hand over the scores; by the loss, which falls here, it would have fallen otherwise."""
    trained = train(document(kinds.FallsByScore, length={"epochs": 4}))
    scores = [float.fromhex(dict(row[2])["eval/score"]) for row in trained.evaluations]
    losses = [float.fromhex(dict(row[2])["eval/loss"]) for row in trained.evaluations]
    rates = [row.lr for row in trained.steps]
    assert rates == by_plateau(scores) != by_plateau(losses)


def by_plateau(values: list[float]) -> list[float]:
    """The rates of the steps, each with an evaluation after it."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    scheduler, rates = ReduceLROnPlateau(optimizer, "max", patience=0), []
    for value in values:
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(value)
    return rates
