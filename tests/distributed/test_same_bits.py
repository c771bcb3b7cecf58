"""G1: one run has one value of every bit, however many workers and loader processes execute it.

What is compared (`Trained`): the weights' digest at the end and after every step, every deterministic column of the
ledger, every metric of every evaluation, and the identity. The reference is `fit` in this very process, without
any process group. The last step of every epoch is ragged, and every step after the first has six buckets or more.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from lockstep.training.integrity import problems
from lockstep.training.step.reduction import LATENCY_BYTES
from tests.distributed.covering import covering, pairs, showing_each_value
from tests.distributed.pool import Pool
from tests.distributed.training import (
    Document,
    Trained,
    train,
    train_buffers_apart,
    train_buffers_left,
    train_left_fold,
    train_rank_seeds,
    train_sending,
)
from tests.distributed.under_torchrun import launch
from tests.forked import Forked
from tests.raised import raises

ROOT = Path(__file__).parents[2]

FACTORS = {
    "job": ("digits", "gpt"),
    "micro_batches": (6, 8),
    "precision": ("fp32", "bf16", "fp16"),
    "workers": (1, 2, 3, 4),
    "loader_processes": (0, 2),
    # The largest bucket that is sent whole: none (all go in slices), some, all.
    "latency_bytes": (0, 600, LATENCY_BYTES),
}


class Case(NamedTuple):
    """One way to execute one of the runs."""

    job: str
    micro_batches: int
    precision: str
    workers: int
    loader_processes: int
    latency_bytes: int


COVERING = [Case(*row) for row in covering(FACTORS)]  # type: ignore[arg-type]
EACH_VALUE = showing_each_value(COVERING)
PRODUCT = [Case(*row) for row in product(*FACTORS.values())]  # type: ignore[arg-type]


def document(
    job: str, micro_batches: int, precision: str = "fp32", loader_processes: int = 0, **more: object
) -> Document:
    """A spec of six to ten steps in two epochs.

    The tail of a digits epoch (102 samples) leaves every micro-batch two samples or more, as BatchNorm needs; that
    of a gpt epoch (51) is three micro-batches of one sample, so that some of four workers have none.
    """
    jobs = {
        "digits": {
            "job": {
                "use": "tests.distributed.real_jobs:FewDigits",
                "params": {"width": 4, "dropout": 0.2, "augment": True, "train_samples": 102, "eval_samples": 37},
            },
            "batch": {"global": 5 * micro_batches, "micro": 5},
            "schedule": {"name": "cosine", "warmup_steps": 2},
            "workers": {"bucket_mb": 0.000038},  # 39 bytes: six of its parameters are as large
        },
        "gpt": {
            "job": {
                "use": "tests.distributed.real_jobs:FewPieces",
                "params": {
                    "depth": 1, "heads": 2, "head_width": 8, "context": 32, "dropout": 0.1, "corpus_bytes": 100_000,
                    "train_samples": 51, "eval_samples": 13,
                },
            },
            "batch": {"global": 2 * micro_batches, "micro": 2},
            "schedule": {"name": "linear", "warmup_steps": 2},
            "workers": {"bucket_mb": 0.0005},  # 524 bytes: seven are
        },
    }  # fmt: skip
    return {
        **jobs[job],
        "seed": 3,
        "length": {"epochs": 2},
        "data": {"drop_last": False, "loader_processes": loader_processes},
        "precision": precision,
        "clip_norm": 1.0,
        "early_stop": {"patience": 9},  # never reached: the best weights are kept
        "rehearsal": "off",  # it has tests of its own, and trains nothing
        **more,
    }


@cache
def reference(job: str, micro_batches: int, precision: str) -> Trained:
    """The run in this process, alone and without loader processes."""
    return train(document(job, micro_batches, precision))


def check(pool: Pool, case: Case) -> None:
    job, micro_batches, precision, workers, loader_processes, latency_bytes = case
    spec = document(job, micro_batches, precision, loader_processes)
    every = pool.run(workers, train_sending, spec, latency_bytes)
    assert every == [reference(job, micro_batches, precision)] * workers
    if workers > 1:
        assert min(trained.buckets for trained in every) >= 6


def name(case: Case) -> str:
    return "-".join(map(str, case))


@pytest.mark.every(4)
@pytest.mark.thinned(3)
@pytest.mark.parametrize("case", EACH_VALUE, ids=name)
def test_bits_do_not_depend_on_how_a_run_is_executed(pool: Pool, case: Case) -> None:
    """G1, every value of every factor."""
    check(pool, case)


@pytest.mark.exact
@pytest.mark.parametrize("case", PRODUCT, ids=name)
def test_bits_do_not_depend_on_how_a_run_is_executed_in_full(pool: Pool, case: Case) -> None:
    """G1, the full product."""
    check(pool, case)


@pytest.mark.exact
@pytest.mark.parametrize("workers", [5, 6, 7, 8])
@pytest.mark.parametrize("latency_bytes", FACTORS["latency_bytes"])
@pytest.mark.parametrize("job", FACTORS["job"])
def test_bits_are_the_same_on_up_to_a_worker_for_each_micro_batch(
    wide_pool: Pool, job: str, latency_bytes: int, workers: int
) -> None:
    check(wide_pool, Case(job, 8, "fp32", workers, 0, latency_bytes))


def test_covering_set_shows_every_pair() -> None:
    assert set().union(*map(pairs, COVERING)) == set().union(*map(pairs, PRODUCT))
    assert len(COVERING) <= 16


def test_matrix_trains_on_ragged_steps_and_evaluates() -> None:
    """What the matrix compares is there: without it, equality would say little."""
    for job in FACTORS["job"]:
        trained = reference(job, 8, "fp32")
        weights = [row.weight for row in trained.steps]
        per_epoch = len(weights) // 2
        assert len(weights) in range(6, 11)
        assert weights[per_epoch - 1] < min(weights[: per_epoch - 1])
        assert [step for step, _, _ in trained.evaluations] == [per_epoch, 2 * per_epoch]
        assert all(row.parts for row in trained.steps)
        assert len(set(trained.digests)) == len(weights)


def test_another_seed_gives_other_bits() -> None:
    assert (
        train({**document("gpt", 8), "seed": 4}).weights_digest != reference("gpt", 8, "fp32").weights_digest
    )


@pytest.mark.scenario
def test_activation_checkpointing_keeps_the_bits(pool: Pool) -> None:
    """Recomputing draws the same dropout; on two workers as well."""
    on = document("gpt", 8, activation_checkpointing=True)
    digests = {trained.weights_digest for trained in (train(on), *pool.run(2, train, on))}
    assert digests == {reference("gpt", 8, "fp32").weights_digest}


@pytest.mark.scenario
@pytest.mark.parametrize(
    "writes", ["in place", *(pytest.param(each, marks=pytest.mark.exact) for each in ("data", "another"))]
)
def test_buffers_that_forward_reads_keep_the_bits(pool: Pool, writes: str) -> None:
    """G1 where the bits depend on the buffers that a micro-batch starts from, however it writes to them."""
    alone = train(centred(writes))
    for workers in (2, 3, 4):
        assert pool.run(workers, train, centred(writes)) == [alone] * workers


def centred(writes: str = "in place") -> Document:
    return {
        "job": {"use": "tests.distributed.small_jobs:Centred", "params": {"samples": 50, "writes": writes}},
        "batch": {"global": 16, "micro": 2},
        "data": {"drop_last": False},
        "length": {"epochs": 2},
    }


@pytest.mark.scenario
@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.exact)])
def test_bits_with_two_threads_do_not_depend_on_workers(pool: Pool, workers: int) -> None:
    """The number of threads belongs to the run; the workers do not."""
    two = document("digits", 6, threads=2, loader_processes=2)
    alone = train({**two, "data": {"drop_last": False}})
    assert pool.run(workers, train, two) == [alone] * workers


@pytest.mark.scenario
@pytest.mark.parametrize(
    "each",
    [
        [(2, LATENCY_BYTES), (3, 0)],
        pytest.param([(2, 0), (3, LATENCY_BYTES), (4, 0), (4, LATENCY_BYTES)], marks=pytest.mark.exact),
    ],
    ids=["two", "others"],
)
def test_parameters_of_any_kind_keep_the_bits(pool: Pool, each: list[tuple[int, int]]) -> None:
    """Channels last, transposed, with gaps, shared, frozen, of another type; some ranges send several partial sums."""
    strided: Document = {
        "job": {"use": "tests.distributed.small_jobs:Strided", "params": {"samples": 50}},
        "batch": {"global": 16, "micro": 2},
        "data": {"drop_last": False},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "length": {"epochs": 1},
    }
    for bucket_mb in (25.0, 0.00005):
        document = {**strided, "workers": {"bucket_mb": bucket_mb}}
        alone = train(document)
        for workers, latency_bytes in each:
            assert pool.run(workers, train_sending, document, latency_bytes) == [alone] * workers


@pytest.mark.every(2)
@pytest.mark.parametrize("workers", [2, 4])
def test_a_bucket_without_elements_keeps_the_bits(pool: Pool, workers: int) -> None:
    """Six micro-batches: some workers send two partial sums."""
    use = "tests.distributed.small_jobs:Empty"
    spec: Document = {"job": {"use": use}, "batch": {"global": 12, "micro": 2}, "data": {"drop_last": False}}
    assert pool.run(workers, train, spec) == [train(spec)] * workers


def launched(folder: Path) -> list[Trained]:
    """What the two ranks left there, which are as many workers of one run."""
    every = [pickle.loads(folder.joinpath(f"{rank}.pickle").read_bytes()) for rank in range(2)]
    assert [trained.summary["workers"] for trained in every] == [2, 2]
    return every


@pytest.mark.scenario
def test_torchruns_launcher_gives_the_same_bits(tmp_path: Path) -> None:
    """G1: `fit` under torchrun's launcher, in a pool and in one process without any group are one run."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = Forked(launch, json.dumps(document("gpt", 6)), str(tmp_path), 2, env=environment)
    process.communicate(timeout=180)
    assert process.returncode == 0, process.communicate()
    assert launched(tmp_path) == [reference("gpt", 6, "fp32")] * 2


