"""G1, G2, G3 where the global batch changes during a run, and where micro-batches are bounded by tokens.

Each is held against its author's own loop in plain torch, and executed by 1 … 4 workers, with each sharding, with loader processes, and in two
attempts: the same bits.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint.runs.run_checkpoints import claim
from lockstep.data import problems as data_problems
from lockstep.data.by_length import TokenBatches
from lockstep.errors import JobError, Problem
from lockstep.job.identity import deciding
from lockstep.spec.loading import load_spec
from lockstep.training import problems
from tests.distributed import batch_kinds, closure_kinds, kinds, phase_kinds
from tests.distributed.changing_jobs import (
    ClipOfLengths,
    QueueOfLengths,
    Sentences,
    by_tokens,
    by_windows,
    padding,
    planned_batches,
    ramp,
    ramped_batches,
    train_by_hand,
)
from tests.distributed.kinds import Kind
from tests.distributed.pool import Pool
from tests.distributed.training import Document, Trained, train, train_and_die, train_attempt
from tests.forked import Forked
from tests.raised import raises

RUN = "run"
DOCUMENTS: dict[str, Callable[..., Document]] = {"ramp": ramp, "tokens": by_tokens, "windows": by_windows}
SHARDINGS = ("none", "optimizer", "full")

PLAIN = {
    "job": {"use": "tests.distributed.changing_jobs:NextWord", "params": {"dropout": 0.0}},
    "clip_norm": None,
}
"""What a loop by hand can repeat: no draws, and no norm."""


@cache
def undisturbed(name: str) -> Trained:
    return train(DOCUMENTS[name]())


# --- beside the author's own loop -----------------------------------------------------------------------------


def ramp_by_hand(last: int) -> tuple[Document, list[int]]:
    """Two epochs of 64 samples: 8 steps of 4, then 4 of 8, then an epoch of `last`."""
    sizes = [4] * 8 + [8] * 4 + [last] * (64 // last)
    batch = {
        "global": [{"size": 4, "until_samples": 32}, {"size": 8, "until_steps": 12}, {"size": last}],
        "micro": 4,
    }
    job = {**PLAIN["job"], "params": {"dropout": 0.0, "samples": 64}}  # type: ignore[dict-item]
    return ramp(**{**PLAIN, "job": job, "batch": batch, "length": {"epochs": 2}}), sizes


def test_a_rising_batch_has_the_bits_of_the_loop_that_its_author_would_write() -> None:
    """With one and two micro-batches a step every addition is the same one, so the weights are equal after every step."""
    document, sizes = ramp_by_hand(8)
    digests, *_ = train_by_hand(document, ramped_batches(64, sizes, 4, 0))
    assert list(train(document).digests) == digests
    constant, *_ = train_by_hand(document, ramped_batches(64, [4] * 20, 4, 0))
    assert constant[:8] == digests[:8], "before the batch rises"
    assert constant[8:] != digests[8:20], "the control: a loop whose batch does not rise"


def test_with_more_micro_batches_the_loop_rounds_otherwise_and_no_more() -> None:
    """Four micro-batches: the loop adds them one after another, the tree in pairs. Equal to rounding in fp32."""
    document, sizes = ramp_by_hand(16)
    digests, losses, model = train_by_hand(document, ramped_batches(64, sizes, 4, 0))
    run = train(document)
    assert list(run.digests)[:12] == digests[:12], "as long as a step has two"
    assert run.digests[-1] != digests[-1]
    # no `==`: the loop adds the same terms in another order
    assert [row.loss for row in run.steps] == pytest.approx(losses, rel=1e-5)
    *_, again = train_by_hand(document, planned_batches(document))
    for (name, ours), theirs in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs), f"the plan has the samples of the loop: {name}"


@pytest.mark.every(2)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_token_batches_have_the_bits_of_the_loop_that_its_author_would_write(micro_batches: int) -> None:
    """fairseq's recipe: max_tokens, update_freq, gradients of sums divided once by the tokens of the step."""
    batch = {"global": 6 * micro_batches, "micro": 6, "tokens": 64}
    document = by_tokens(**PLAIN, batch=batch)
    digests, *_ = train_by_hand(document, planned_batches(document))
    assert list(train(document).digests) == digests
    one_earlier = list(planned_batches(document))
    other, *_ = train_by_hand(document, iter([one_earlier[-1], *one_earlier[:-1]]))
    assert other[-1] != digests[-1], "the control: the same samples in another order"


