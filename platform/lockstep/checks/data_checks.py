"""Checks of the data: they open, they are finite, every sample has one place, none is in both parts, and they come fast enough."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import partial
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lockstep.checks.dry_run import leakage_of
from lockstep.checks.findings import Finding, failed, passed, warned
from lockstep.checks.fixture import Fixture, Timed
from lockstep.data.dataset import orders_itself
from lockstep.data.dataset_order import number_of_ids
from lockstep.data.loader import is_dense
from lockstep.data.sampler import MicroBatch
from lockstep.reduction_tree import evaluation_ranges
from lockstep.training.job_data import dataset_size
from lockstep.training.observe.worker_memory import tensors_in

MOST_SAMPLES = 1 << 22
"""Of a longer epoch, so many samples' places are compared."""

LEAKAGE_S = 5.0
"""How long samples are compared that are no rows of a table."""

WAITING = 0.5
"""The share of a step's time from which on waiting for data is told."""

EACH = 8
"""On more workers the micro-batches are drawn once for all of them: each worker would draw the whole epoch."""

FETCHES = 5

PATIENCE_S = 1.0
"""How long micro-batches are fetched and computed before a wait for data is told: what passes by itself is none."""


def data(fixture: Fixture) -> list[Finding]:
    """The first and the last micro-batch of an epoch, and of the evaluation: fetched, collated, and finite."""
    plan = fixture.plan
    keys = [fixture.step_keys()[0], fixture.step_keys(fixture.epoch_steps - 1)[-1]]
    last = fixture.evaluation_count - 1
    held_out = [fixture.evaluation_micro_batch(i) for i in sorted({0, last}) if last >= 0]
    for key in [*keys, *held_out]:
        for tensor in tensors_in(fixture.fetch(key)):
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                location = "the evaluation" if key in held_out else f"step {key.step_number}"
                return [
                    failed(
                        "data",
                        f"{int((~tensor.isfinite()).sum())} numbers of micro-batch {key.micro_batch} of {location} (samples "
                        f"{_first(key)}) are not finite",
                        "leave these samples out, or fill what is missing before the model sees it",
                    )
                ]
    if same_everywhere(fixture.fetch(keys[0])):
        return [
            failed(
                "data",
                f"all samples of the first micro-batch are equal (samples {_first(keys[0])})",
                "make train_data give another sample for each index",
            )
        ]
    size = 0 if fixture.data[1] is None else dataset_size(fixture.data[1], "eval_data")
    return [
        passed(
            "data",
            f"{plan.samples} training samples, {plan.steps_per_epoch} steps an epoch; {size} held out; first and last micro-batches read",
        )
    ]


def _first(key: MicroBatch) -> str:
    ids = list(islice(key.ids, 5))
    return ", ".join(map(str, ids)) + (", …" if len(key.ids) > len(ids) else "")


