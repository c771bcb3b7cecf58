"""A loss over the whole global batch, and terms with denominators of their own: the loops that people write, and one value however a run is executed."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import lockstep
from lockstep import Loss, Mean, Term
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.errors import JobError, JobImportError, Problem
from lockstep.job.loading import load_job
from lockstep.job.methods import check_methods
from lockstep.randomness import model_key, seed_all, step_key, whole_batch_key
from lockstep.training import problems
from lockstep.training.determinism import determinism
from lockstep.training.integrity import problems as integrity_problems
from lockstep.training.integrity.state_digest import weights_digest
from lockstep.training.step import problems as step_problems
from lockstep.training.step.sample_rows import StepRows
from tests.distributed import batch_kinds
from tests.distributed.batch_kinds import (
    HELD,
    BarlowTwins,
    Clip,
    Codebook,
    CriticOverTheBatch,
    Detection,
    DiceOverABatch,
    Dino,
    MatchedByPrediction,
    Moco,
    Triplets,
)
from tests.distributed.kinds import FEATURES, RUN, Kind, document, numbers, perceptron, taken_up, train_every
from tests.distributed.pool import Pool
from tests.distributed.test_hold_kinds import COMPARING, attempts
from tests.distributed.training import Document, Trained, train, train_attempt, train_job
from tests.raised import raises

# --- against the loops that people write ----------------------------------------------------------------------

GLOBAL = 16


def whole(job: type[lockstep.Job], micro: int = GLOBAL, **more: Any) -> Document:
    """Two epochs of two steps of 16 samples, a power of two: a sum divided by it is torch's mean, bit for bit."""
    return {
        "job": {"use": f"{job.__module__}:{job.__qualname__}"},
        "seed": 11,
        "length": {"epochs": 2},
        "batch": {"global": GLOBAL, "micro": micro},
        "optimizer": {"name": "adamw", "lr": 1e-2, "weight_decay": 0.05},
        **more,
    }


def batches(data: Dataset[Any]) -> Iterator[tuple[int, Any]]:
    sampler = DistributedSampler(data, 1, 0, shuffle=True, seed=11, drop_last=True)
    loader, step = DataLoader(data, batch_size=GLOBAL, sampler=sampler, drop_last=True), 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            yield step, batch
            step += 1


def by_hand(
    job: lockstep.Job,
    mean_loss: Callable[[Any, Any, int], Tensor],
    after: Callable[[Any, int], None] | None = None,
) -> list[str]:
    """A plain loop over whole batches: the digest of the model after every step. `mean_loss` takes model, batch and step."""
    digests = []
    with determinism("strict", threads=1):
        seed_all(model_key(11))
        model = job.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.05)
        for step, batch in batches(job.train_data()):
            seed_all(step_key(11, step, 0))
            optimizer.zero_grad()
            mean_loss(model, batch, step).backward()
            optimizer.step()
            with torch.no_grad():
                (after or job.after_step)(model, step + 1)
            digests.append(weights_digest(model.state_dict()))
    return digests


def clip_loss(model: Any, batch: Any, step: int) -> Tensor:
    x, y = batch
    image, text = F.normalize(model["image"](x), dim=1), F.normalize(model["text"](y), dim=1)
    logits = model.scale.exp() * image @ text.T
    pairs = torch.arange(len(x))
    return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2


def barlow_loss(model: Any, batch: Any, step: int) -> Tensor:
    x, _ = batch
    one, two = (model["net"](x + 0.1 * torch.randn_like(x)) for _ in range(2))
    c = model["bn"](one).T @ model["bn"](two) / len(one)
    on = (c.diagonal() - 1).square().sum()
    return on + 0.0051 * (c.square().sum() - c.diagonal().square().sum())


def dice_loss(model: Any, batch: Any, step: int) -> Tensor:
    x, y = batch
    with torch.autocast("cpu", torch.bfloat16):
        share = model(x).softmax(1)
        seed_all(whole_batch_key(11, step))
        wanted = F.one_hot(y, 3) * (torch.rand(len(y), 1) < 0.9)
        return 1 - (2 * (share * wanted).sum() + 1) / (share.sum() + wanted.sum() + 1)