def test_micro_batches_of_like_lengths_have_the_bits_of_the_loop_that_its_author_would_write() -> None:
    """Hugging Face's recipe: group_by_length. With two micro-batches a step."""
    document = by_windows(**PLAIN, batch={"global": 8, "micro": 4})
    digests, *_ = train_by_hand(document, planned_batches(document))
    assert list(train(document).digests) == digests


# --- what the batches are -------------------------------------------------------------------------------------


def test_each_sample_comes_once_an_epoch_within_the_bound_and_with_little_padding() -> None:
    """G2, and what the order is for: less padding than in an order without lengths."""
    lengths = Sentences(75).lengths
    for document in (by_tokens(), by_windows()):
        steps = list(planned_batches(document))
        every = [ids for step in steps for ids in step]
        assert sorted(i for ids in every for i in ids) == sorted([*range(75), *range(75)])
        plain = {**document, "data": {"drop_last": False}, "batch": {"global": 16, "micro": 4}}
        usual = [ids for step in planned_batches(plain) for ids in step]
        assert sum(padding(ids, lengths) for ids in every) < sum(padding(ids, lengths) for ids in usual) / 2
    bounded = [ids for step in planned_batches(by_tokens()) for ids in step]
    assert all(len(ids) <= 6 and len(ids) * max(lengths[i] for i in ids) <= 64 for ids in bounded)
    assert {len(ids) for ids in bounded} >= {3, 4, 6}
    half = len(bounded) // 2
    assert sorted(map(sorted, bounded[:half])) != sorted(map(sorted, bounded[half:])), "epochs differ"


# --- whoever executes it --------------------------------------------------------------------------------------


@pytest.mark.scenario
@pytest.mark.thinned(7)
@pytest.mark.parametrize(
    ("name", "workers", "sharding", "loader_processes"),
    [
        ("ramp", 2, "none", 2),
        ("ramp", 3, "full", 0),
        ("ramp", 4, "optimizer", 0),
        ("tokens", 2, "full", 2),
        ("tokens", 3, "optimizer", 0),
        ("tokens", 4, "none", 0),
        ("windows", 4, "full", 0),
    ],
)
def test_one_run_has_one_value_of_every_bit(
    pool: Pool, name: str, workers: int, sharding: str, loader_processes: int
) -> None:
    """G1. On four workers the first steps of the ramp leave three of them without a micro-batch."""
    document = _placed(name, sharding, loader_processes)
    assert pool.run(workers, train, document) == [undisturbed(name)] * workers


@pytest.mark.exact
@pytest.mark.parametrize(
    ("name", "workers", "sharding", "loader_processes"),
    list(product(DOCUMENTS, (1, 2, 3, 4), SHARDINGS, (0, 2))),
)
def test_one_run_has_one_value_of_every_bit_in_full(
    pool: Pool, name: str, workers: int, sharding: str, loader_processes: int
) -> None:
    """G1, the product."""
    document = _placed(name, sharding, loader_processes)
    assert pool.run(workers, train, document) == [undisturbed(name)] * workers


def _placed(name: str, sharding: str, loader_processes: int, **more: Any) -> Document:
    document = DOCUMENTS[name](sharding=sharding, **more)
    return {**document, "data": {**document["data"], "loader_processes": loader_processes}}


def goes_on(runs: list[Trained], name: str) -> None:
    """Hold the last attempt of a run, by rank, against the undisturbed one: all of its rows, and the model after each of its own steps."""
    whole = undisturbed(name)
    for run in runs:
        assert (run.identity, run.rows, run.evaluations) == (whole.identity, whole.rows, whole.evaluations)
        assert run.weights_digest == whole.weights_digest
        assert run.digests == whole.digests[len(whole.digests) - len(run.digests) :]