@pytest.mark.exact  # torchrun's own launcher is above, with processes that are forked
def test_torchrun_gives_the_same_bits(tmp_path: Path) -> None:
    spec = document("gpt", 6)
    script = Path(__file__).with_name("under_torchrun.py")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
    ]
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "platform"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run(
        [*command, json.dumps(spec), str(tmp_path)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert launched(tmp_path) == [reference("gpt", 6, "fp32")] * 2


# --- what breaks when a mechanism is taken away ------------------------------------------------------------


@pytest.mark.scenario
def test_a_left_fold_gives_other_bits_on_other_workers(pool: Pool) -> None:
    """The tree is what makes the sum one value: gradients added from left to right make it several."""
    digests = {
        pool.run(workers, train_left_fold, document("digits", 8))[0].weights_digest for workers in (1, 2)
    }
    assert len(digests) == 2
    assert reference("digits", 8, "fp32").weights_digest not in digests


@pytest.mark.scenario
def test_a_seed_for_each_rank_gives_other_bits_on_other_workers(pool: Pool) -> None:
    digests = {
        pool.run(workers, train_rank_seeds, document("digits", 8))[0].weights_digest for workers in (1, 2)
    }
    assert len(digests) == 2


@pytest.mark.scenario
def test_buffers_that_are_not_restored_give_other_bits_on_other_workers(pool: Pool) -> None:
    digests = {
        pool.run(workers, train_buffers_left, {**centred(), "rehearsal": "off"})[0].weights_digest
        for workers in (1, 2, 4)
    }
    assert len(digests) == 3


def test_ranks_with_buffers_of_their_own_are_found_out(pool: Pool) -> None:
    with raises(
        problems.OTHER_BITS,
        got=re.compile("^after step 1 the workers have different weights, first in '0.mean'; which is"),
    ):
        pool.run(2, train_buffers_apart, {**centred(), "rehearsal": "off"})