def detection_loss(model: Any, batch: Any, step: int) -> Tensor:
    x, y = batch
    z, there = model["net"](x), y == 0
    far = F.smooth_l1_loss(model["box"](z), x[:, :2], reduction="none").sum(1)
    return F.cross_entropy(model["kind"](z), y) + 5.0 * ((far * there).sum() / there.sum().clamp(min=1))


LOOPS: dict[type[Kind], tuple[Callable[[Any, Any, int], Tensor], Document]] = {
    Clip: (clip_loss, {}),
    BarlowTwins: (barlow_loss, {}),
    DiceOverABatch: (dice_loss, {"precision": "bf16"}),
    Detection: (detection_loss, {}),
}


@pytest.mark.scenario
@pytest.mark.thinned(4)
@pytest.mark.parametrize("job", LOOPS)
def test_a_whole_batch_in_one_is_its_own_loop_after_every_step(job: type[Kind]) -> None:
    """Batch norm's statistics are those of the loop as well, in the embedding and in the loss; the learned temperature moves."""
    loop, more = LOOPS[job]
    trained = train(whole(job, **more))
    assert list(trained.digests) == by_hand(job(None), loop)
    assert len(set(trained.digests)) == 4


class InDouble(batch_kinds.Whole):
    """All pairs of a batch, in numbers of which rounding leaves a trace in the twelfth digit."""

    def model(self) -> nn.Module:
        return perceptron(FEATURES, 4).double()

    def data(self, samples: int, seed: int) -> Dataset[Any]:
        return torch.utils.data.TensorDataset(numbers(samples, FEATURES, seed=seed).double())

    def eval_data(self) -> None:
        return None

    def embed(self, model: nn.Module, batch: Any) -> Tensor:
        return F.normalize(model(batch[0]), dim=1)

    def batch_loss(self, model: nn.Module, rows: Tensor) -> Loss:
        # Neighbours of the epoch's order are partners: rows in another order have other ones.
        partner = torch.arange(len(rows)) ^ 1
        alike = (rows @ rows.T / 0.5).masked_fill(torch.eye(len(rows), dtype=torch.bool), -1e9)
        return Loss(F.cross_entropy(alike, partner, reduction="sum"), len(rows))


class InTheMicroBatch(InDouble):
    """The same comparison within each micro-batch."""

    embed, batch_loss = lockstep.Job.embed, lockstep.Job.batch_loss

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return InDouble.batch_loss(self, model, InDouble.embed(self, model, batch))


def weights_after(document: Document) -> Tensor:
    trained = train(document)
    return torch.cat([gradient.reshape(-1) for gradient in trained.gradients.values()])


@pytest.mark.scenario
def test_micro_batches_give_the_gradient_of_the_whole_batch() -> None:
    """To rounding; one that compares within micro-batches, or has its rows in another order, is far from it."""
    off = {"rehearsal": "off"}
    one = weights_after(whole(InDouble, **off))
    for micro in (2, 4, 8):
        assert (weights_after(whole(InDouble, micro, **off)) - one).abs().max() < 1e-12 * one.abs().max()
    assert (weights_after(whole(InTheMicroBatch, 4, **off)) - one).abs().max() > 0.1 * one.abs().max()
    gather = StepRows.gather

    def by_micro_batch(rows: StepRows) -> dict[str, Tensor]:
        sizes = [len(places) for places in rows._places]
        joined = torch.cat([each[""] for each in rows._own.values()])
        assert gather(rows)[""].shape == joined.shape and sum(sizes) == len(joined)
        return {"": joined}

    with mock.patch.object(StepRows, "gather", by_micro_batch):
        assert (weights_after(whole(InDouble, 4, **off)) - one).abs().max() > 0.01 * one.abs().max()


# --- one value however a run is executed ----------------------------------------------------------------------