def resumed(pool: Pool, folder: Path, name: str, step: int, workers: int, sharding: str) -> list[Trained]:
    """What a run comes to that is killed when it tells of `step`, and goes on from a checkpoint on other workers."""
    checkpoint = {"storage": str(folder), "every": {"steps": 1}}
    document = DOCUMENTS[name](checkpoint=checkpoint)
    killed = Forked(train_and_die, document, RUN, step)
    assert killed.wait(60) == -signal.SIGKILL
    origin = claim(str(folder), RUN, None)
    placed = {**document, "sharding": sharding}
    return pool.run(workers, train_attempt, placed, RUN, origin)  # type: ignore[no-any-return]


@pytest.mark.thinned(3)
@pytest.mark.scenario
@pytest.mark.parametrize(
    ("name", "step", "workers", "sharding"),
    [("ramp", 11, 3, "none"), ("tokens", 5, 2, "full"), ("windows", 6, 3, "optimizer")],
)
def test_a_killed_run_goes_on_with_the_same_bits(
    pool: Pool, tmp_path: Path, name: str, step: int, workers: int, sharding: str
) -> None:
    """G1: in the middle of an epoch, where the ramp has just changed."""
    goes_on(resumed(pool, tmp_path, name, step, workers, sharding), name)


@pytest.mark.exact
@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_run_killed_after_any_step_goes_on_with_the_same_bits(
    pool: Pool, tmp_path: Path, name: str, workers: int
) -> None:
    for step in range(1, len(undisturbed(name).rows) + 1):
        sharding = SHARDINGS[step % 3]
        goes_on(resumed(pool, tmp_path / str(step), name, step, workers, sharding), name)


@pytest.mark.scenario
def test_a_run_that_forgets_the_order_of_its_lengths_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with the micro-batches of another epoch, or the ramp's sizes a step later, the bits are others."""
    expected = undisturbed("tokens")
    monkeypatch.setattr(TokenBatches, "ids", lambda self, epoch, places: IDS(self, 0, places))
    assert train(by_tokens()).weights_digest != expected.weights_digest
    later = {
        "global": [{"size": 4, "until_samples": 34}, {"size": 8, "until_steps": 16}, {"size": 16}],
        "micro": 4,
    }
    assert train(ramp(batch=later)).digests[8] != undisturbed("ramp").digests[8]


IDS = TokenBatches.ids


# --- what goes with it, and what does not ---------------------------------------------------------------------


def test_the_ledger_has_the_samples_and_the_epoch_of_each_step() -> None:
    """The columns follow the plan: the samples of the ramp's steps, and of micro-batches that hold as many as they can."""
    trained = [0, *(row.samples for row in undisturbed("ramp").steps)]
    of_steps = [after - before for before, after in pairwise(trained)]
    assert of_steps[:16] == [4] * 8 + [8] * 5 + [3, 8, 8], "the third is what an epoch of 75 has left"
    assert set(of_steps[16:]) == {16, 11}
    for name in DOCUMENTS:
        rows = undisturbed(name).steps
        ends = [
            row.samples for row, after in pairwise([*rows, None]) if after is None or after.epoch > row.epoch
        ]
        assert ends == [75 * (epoch + 1) for epoch in range(len(ends))]
        assert [epoch for _, epoch, _ in undisturbed(name).evaluations] == list(range(len(ends)))


def test_the_identity_has_sizes_and_lengths() -> None:
    """The lengths decide which samples meet: other lengths are another run. A batch of one size has the identity that it had."""
    tokens, ramped = undisturbed("tokens"), undisturbed("ramp")
    by_job = {"use": "tests.distributed.changing_jobs:LengthsOfTheJob"}
    spec = load_spec(by_tokens())
    fields = {name: tree for name, tree in deciding(spec).items() if name.startswith("batch.")}
    assert fields == {"batch.global": 24, "batch.micro": 6, "batch.tokens": 64}
    assert "batch.tokens" not in deciding(load_spec(ramp()))
    assert tokens.identity != ramped.identity
    same = train(by_tokens(job=by_job))
    assert same.digests == tokens.digests, "the job may know the lengths itself"


