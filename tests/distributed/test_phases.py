"""Several phases in a step, and parameters that rest: the loops that people write, bit for bit, and one value however a run is executed."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.func import functional_call
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import lockstep
import lockstep.training.state as state
from lockstep import Loss, Phase
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.checks.lr_finder import lr_find
from lockstep.errors import Problem, SpecError
from lockstep.job.loading import load_job
from lockstep.randomness import model_key, seed_all, step_key
from lockstep.record.events.union import Document as Told
from lockstep.spec.loading import load_spec
from lockstep.training.determinism import determinism
from lockstep.training.integrity.state_digest import weights_digest
from lockstep.training.observe.not_finite import NAME
from lockstep.training.problems import OTHER_POSITION
from lockstep.training.step import problems
from lockstep.training.step.phases import PhaseOptimizers
from tests.distributed.by_hand import clip_in_float64
from tests.distributed.kinds import RUN, document, numbers, taken_up
from tests.distributed.phase_kinds import Gan, UnfrozenLayerByLayer, WassersteinWithPenalty
from tests.distributed.pool import Pool
from tests.distributed.training import (
    Document,
    Kept,
    Trained,
    train,
    train_attempt,
    train_job,
    train_rank_seeds,
)
from tests.forked import forking
from tests.raised import raises

# --- against the loops that people write ----------------------------------------------------------------------

NOISE, WIDTH = 5, 4


class Dcgan(lockstep.Job):
    """pytorch/examples' dcgan on small synthetic images: both networks on one batch and one noise."""

    def model(self) -> nn.Module:
        maker = nn.Sequential(
            nn.ConvTranspose2d(NOISE, 2 * WIDTH, 4, 1, 0, bias=False),
            nn.BatchNorm2d(2 * WIDTH),
            nn.ReLU(True),
            nn.ConvTranspose2d(2 * WIDTH, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )
        judge = nn.Sequential(
            nn.Conv2d(1, WIDTH, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(WIDTH, 2 * WIDTH, 3, 1, 1, bias=False),
            nn.BatchNorm2d(2 * WIDTH),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(2 * WIDTH, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )
        model = nn.ModuleDict({"maker": maker, "judge": judge})
        model.apply(weights_init)
        return model

    def train_data(self) -> Dataset[Any]:
        return TensorDataset(numbers(70, 1, 8, 8).tanh())

    def phases(self) -> Sequence[Phase]:
        adam = partial(torch.optim.Adam, lr=2e-4, betas=(0.5, 0.999))
        return [
            Phase("judge", self.judged, ["judge"], adam),
            Phase("maker", self.made, ["maker"], adam, draws_as="judge"),
        ]

    def judged(self, model: nn.Module, batch: Any) -> Loss:
        (real,) = batch
        noise, ones = torch.randn(len(real), NOISE, 1, 1), torch.ones(len(real))
        # The maker's batch norm counts its images once a step, in its own phase: here it has copies to write to.
        aside = {name: buffer.clone() for name, buffer in model["maker"].named_buffers()}
        fake = functional_call(model["maker"], aside, (noise,)).detach()
        total = bce(model["judge"](real), ones) + bce(model["judge"](fake), ones - 1)
        return Loss(total, len(real))

    def made(self, model: nn.Module, batch: Any) -> Loss:
        (real,) = batch
        fake = model["maker"](torch.randn(len(real), NOISE, 1, 1))
        return Loss(bce(model["judge"](fake), torch.ones(len(real))), len(real))


def bce(scores: Tensor, labels: Tensor) -> Tensor:
    return F.binary_cross_entropy(scores.view(-1), labels, reduction="sum")


def weights_init(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def whole_batches(job: type[lockstep.Job], size: int, **more: Any) -> Document:
    """One micro-batch a step, of a power of two: its sum divided by it is torch's own mean, bit for bit."""
    return {
        "job": {"use": f"{job.__module__}:{job.__qualname__}"},
        "seed": 11,
        "length": {"epochs": 2},
        "batch": {"global": size, "micro": size},
        **more,
    }


def batches_by_hand(data: Dataset[Any], size: int) -> Iterator[tuple[int, Any]]:
    """Two epochs in the order of torch's own sampler, with the number of the step from 0."""
    sampler = DistributedSampler(data, 1, 0, shuffle=True, seed=11, drop_last=True)
    loader = DataLoader(data, batch_size=size, sampler=sampler, drop_last=True)
    step = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            yield step, batch
            step += 1


def dcgan_by_hand(noise_of: str = "judge") -> list[str]:
    """The loop of dcgan/main.py; the digest of both networks after every step."""
    digests, job = [], Dcgan(None)
    with determinism("strict", threads=1):
        seed_all(model_key(11))
        model = job.model()
        maker, judge = model["maker"], model["judge"]  # type: ignore[index]
        criterion = nn.BCELoss()
        judging = torch.optim.Adam(judge.parameters(), lr=0.0002, betas=(0.5, 0.999))
        making = torch.optim.Adam(maker.parameters(), lr=0.0002, betas=(0.5, 0.999))
        for step, (real,) in batches_by_hand(job.train_data(), 16):
            judge.zero_grad()
            label = torch.full((16,), 1.0)
            criterion(judge(real).view(-1), label).backward()
            seed_all(step_key(11, step, 0, (noise_of,)))
            fake = maker(torch.randn(16, NOISE, 1, 1))
            label.fill_(0.0)
            criterion(judge(fake.detach()).view(-1), label).backward()
            judging.step()

            maker.zero_grad()
            label.fill_(1.0)
            criterion(judge(fake).view(-1), label).backward()
            making.step()
            digests.append(weights_digest(model.state_dict()))
    return digests


def test_dcgan_is_its_own_loop_after_every_step() -> None:
    trained = train(whole_batches(Dcgan, 16))
    assert list(trained.digests) == dcgan_by_hand()
    assert len(set(trained.digests)) == 8


def test_dcgan_with_another_noise_parts_in_the_first_step() -> None:
    """The negative control: the loop takes the noise that the other phase would have drawn for itself."""
    trained, other = train(whole_batches(Dcgan, 16, rehearsal="off")), dcgan_by_hand("maker")
    assert [a == b for a, b in zip(trained.digests, other, strict=True)] == [False] * 8


def wasserstein_by_hand() -> list[str]:
    """A critic with a gradient penalty, and a generator after each third of its steps."""
    digests, job = [], WassersteinWithPenalty(None)
    with determinism("strict", threads=1):
        seed_all(model_key(11))
        model = job.model()
        maker, critic = model["maker"], model["critic"]  # type: ignore[index]
        criticising = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
        making = torch.optim.Adam(maker.parameters(), lr=2e-3, betas=(0.5, 0.999))
        for step, (x, _) in batches_by_hand(job.train_data(), 8):
            seed_all(step_key(11, step, 0, ("critic",)))
            made, share = maker(torch.randn(8, 2)).detach(), torch.rand(8, 1)
            between = (share * x + (1 - share) * made).requires_grad_()
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            criticising.zero_grad()
            ((critic(made) - critic(x)).mean() + 10 * penalty).backward()
            criticising.step()
            if step % 3 == 2:
                seed_all(step_key(11, step, 0, ("maker",)))
                making.zero_grad()
                (-critic(maker(torch.randn(8, 2))).mean()).backward()
                making.step()
            digests.append(weights_digest(model.state_dict()))
    return digests


def test_a_gradient_penalty_is_its_own_loop_after_every_step() -> None:
    trained = train(whole_batches(WassersteinWithPenalty, 8))
    assert list(trained.digests) == wasserstein_by_hand()
    assert [row.step for row in trained.steps if "maker/loss" in row.parts] == [3, 6]


def unfrozen_by_hand(*, by_rate: bool = False) -> list[str]:
    """Layers that do not learn yet have no gradient; `by_rate`: they have a rate of 0 instead."""
    digests, job = [], UnfrozenLayerByLayer(None)
    with determinism("strict", threads=1):
        seed_all(model_key(11))
        model = job.model()
        own = [{"params": [parameter]} for parameter in model.parameters()]
        optimizer = torch.optim.AdamW(own, lr=1e-2, weight_decay=0.05)
        for step, (x, y) in batches_by_hand(job.train_data(), 8):
            resting = ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"][
                min(4 * step, 6) if step < 2 else 6 :
            ]
            for (name, parameter), group in zip(
                model.named_parameters(), optimizer.param_groups, strict=True
            ):
                parameter.requires_grad_(by_rate or name not in resting)
                group["lr"] = 0.0 if by_rate and name in resting else 1e-2
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            clip_in_float64([p.grad for p in model.parameters() if p.grad is not None], 0.5)
            optimizer.step()
            digests.append(weights_digest(model.state_dict()))
    return digests


def test_unfreezing_is_its_own_loop_after_every_step() -> None:
    """A parameter that rests has no part in the norm, is not decayed, and its moments stay what they are."""
    adamw = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.05}
    trained = train(whole_batches(UnfrozenLayerByLayer, 8, optimizer=adamw, clip_norm=0.5))
    assert list(trained.digests) == unfrozen_by_hand()
    assert list(trained.digests) != unfrozen_by_hand(by_rate=True)
    assert min(row.clipped_norm for row in trained.steps) < 0.51 < max(row.grad_norm for row in trained.steps)


class GanInHalves(lockstep.Job):
    """Two networks in fp16. `bomb` is a sample that overflows in the judge: in its own phase, or in `both`."""

    class Params(lockstep.Params):
        bomb: int | None = None
        both: bool = False

    def model(self) -> nn.Module:
        maker = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
        judge = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
        return nn.ModuleDict({"maker": maker, "judge": judge})

    def train_data(self) -> Dataset[Any]:
        x = numbers(40, 3)
        if self.params.bomb is not None:
            x[self.params.bomb] = 1e6
        return TensorDataset(x)

    def phases(self) -> Sequence[Phase]:
        adam = partial(torch.optim.Adam, lr=2e-3, betas=(0.5, 0.999))
        return [
            Phase("judge", self.judged, ["judge"], adam),
            Phase("maker", self.made, ["maker"], adam, draws_as="judge"),
        ]

    def judged(self, model: nn.Module, batch: Any) -> Loss:
        (real,) = batch
        fake = model["maker"](torch.randn(len(real), 2)).detach()
        return Loss(self.fooled(-model["judge"](real), model["judge"](fake)).sum(), len(real))

    def made(self, model: nn.Module, batch: Any) -> Loss:
        (real,) = batch
        fake = model["maker"](torch.randn(len(real), 2))
        if self.params.both:
            fake = fake + real
        return Loss(self.fooled(-model["judge"](fake)).sum(), len(real))

    @staticmethod
    def fooled(*scores: Tensor) -> Tensor:
        return torch.stack([F.softplus(one.float()) for one in scores])


def halves_by_hand(bomb: int | None = None, *, together: bool = False) -> tuple[list[str], list[float]]:
    """As torch's page on AMP has several optimizers: one scaler, each optimizer skips for itself, the scale is set once a step.

    `together`: where the judge overflows, the maker skips as well. The digest after every step, and the scale in it.
    """
    digests, scales, job = [], [], GanInHalves(GanInHalves.Params(bomb=bomb))
    with determinism("strict", threads=1):
        seed_all(model_key(11))
        model = job.model()
        maker, judge = model["maker"], model["judge"]  # type: ignore[index]
        judging = torch.optim.Adam(judge.parameters(), lr=2e-3, betas=(0.5, 0.999))
        making = torch.optim.Adam(maker.parameters(), lr=2e-3, betas=(0.5, 0.999))
        scaler = GradScaler("cpu")
        for step, (x,) in batches_by_hand(job.train_data(), 8):
            seed_all(step_key(11, step, 0, ("judge",)))
            scales.append(scaler.get_scale())
            with torch.autocast("cpu", torch.float16):
                fake = maker(torch.randn(8, 2)).detach()
                loss = (F.softplus(-judge(x).float()) + F.softplus(judge(fake).float())).mean()
            judging.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(judging)
            scaler.step(judging)
            overflowed = not all(p.grad.isfinite().all() for p in judge.parameters())

            seed_all(step_key(11, step, 0, ("judge",)))
            with torch.autocast("cpu", torch.float16):
                loss = F.softplus(-judge(maker(torch.randn(8, 2))).float()).mean()
            making.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(making)
            if not (together and overflowed):
                scaler.step(making)
            scaler.update()
            digests.append(weights_digest(model.state_dict()))
    return digests, scales


def in_halves(bomb: int | None = None, *, both: bool = False) -> Document:
    more = {"precision": "fp16", "rehearsal": "off"}
    run = whole_batches(GanInHalves, 8, **more)
    return {**run, "job": {**run["job"], "params": {"bomb": bomb, "both": both}}}


@pytest.mark.parametrize("bomb", [None, 5])
def test_phases_in_fp16_are_their_own_loop_after_every_step(bomb: int | None) -> None:
    """A judge that overflows skips its update, and the maker that does not has its own."""
    trained = train(in_halves(bomb))
    digests, scales = halves_by_hand(bomb)
    assert list(trained.digests) == digests
    assert [row.scale for row in trained.steps] == scales
    skipped = [row.parts["judge/skipped"] for row in trained.steps]
    assert sum(skipped) == (0 if bomb is None else 2)
    assert not any(row.parts["maker/skipped"] or row.skipped for row in trained.steps)
    assert len(set(digests)) == 10, "the other phase has updated"


def test_a_step_in_which_each_phase_overflows_is_skipped() -> None:
    trained = train(in_halves(5, both=True))
    assert trained.summary["skipped"] == sum(row.skipped for row in trained.steps) == 2
    for row, before, after in zip(trained.steps[1:], trained.steps, trained.digests[1:], strict=False):
        assert row.scale == before.scale * (0.5 if before.skipped else 1.0), "halved once a step"
        assert row.skipped == (trained.digests[row.step - 2] == after)


def test_a_step_that_is_skipped_as_a_whole_has_other_bits() -> None:
    """The negative control."""
    (same, _), (other, _) = halves_by_hand(5), halves_by_hand(5, together=True)
    assert [a == b for a, b in zip(same, other, strict=True)].count(True) < 5


@pytest.mark.scenario
def test_phases_in_fp16_have_one_value_however_they_are_executed(pool: Pool, tmp_path: Path) -> None:
    """Ragged, with an overflow in one phase, on 1 … 3 workers, and stopped just behind the overflow."""
    run = {**in_halves(5), "batch": {"global": 12, "micro": 4}, "data": {"drop_last": False}}
    whole = train(run)
    at = [row.parts["judge/skipped"] for row in whole.steps].index(1.0) + 1
    for workers in (2, 3):
        assert pool.run(workers, train, run)[0] == whole
    kept_run = {**run, "checkpoint": {"storage": str(tmp_path), "every": None}}
    pool.run(2, train_attempt, kept_run, RUN, AttemptOrigin(), at)
    resumed = train_attempt(kept_run, RUN, taken_up(kept_run))
    assert (resumed.rows, resumed.weights_digest) == (whole.rows, whole.weights_digest)


# --- however a run is executed --------------------------------------------------------------------------------


@pytest.mark.scenario
def test_dcgan_has_one_value_on_two_workers(pool: Pool) -> None:
    run = {**whole_batches(Dcgan, 12), "batch": {"global": 12, "micro": 4}, "data": {"drop_last": False}}
    assert pool.run(2, train, {**run, "rehearsal": "off"})[0] == train(run)


@pytest.mark.scenario
def test_one_seed_a_rank_gives_other_bits(pool: Pool) -> None:
    """The negative control of what `test_hold_kinds` shows of these jobs."""
    one, two = train(document(Gan)), pool.run(2, train_rank_seeds, document(Gan))[0]
    assert one.identity == two.identity
    assert one.digests != two.digests


def test_phases_draw_alike_where_they_say_so() -> None:
    class Apart(Gan):
        def phases(self) -> Sequence[Phase]:
            judge, maker = super().phases()
            return [judge, Phase("maker", maker.loss, maker.parameters, maker.optimizer)]

    run = document(Gan, rehearsal="off")
    for job, alike in ((load_job(run["job"]["use"], {}), True), (Apart(None), False)):
        parts = [row.parts for row in train_job(run, job).steps]
        assert [part["judge/noise"] == part["maker/noise"] for part in parts] == [alike] * 3


def kept(folder: Path, **more: Any) -> Document:
    return document(Gan, checkpoint={"storage": str(folder), "every": {"steps": 1}}, **more)


def fall_in(run: Document, phase: str, call: int) -> None:
    """Be killed when the loss of a phase is called for the `call`-th time."""
    calls, loss = [0], getattr(Gan, phase)

    def falling(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(*args)

    with mock.patch.object(Gan, phase, falling):
        train_attempt(run, RUN, AttemptOrigin())


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("phase", ["made", pytest.param("judged", marks=pytest.mark.exact)])
def test_a_run_killed_in_a_phase_takes_the_step_again(
    pool: Pool, phase: str, workers: int, tmp_path: Path
) -> None:
    """By SIGKILL, in the last of three steps of four micro-batches, of which the first phase was updated already."""
    run = kept(tmp_path, rehearsal="off")
    process = forking().Process(target=fall_in, args=(run, phase, 1 + 4 + 4 + 2))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    whole, origin = train(document(Gan)), taken_up(run)
    ranks = (
        pool.run(2, train_attempt, run, RUN, origin) if workers == 2 else [train_attempt(run, RUN, origin)]
    )
    assert ranks[0].rows == whole.rows
    for resumed in ranks:
        assert (resumed.identity, resumed.digests[-1]) == (whole.identity, whole.digests[-1])
        assert 0 < len(resumed.digests) < 3


@pytest.mark.scenario
def test_a_phase_whose_optimizer_is_not_restored_gets_other_bits(tmp_path: Path) -> None:
    """The negative control of the resume; in a run with digests it is refused where it is taken up."""
    restore, whole = state.restore_optimizer, train(document(Gan))

    def half(optimizer: Any, saved: Any, *, fork: bool) -> None:
        if isinstance(optimizer, PhaseOptimizers):
            optimizer = PhaseOptimizers({"judge": optimizer.by_phase["judge"]})
            saved = {"judge": saved["judge"]}
        restore(optimizer, saved, fork=fork)

    for digests in (None, 1):
        run = kept(tmp_path / str(digests), rehearsal="off", record={"digest_every": digests})
        train_attempt(run, RUN, AttemptOrigin(), 2)
        with mock.patch.object(state, "restore_optimizer", half):
            if digests is None:
                assert train_attempt(run, RUN, taken_up(run)).weights_digest != whole.weights_digest
            else:
                with raises(OTHER_POSITION, name="optimizer_digest"):
                    train_attempt(run, RUN, taken_up(run))
    assert train_attempt(run, RUN, taken_up(run)).weights_digest == whole.weights_digest


class Diverging(Gan):
    """Once the judge has updated, the loss of the maker is infinite."""

    def phases(self) -> Sequence[Phase]:
        judge, maker = super().phases()
        return [replace(judge, optimizer=partial(torch.optim.SGD, lr=1e3)), maker]

    def made(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().made(model, batch)
        moved = bool(model["judge"][-1].bias.detach().abs().sum() > 1)  # type: ignore[index]
        return Loss(loss.total * (math.inf if moved else 1.0), loss.weight, loss.parts)


def test_a_value_that_is_not_finite_is_looked_for_in_its_phase(tmp_path: Path) -> None:
    """With the weights that the phase before it left."""
    run = document(Diverging, checkpoint={"storage": str(tmp_path), "every": None}, rehearsal="off")
    told: list[Any] = []
    with (
        mock.patch.object(Kept, "tell", lambda self, event: told.append(event)),
        raises(problems.LOSS_NOT_FINITE, step=1, micro_batch=0, phase=" of phase 'maker'", got="inf"),
    ):
        train_attempt(run, RUN, AttemptOrigin())
    (found,) = [json.loads(one.text) for one in told if isinstance(one, Told) and one.name == NAME]
    assert (found["step"], found["micro_batch"]) == (1, 0)
    assert found["evidence"].startswith("in phase 'maker'; ")


# --- what does not go together --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "problem", "more"),
    [
        (Gan, problems.MIRROR, {"sharding": "optimizer", "faults": {"mirror": True}}),
        (Gan, problems.NATIVE, {"reduction": "native"}),
        (UnfrozenLayerByLayer, problems.NATIVE, {"reduction": "native"}),
    ],
)
def test_what_needs_all_parameters_in_every_step_is_refused(
    kind: Any, problem: Problem[SpecError], more: Document
) -> None:
    with raises(problem):
        train(document(kind, **more))


def test_what_needs_one_loss_is_refused() -> None:
    with raises(problems.RECHECK, got=0.5) as info:
        train(document(Gan, determinism={"mode": "strict", "recheck": 0.5}))
    assert info.value.exit_code == 2


def test_a_recheck_goes_with_parameters_that_rest(pool: Pool) -> None:
    run = document(UnfrozenLayerByLayer, rehearsal="off")
    again = {**run, "determinism": {"mode": "strict", "recheck": 1.0}}
    whole: Trained = train(run)
    assert pool.run(2, train, again)[0] == whole == train(again)


def test_what_looks_for_one_rate_refuses_phases() -> None:
    with raises(problems.PROBED_PHASES, got=2, who="lockstep lr-find"):
        lr_find(load_spec(document(Gan)))


def test_an_optimizer_beside_phases_is_refused() -> None:
    with pytest.raises(SpecError, match=r"nothing calls optimizer\(\) of .* beside its phases\(\)"):
        train(document(BothWays))  # type: ignore[arg-type]


@pytest.mark.scenario
def test_a_class_takes_back_the_optimizer_of_its_base() -> None:
    run = document(TakenBack)  # type: ignore[arg-type]
    of_base = {**run, "job": {"use": f"{Dcgan.__module__}:Dcgan"}}
    assert train(run).weights_digest == train(of_base).weights_digest


class BothWays(Dcgan):
    more: Iterable[Any] = {}

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)


class TakenBack(BothWays):
    optimizer = lockstep.Job.optimizer  # type: ignore[assignment]