def check_one_value(pool: Pool, workers: int, kinds: list[type[Kind]]) -> None:
    """Ragged steps leave a worker without a micro-batch; alone the whole rehearsal is made, and nothing warned of."""
    documents = [document(kind, **{"rehearsal": "full", **kind.more}) for kind in kinds]
    others = [{**each, "rehearsal": "off"} for each in documents]
    alone, shared = train_every(documents), pool.run(workers, train_every, others)
    for kind, single, *ranks in zip(kinds, alone, *shared, strict=True):
        assert len(set(single[1])) == len(single[2]) == 3 and single[3] and single[4] == (), (kind, single[4])
        for rank in ranks:
            assert rank[:4] == single[:4], kind


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("workers", "kinds"),
    [
        (2, [MatchedByPrediction, BarlowTwins]),
        (4, [Clip, Detection, Codebook]),
        (3, [batch_kinds.QueueOfTheBatch, Dino]),
        *(pytest.param(each, HELD, marks=pytest.mark.scenario) for each in (2, 3, 4)),
    ],
)
def test_every_kind_has_one_value_and_is_told_of_nothing(
    pool: Pool, workers: int, kinds: list[type[Kind]]
) -> None:
    check_one_value(pool, workers, kinds)


WAYS: dict[str, Document] = {
    "fp16": {"precision": "fp16"},
    "loader processes": {"data": {"drop_last": False, "loader_processes": 2}},
    "left out": {"data": {"drop_last": False, "without": "0-9,20"}},
    "native": {"reduction": "native", "data": {"drop_last": False}},
    "checked": {"determinism": {"recheck": 1.0}},
    "accumulated": {"batch": {"global": 12, "micro": 1}},
    "in slices": {"workers": {"bucket_mb": 0.00005}},
}


@pytest.mark.exact
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_every_kind_has_one_value_in_every_way(pool: Pool, way: str, workers: int) -> None:
    # Phases; batch norm over micro-batches of one sample, which the rehearsal has in the loss as well.
    one_sample = {Clip, batch_kinds.QueueOfTheBatch, *([BarlowTwins] if way == "accumulated" else [])}
    refused = {"native": {CriticOverTheBatch}, "checked": {CriticOverTheBatch}}
    left_out = refused.get(way, one_sample if way in ("left out", "accumulated") else set())
    documents = [
        document(kind, **{**kind.more, **WAYS[way], "rehearsal": "off"})
        for kind in HELD
        if kind not in left_out
    ]
    alone, shared = train_every(documents), pool.run(workers, train_every, documents)
    if way == "native":  # another number of workers is another run there
        assert shared == [shared[0]] * workers
    else:
        assert shared == [alone] * workers


@pytest.mark.scenario
@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("kind", "more", "workers"),
    [
        (BarlowTwins, {**WAYS["left out"], "precision": "fp16"}, 3),
        (Clip, {"workers": {"bucket_mb": 0.00005}, "data": {"drop_last": False, "loader_processes": 1}}, 2),
        (Detection, {**WAYS["left out"], "precision": "fp16"}, 4),
    ],
)
def test_some_kinds_have_one_value_in_some_ways(
    pool: Pool, kind: type[Kind], more: Document, workers: int
) -> None:
    run = document(kind, **{**more, "rehearsal": "off"})
    assert pool.run(workers, train, run) == [train(run)] * workers


@pytest.mark.scenario
@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param([Clip, MatchedByPrediction, Moco], id="three"),
        pytest.param(HELD, marks=pytest.mark.exact, id="all"),
    ],
)
@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(1, 3, marks=pytest.mark.exact)])
def test_a_run_that_is_taken_up_comes_to_the_same(
    pool: Pool, kinds: list[type[Kind]], before: int, after: int, tmp_path: Path
) -> None:
    runs: list[Document] = [
        document(kind, rehearsal="off", checkpoint={"storage": str(tmp_path / kind.__name__), "every": None})
        for kind in kinds
    ]
    alone: list[Trained] = [train(run) for run in runs]
    attempts(pool, before, [(run, AttemptOrigin()) for run in runs], 1)
    for rank in attempts(pool, after, [(run, taken_up(run)) for run in runs], None):
        for one, (_, digests, rows, evaluations) in zip(alone, rank, strict=True):
            assert (digests, rows, evaluations) == (one.digests[1:], one.rows, one.evaluations)