def test_a_schedule_by_epochs_says_that_epochs_differ() -> None:
    job = {"use": "tests.distributed.changing_jobs:ByEpochs"}
    with pytest.raises(JobError) as refused:
        train(ramp(job=job))
    assert str(refused.value) == (
        "job.schedule: reads updates.per_epoch, and batch.global changes during the run, so epochs have different numbers of updates; count updates up to "
        "int(updates), return lockstep.PerEpoch(scheduler) for one that is stepped by epochs, or give batch.global one size"
    )
    assert train(by_tokens(job=job)).digests, "with one size it is what it was"
    stepped = train(ramp(job={"use": "tests.distributed.changing_jobs:StepsByEpochs"}))
    rates = [row.lr for row in stepped.steps]
    assert [rates[0], rates[-1]] == [0.02, 0.005]


REFUSED: list[tuple[Document, Problem[Any], dict[str, object]]] = [
    (by_tokens(job={"use": "tests.distributed.small_jobs:Plain"}), data_problems.NO_LENGTHS, {"name": "TensorDataset"}),
    (by_tokens(batch={"global": 24, "micro": 6, "tokens": 15}), data_problems.TOO_LONG, {"got": 15, "sample": 4, "length": 16, "count": 19}),
    (by_tokens(job={"use": "tests.distributed.changing_jobs:Mixed"}), data_problems.LENGTHS_OWN_ORDER, {"name": "Mixture"}),
    (by_tokens(batch={"global": 600, "micro": 6, "tokens": 64}, data={"shuffle": "by_length"}), problems.NO_PLAN, {"got": re.compile("75 samples make 17 micro-batches of batch.tokens = 64, and a step has 100")}),
    (ramp(batch={"global": [{"size": 4, "until_steps": 3}, {"size": 80}], "micro": 4}, data={"drop_last": True}), problems.NO_PLAN, {"got": re.compile("75 samples give no step of batch.global = 80")}),
]  # fmt: skip


@pytest.mark.parametrize(("document", "problem", "facts"), REFUSED)
def test_what_cannot_be_is_one_line_with_the_remedy(
    document: Document, problem: Problem[Any], facts: dict[str, object]
) -> None:
    with raises(problem, **facts):
        train(document)


def test_a_sample_that_is_too_long_may_be_left_out() -> None:
    lengths = Sentences(75).lengths
    long = ",".join(str(i) for i, length in enumerate(lengths) if length > 18)
    data = {"shuffle": "by_length", "drop_last": False, "without": long}
    run = train(by_tokens(batch={"global": 24, "micro": 6, "tokens": 18 * 3}, data=data))
    assert len(run.digests) == len(run.rows)


GATHERING = [
    batch_kinds.QueueOfTheBatch,
    *(
        pytest.param(kind, marks=pytest.mark.exact)
        for kind in (batch_kinds.Clip, batch_kinds.Detection, phase_kinds.Gan, closure_kinds.Lbfgs)
    ),
]


@pytest.mark.scenario
@pytest.mark.parametrize("kind", GATHERING)
def test_what_a_step_gathers_follows_its_size(pool: Pool, kind: type[Kind]) -> None:
    """Losses over the whole batch, weights of terms, statistics, phases, closures: of each step's own micro-batches."""
    one = kinds.document(kind, batch={"global": [{"size": 6, "until_steps": 2}, {"size": 12}], "micro": 3})
    assert pool.run(3, train, one) == [train(one)] * 3


@pytest.mark.scenario
@pytest.mark.parametrize("kind", [QueueOfLengths, pytest.param(ClipOfLengths, marks=pytest.mark.exact)])
def test_rows_of_token_batches_stand_in_one_order(pool: Pool, kind: type[Kind]) -> None:
    """A loss over the whole batch, and a queue of its rows, where micro-batches have different numbers of samples."""
    one = kinds.document(
        kind,
        batch={"global": 12, "micro": 4, "tokens": 14},
        data={"shuffle": "by_length", "drop_last": False},
    )
    assert pool.run(2, train, one) == [train(one)] * 2
    assert (
        pool.run(3, train, {**one, "sharding": "full"} if kind is ClipOfLengths else one) == [train(one)] * 3
    )