def shards(fixture: Fixture) -> list[Finding]:
    """The places of an epoch's samples on the most workers: each sample once, but for the tail that is dropped."""
    plan, workers = fixture.plan, fixture.workers
    steps = min(plan.steps_per_epoch, max(1, MOST_SAMPLES // plan.global_batch))
    epoch = replace(plan, total_steps=steps)
    ranges = plan.ranges(workers) if workers <= EACH else [range(plan.micro_batches)]
    ids = [np.asarray(key.ids) for micro_batches in ranges for key in fixture.sampler(micro_batches, epoch)]
    every = np.concatenate(ids)
    places = fixture.sampler(range(plan.micro_batches), epoch).places
    expected = sum(len(each) for position in epoch.positions() for each in places(position))
    has_own_order = orders_itself(fixture.data[0])  # which may repeat samples
    strays = int(((every < 0) | (every >= number_of_ids(fixture.data[0]))).sum())
    distinct = expected if has_own_order else len(np.unique(every))
    if strays or distinct < expected or len(every) != expected:
        return [
            failed(
                "shards",
                f"of {expected} samples of {steps} steps on {workers} workers {expected - distinct} are missing or repeated, "
                f"{strays} are beyond the data's {plan.samples}",
                "make len(train_data) and train_data.block_sizes say what the data hold",
            )
        ]
    notes = [
        f"{expected} of {plan.samples} samples in {steps} steps on {workers} workers{'' if has_own_order else ', each once'}"
    ]
    dropped = plan.samples % plan.global_batch if plan.drop_last and steps == plan.steps_per_epoch else 0
    if dropped:
        notes.append(f"{dropped} an epoch left out by data.drop_last")
    if fixture.data[1] is not None:
        size = dataset_size(fixture.data[1], "eval_data")
        shares = evaluation_ranges(size, plan.micro_batch, workers)
        notes.append(f"{sum(map(len, shares))} evaluation micro-batches shared out")
    return [passed("shards", "; ".join(notes))]


def leakage(fixture: Fixture) -> list[Finding]:
    """Evaluation samples that are training samples."""
    train_data, eval_data = fixture.data
    if eval_data is None:
        return [passed("leakage", "no evaluation data")]
    overlap = leakage_of(train_data, eval_data, fixture.spec.seed, LEAKAGE_S)
    size = dataset_size(eval_data, "eval_data")
    if overlap is None:
        return [passed("leakage", "not compared: what the samples hold cannot be read")]
    if not overlap.rows:
        looked = "all" if overlap.whole else f"{overlap.eval_looked_at or size}"
        compared_with = "all" if overlap.train_looked_at is None else str(overlap.train_looked_at)
        return [
            passed(
                "leakage",
                f"{looked} of {size} evaluation samples compared with {compared_with} training samples: none is in both",
            )
        ]
    return [
        warned(
            "leakage",
            f"{overlap.described(size)}; they flatter every metric",
            "leave them out of one of the two",
        )
    ]


def loader(fixture: Fixture) -> list[Finding]:
    """What fetching a micro-batch takes beside computing it, in this process and without loader processes.

    Both are taken in turn, so that whatever else the machine does slows both, and a wait is told only if it lasts.
    """
    keys, processes = fixture.step_keys(), fixture.spec.data.loader_processes
    state = fixture.fresh()
    modules = fixture.modules(state.job, state.model)
    fetched, computed = Timed(), Timed()

    def compute(batch: Any, key: MicroBatch) -> None:
        for module in modules:
            fixture.backward(module, state, batch, key)
            state.model.zero_grad(set_to_none=True)

    until = time.perf_counter() + PATIENCE_S
    for i in count():
        key = keys[i % len(keys)]
        batch = fetched(partial(fixture.fetch, key))
        computed(partial(compute, batch, key))
        fetch_s, compute_s = fetched.least_s, computed.least_s
        waits = max(0.0, fetch_s / processes - compute_s) if processes else fetch_s
        share = waits / (waits + compute_s)
        if i + 1 >= FETCHES and (share <= WAITING or time.perf_counter() > until):
            break
    evidence = (
        f"a micro-batch is fetched in {1e3 * fetch_s:.1f} ms and computed in {1e3 * compute_s:.1f} ms; with data.loader_processes="
        f"{processes} a worker waits for data {share:.0%} of a step"
    )
    if share <= WAITING:
        return [passed("loader", evidence)]
    suggested = max(processes + 1, math.ceil(1.2 * fetch_s / compute_s))
    remedy = (
        f"set data.loader_processes={suggested}"
        if suggested <= 16
        else "make the dataset faster: fetch many at once with __getitems__"
    )
    return [warned("loader", evidence, remedy)]


def same_everywhere(batch: Any) -> bool:
    """Whether all samples of a batch are equal: it holds nothing but tensors, and each repeats its first row."""
    leaves = tree_leaves(batch)
    rows = [leaf for leaf in leaves if isinstance(leaf, Tensor) and _has_rows(leaf)]
    return bool(rows) and len(rows) == len(leaves) and all(torch.equal(x, x[:1].expand_as(x)) for x in rows)


def _has_rows(tensor: Tensor) -> bool:
    return is_dense(tensor) and tensor.dim() > 0 and len(tensor) > 1