@pytest.mark.scenario
def test_a_death_in_either_pass_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    """What the passes had gathered is gone, and the step is taken anew; it dies in the first pass of step 2, in its loss, in its second pass."""
    alone = train(document(Clip, rehearsal="off"))
    for deaths in ({"embed": 12}, {"batch_loss": 4}, {"embed": 17}):
        run = document(
            Clip, rehearsal="off", checkpoint={"storage": str(tmp_path / str(deaths)), "every": {"steps": 1}}
        )
        job = Clip(None)
        for name, deadly in deaths.items():
            vars(job)[name] = partial(dying, getattr(job, name), iter(range(1, deadly)))
        with pytest.raises(JobError, match="gone"):
            train_job(run, job, None, RUN, AttemptOrigin())
        again = train_attempt(run, RUN, taken_up(run))
        assert again.summary["step"] == 3 and len(again.digests) == 2
        assert (again.weights_digest, again.rows) == (alone.weights_digest, alone.rows)


def dying(method: Callable[..., Any], calls: Iterator[int], *args: Any) -> Any:
    """Calls a method as often as `calls` has elements."""
    if next(calls, None) is None:
        raise RuntimeError("gone")
    return method(*args)


# --- statistics of the step -----------------------------------------------------------------------------------


def moco_loop(job: Any) -> list[str]:
    """main_moco.py: the queue takes the keys of the batch, then the encoder of keys moves."""

    def loss(model: Any, batch: Any, step: int) -> Tensor:
        x, _ = batch
        q = F.normalize(model["query"](x + 0.1 * torch.randn_like(x)), dim=1)
        with torch.no_grad():
            k = F.normalize(model["key"](x + 0.1 * torch.randn_like(x)), dim=1)
        state["keys"] = k
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ model.queue.T], dim=1) / 0.2
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))

    def after(model: Any, step: int) -> None:
        model.queue.copy_(torch.cat([model.queue[GLOBAL:], state["keys"]]))
        for mine, learned in zip(model["key"].parameters(), model["query"].parameters(), strict=True):
            mine.lerp_(learned, 0.1)

    state: dict[str, Tensor] = {}
    return by_hand(job, loss, after)


def dino_loop(job: Any) -> list[str]:
    """main_dino.py: the center follows the teacher's outputs over the batch."""

    def loss(model: Any, batch: Any, step: int) -> Tensor:
        x, _ = batch
        with torch.no_grad():
            wanted = ((model["teacher"](x) - model.center) / 0.07).softmax(1)
        total = -(wanted * (model["student"](x) / 0.1).log_softmax(1)).sum() / len(x)
        seed_all(step_key(11, step, 0))
        with torch.no_grad():
            state["center"] = model["teacher"](x).sum(0) / len(x)
        return total

    def after(model: Any, step: int) -> None:
        model.center.mul_(0.9).add_(state["center"] * 0.1)
        for mine, learned in zip(model["teacher"].parameters(), model["student"].parameters(), strict=True):
            mine.lerp_(learned, 0.1)

    state: dict[str, Tensor] = {}
    return by_hand(job, loss, after)


@pytest.mark.parametrize(("job", "loop"), [(Moco, moco_loop), (Dino, dino_loop)])
def test_statistics_of_a_whole_batch_are_those_of_its_own_loop(
    job: type[Kind], loop: Callable[[Any], list[str]]
) -> None:
    trained = train(whole(job))
    assert list(trained.digests) == loop(job(None))
    assert len(set(trained.digests)) == 4


def test_statistics_are_summed_along_the_tree_and_rows_are_in_the_order_of_the_epoch() -> None:
    """Negative controls: sums from left to right, and rows by micro-batch, give other bits."""
    kept: dict[str, list[Any]] = {"sums": [], "rows": []}

    class Seen(batch_kinds.QueueOfTheBatch):
        def after_step(self, model: nn.Module, step: int, statistics: Mapping[str, Any]) -> None:
            super().after_step(model, step, statistics)
            if step == 1:
                kept["sums"].append(statistics["x"])
                kept["rows"].append(statistics["y"])

    job = Seen(None)
    train_job(whole(batch_kinds.QueueOfTheBatch, 2, rehearsal="off"), job)
    (_, (x, y)) = next(batches(job.train_data()))
    parts = [x[m::8].contiguous().sum(0) for m in range(8)]
    pairs = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    assert torch.equal(kept["sums"][0].total, (pairs[0] + pairs[1]) + (pairs[2] + pairs[3]))
    assert kept["sums"][0].weight == 12.0
    assert not torch.equal(kept["sums"][0].total, functools.reduce(lambda a, b: a + b, parts))
    assert torch.equal(kept["rows"][0], y)
    assert not torch.equal(torch.cat([y[m::8] for m in range(8)]), y)


class NotTaken(Moco):
    def after_step(self, model: nn.Module, step: int) -> None:  # type: ignore[override]
        return


class GivenLater(Moco):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        return loss if len(batch[1]) < 3 else Loss(loss.total, loss.weight)

    def after_step(self, model: nn.Module, step: int, statistics: Mapping[str, Any]) -> None:
        assert not statistics


class OfAnotherShape(Dino):
    def step_statistics(self, model: nn.Module, batch: Any) -> dict[str, Mean]:
        return {"center": Mean(torch.zeros(5 if len(batch[1]) > 2 else 4), 1)}


# --- what is recorded, and what is refused --------------------------------------------------------------------


def test_loss_parts_and_terms_are_those_of_the_whole_step() -> None:
    """By the loop of the author, at the first step: the mean over 16 samples, each term over its own number."""
    job = Detection(None)
    seed_all(model_key(11))
    model, (_, (x, y)) = job.model(), next(batches(job.train_data()))
    trained = train(whole(Detection, 4))
    seed_all(step_key(11, 0, 0))
    row = trained.steps[0]
    assert row.loss == pytest.approx(row.parts["kind"] + 5 * row.parts["box"], rel=1e-6)
    assert row.parts["there"] == float((y == 0).float().mean())
    with torch.no_grad():
        assert row.parts["kind"] == pytest.approx(
            float(F.cross_entropy(model["kind"](model["net"](x)), y)), rel=0.1
        )


class OwnGenerator(Clip):
    """Noise that the second call draws anew."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.generator = torch.Generator().manual_seed(1)

    def embed(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        rows = super().embed(model, batch)
        return {
            **rows,
            "image": rows["image"] + 0.1 * torch.randn(rows["image"].shape, generator=self.generator),
        }


class Detached(Clip):
    def embed(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {name: row.detach() for name, row in super().embed(model, batch).items()}

    def batch_loss(self, model: nn.Module, rows: Mapping[str, Tensor]) -> Loss:
        return Loss(rows["image"].sum(), 1)


class DetachedLater(Clip):
    """In the last step, of eight samples."""

    def batch_loss(self, model: nn.Module, rows: Mapping[str, Tensor]) -> Loss:
        loss = super().batch_loss(model, rows)
        return loss if len(rows["image"]) != 8 else Loss(loss.total.detach(), loss.weight, loss.parts)


class TwoViews(Triplets):
    def embed(self, model: nn.Module, batch: Any) -> Tensor:
        return torch.cat([super().embed(model, batch)] * 2)


class Squeezed(Triplets):
    """Micro-batches of one sample lose a column."""

    def embed(self, model: nn.Module, batch: Any) -> Tensor:
        rows = super().embed(model, batch)
        return rows if len(rows) > 2 or not model.training else rows[:, 1:]


class WrongWeights(Detection):
    def term_weights(self, batch: Any) -> dict[str, Any]:
        return {"kind": len(batch[1]), "box": len(batch[1])}


class OneWeight(Detection):
    def term_weights(self, batch: Any) -> dict[str, Any]:
        return {"kind": len(batch[1])}


class SometimesATerm(Detection):
    term_weights = Kind.term_weights

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        some = {name: term for name, term in loss.terms.items() if name == "kind" or len(batch[1]) > 2}
        return Loss.of_terms(some, {name: part for name, part in loss.parts.items() if name not in some})


def test_embeddings_that_change_between_the_passes_are_refused() -> None:
    """The control of the comparison: without it the run trains on."""
    where = re.compile(r"^ \(step 1, micro-batch 0")
    with raises(step_problems.EMBED_DIFFERS, label="job.embed", name=" in 'image'", where=where):
        train(document(OwnGenerator, rehearsal="off"))
    with mock.patch("lockstep.training.step.whole_batch.BatchLoss._check_same"):
        assert len(train(document(OwnGenerator, rehearsal="off", determinism={"recheck": 0.0})).rows) == 3


IN_STEP_3 = " (step 3, micro-batch 0, rank 0)"


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("job", "problem", "facts"),
    [
        (Detached, problems.TOTAL_DETACHED, {"label": "job.batch_loss"}),
        (DetachedLater, step_problems.ROWS_DETACHED, {"label": "job.batch_loss"}),
        (
            TwoViews,
            step_problems.ROWS_KIND,
            {
                "label": "job.embed",
                "got": "returned a tensor of shape (6, 4)",
                "where": " (step 1, micro-batch 0, rank 0)",
                "wanted": "of the 3 samples",
            },
        ),
        (
            Squeezed,
            step_problems.OTHER_ROWS,
            {
                "label": "job.embed",
                "got": "rows of torch.float32 and shape (3,)",
                "where": IN_STEP_3,
                "wanted": "rows of torch.float32 and shape (4,)",
            },
        ),
        (NotTaken, integrity_problems.STATISTICS_UNTAKEN, {"label": "job.loss", "got": "keys"}),
        (GivenLater, step_problems.STATISTICS_LATE, {"label": "job.loss", "where": IN_STEP_3.strip(" ()")}),
        (
            OfAnotherShape,
            step_problems.OTHER_STATISTICS,
            {
                "label": "the statistics of the step",
                "got": "the mean 'center' is torch.float32 of shape (4,) (step 3), and torch.float32 of shape (5,) in the micro-batch before",
            },
        ),
        (
            WrongWeights,
            step_problems.TERM_WEIGHT_DIFFERS,
            {"label": "job.loss", "name": "box", "got": 5, "source": "job.term_weights", "wanted": 12},
        ),
        (OneWeight, step_problems.TERM_WEIGHTS, {"got": "'kind'", "wanted": "'kind', 'box'"}),
        (
            SometimesATerm,
            step_problems.OTHER_TERMS,
            {"label": "job.loss", "got": "'kind'", "where": IN_STEP_3, "wanted": "'kind', 'box'"},
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    job: type[Kind], problem: Problem[Any], facts: dict[str, object]
) -> None:
    with raises(problem, **facts):
        train(document(job, rehearsal="off", data={"drop_last": False}, batch={"global": 12, "micro": 3}))


@pytest.mark.scenario
def test_a_loss_that_compares_samples_within_a_micro_batch_is_pointed_here() -> None:
    """A warning, for it is exact; nothing is said where the micro-batch is the whole batch."""
    told = [train(document(kind, length={"steps": 1})).warnings for kind in COMPARING]
    for (text,) in told:
        assert (
            "it compares the samples of a micro-batch with each other, and batch.micro decides with how many"
            in text
        )
        assert text.endswith("write embed(model, batch) and batch_loss(model, rows)")
    assert train(document(COMPARING[0], length={"steps": 1}, batch={"global": 3, "micro": 3})).warnings == ()


class PairsOfNeighbours(batch_kinds.Whole):
    """P identities of two samples in a row: of fewer rows than a step has there is no such loss at all."""

    def eval_data(self) -> None:
        return None

    def embed(self, model: nn.Module, batch: Any) -> Tensor:
        x, _ = batch
        return model(x)

    def batch_loss(self, model: nn.Module, rows: Tensor) -> Loss:
        one, two = rows.view(8, 2, -1).unbind(1)
        return Loss((one - two).square().sum() + (rows.std(0) - 1).square().sum(), len(rows))


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", [PairsOfNeighbours, BarlowTwins, Triplets])
def test_a_micro_batch_of_one_sample_is_tried_among_the_others_of_its_step(kind: type[Kind]) -> None:
    """The weights are those of the same run without a rehearsal, and nothing is told; by itself no such sample has a loss."""
    job = f"{kind.__module__}:{kind.__qualname__}"
    run = {"job": {"use": job}, "length": {"steps": 2}, "batch": {"global": 16, "micro": 1}}
    rehearsed = train({**run, "rehearsal": "full"})
    assert rehearsed.warnings == ()
    assert rehearsed.digests == train({**run, "rehearsal": "off"}).digests


@pytest.mark.parametrize("kind", [BarlowTwins, Triplets])
def test_the_first_micro_batch_that_is_not_left_out_is_tried_among_others_too(kind: type[Kind]) -> None:
    run = document(kind, length={"steps": 2}, batch={"global": 16, "micro": 1})
    run["data"] = {"shuffle": "none", "without": "0"}
    rehearsed = train({**run, "rehearsal": "full"})
    assert rehearsed.warnings == ()
    assert rehearsed.digests == train({**run, "rehearsal": "off"}).digests


def test_a_loss_that_no_rows_of_a_step_give_a_gradient_is_refused() -> None:
    class Constant(batch_kinds.Whole):
        def embed(self, model: nn.Module, batch: Any) -> Tensor:
            return model(batch[0])

        def batch_loss(self, model: nn.Module, rows: Tensor) -> Loss:
            return Loss(rows.detach().sum(), len(rows))

    run = {**document(Triplets), "batch": {"global": 16, "micro": 1}}
    with raises(problems.TOTAL_DETACHED, label="job.batch_loss"):
        train_job(run, Constant(None))


def test_an_evaluation_compares_the_samples_of_a_global_batch() -> None:
    """Seven held-out samples in batches of four and three, by hand; the first micro-batch alone gives another loss."""
    run = {
        **document(Triplets),
        "batch": {"global": 4, "micro": 2},
        "optimizer": {"name": "sgd", "lr": 1e-30},
    }
    trained, job = train({**run, "length": {"steps": 1}}), Triplets(None)
    seed_all(model_key(0))
    model, (x, y) = job.model(), job.data(7, 2)[:]
    with torch.no_grad():
        rows = torch.cat([job.embed(model, each) for each in zip(x.split(2), y.split(2), strict=True)])
        losses = [job.batch_loss(model, each) for each in rows.split(4)]
    total = sum(float(loss.total) for loss in losses)
    assert trained.evaluations[-1][2] == (("eval/loss", (total / 7).hex()),)


def test_half_of_a_batch_loss_is_refused_and_a_helper_called_embed_is_not() -> None:
    class Half(Kind):
        def batch_loss(self, model: nn.Module, rows: Any) -> Loss:
            return Loss(rows.sum(), 1)

    class Helped(Kind):
        def embed(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return x

    with pytest.raises(JobImportError, match=r"has batch_loss\(\) and no embed\(model, batch\)"):
        check_methods(Half, "here:Half")
    check_methods(Helped, "here:Helped")
    load_job("tests.distributed.batch_kinds:Clip", {})


def test_a_term_without_weight_adds_nothing() -> None:
    total = torch.tensor(0.0, requires_grad=True)
    for weight in (0, torch.tensor(0)):
        loss = Loss.of_terms({"a": Term(total, weight), "b": Term(total + 6, 3, 0.5)})
        assert (float(loss.total.detach()), loss.weight, list(loss.parts)) == (1.0, 1.0, ["a", "b"])
    assert partial(Term, total)(2).mean(2) == 0
