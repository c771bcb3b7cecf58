"""G6: a run that any number of workers recorded is taken again by any other number, with the same bits, or the first that differ are found."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import lockstep.checkpoint.snapshot as snapshot
from lockstep.checkpoint.runs.run_folder import AttemptOrigin, Replay
from lockstep.communication.group import Group
from lockstep.job.loading import load_job
from lockstep.proof.execution import Execution, ProcessSettings
from lockstep.proof.recorded_run import RecordedRun
from lockstep.proof.replaying import Replayed, Watching, replay_spec
from lockstep.proof.run_diff import Side, difference
from lockstep.proof.step_spans import Span
from lockstep.proof.verification import Take, Verified, verify
from lockstep.record.events.union import Event, Started
from lockstep.record.ledger.rows import EvaluationRow, StepRow
from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec
from lockstep.training.driver_requests import NoRequests
from lockstep.training.loop import fit
from lockstep.training.step.sharding import FullyShardedOptimizer
from tests.distributed.pool import Pool
from tests.distributed.test_same_bits import document
from tests.distributed.training import Document
from tests.executed_here import executed_here
from tests.unit.proof.test_verify import flip
from tests.unit.proof.verified_jobs import PLANTED

RUN = "recorded"


class Kept(NoRequests):
    def __init__(self) -> None:
        self.found = Replayed()

    def run_id(self) -> str:
        return RUN

    def tell(self, event: Event) -> None:
        match event:
            case Started():
                self.found.fields = event.facts["fields"]
            case StepRow():
                self.found.steps[event.step] = event
            case EvaluationRow():
                self.found.evaluations[event.step] = event


def in_group(spec: Document, origin: AttemptOrigin, planted: dict[str, Any]) -> Replayed:
    """What rank 0 tells of a run of this group."""
    loaded, kept = load_spec(spec), Kept()
    PLANTED.clear()
    PLANTED.update(planted)
    try:
        fit(
            loaded,
            load_job(loaded.job.use, loaded.job.params),
            Group.join(torch.device("cpu")),
            kept.tell,
            kept,
            origin,
        )
    finally:
        PLANTED.clear()
    return kept.found


def recorded(
    pool: Pool, spec: Document, workers: int, planted: dict[str, Any], record: Any = in_group
) -> RecordedRun:
    found = pool.run(workers, record, spec, AttemptOrigin(), planted)[0]
    loaded = load_spec(spec)
    saved = sorted(
        int(path.name.removeprefix("step-")) for path in Path(loaded.checkpoint.storage, RUN).glob("step-*")
    )
    return RecordedRun(RUN, loaded, found.steps, found.evaluations, found.fields, {}, saved, [])


def in_group_with_an_altered_shard(
    spec: Document, origin: AttemptOrigin, planted: dict[str, Any]
) -> Replayed:
    """`in_group`, where every rank writes a part of a checkpoint. After the update of step `planted["shard"]` a bit of the last rank's rows flips."""
    step, updates = FullyShardedOptimizer.step, [0]

    def altering(self: FullyShardedOptimizer, closure: Any = None) -> None:
        step(self, closure)
        updates[0] += 1
        if updates[0] == planted.get("shard") and self.group.rank == self.group.size - 1:
            rows = next(rows for rows in self.rows if rows.numel())
            rows.data.view(torch.int32).view(-1)[0] ^= 1 << 12

    with (
        mock.patch.object(snapshot, "SMALLEST_SHARE", 64),
        mock.patch.object(FullyShardedOptimizer, "step", altering),
    ):
        return in_group(spec, origin, {})


def taken_by(pool: Pool, workers: int, planted: dict[str, Any]) -> Take:
    def take(spec: Spec, replay: Replay, _watch: Watching, _weights: Path | None) -> Replayed:
        again = replay_spec(spec).document()
        return pool.run(workers, in_group, again, AttemptOrigin(replay=replay), planted)[0]  # type: ignore[no-any-return]

    return take


def checked(
    pool: Pool,
    spec: Document,
    *,
    by: int,
    again: int,
    spans: list[Span],
    planted: dict[str, Any] | None = None,
    planted_again: dict[str, Any] | None = None,
) -> Verified:
    with tempfile.TemporaryDirectory() as folder:
        saving = {"checkpoint": {"storage": f"{folder}/runs", "every": {"steps": 2}, "keep_last": 9}}
        whole = {**spec, **saving, "record": {"uri": "off", "digest_every": 1}}
        run = recorded(pool, whole, by, planted or {})
        return verify(run, spans, taken_by(pool, again, planted_again or {}), Path(folder, "aside"))


FACTORS = {
    "job": ("digits", "gpt"),
    "precision": ("fp32", "bf16", "fp16"),
    "by": (1, 2, 3),
    "again": (1, 2, 3),
}
SPANS = [Span(0, 6), Span(2, 5), Span(4, 6)]


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    "case",
    [
        ("digits", "bf16", 1, 3),
        ("gpt", "fp16", 3, 2),
        *(pytest.param(case, marks=pytest.mark.exact) for case in product(*FACTORS.values())),
    ],
    ids=str,
)
def test_a_run_is_the_same_on_any_workers(pool: Pool, case: tuple[str, str, int, int]) -> None:
    job, precision, by, again = case
    found = checked(pool, document(job, 6, precision), by=by, again=again, spans=SPANS)
    assert found.same and found.same_bits
    assert found.steps == 6 + 3 + 2


def small(**more: Any) -> Document:
    return {
        "job": {"use": "tests.unit.proof.verified_jobs:Small"},
        "seed": 3,
        "length": {"steps": 6},
        "batch": {"global": 12, "micro": 3},
        "data": {"drop_last": False},
        "workers": {"bucket_mb": 0.0001},
        **more,
    }


PLACES = [(step, micro_batch) for step in range(6) for micro_batch in range(4)]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("place", "by", "again"),
    [
        ((3, 2), 2, 1),
        ((4, 3), 3, 2),
        *(
            pytest.param(place, by, again, marks=pytest.mark.exact)
            for place in PLACES
            for by, again in ((1, 2), (2, 1), (3, 2))
        ),
    ],
    ids=str,
)
def test_a_rank_that_flipped_a_bit_of_a_gradient_is_found_where_it_did(
    pool: Pool, place: tuple[int, int], by: int, again: int
) -> None:
    """In the run that was recorded, as one lying machine would; it is taken again by honest ones."""
    whole = [Span(0, 6)]
    found = checked(pool, small(), by=by, again=again, spans=whole, planted={"gradient": place})
    assert found.first_difference is not None
    assert found.first_difference[:3] == (place[0] + 1, place[1], "gradient_digest")
    assert "no field of the identity differs" in (found.cause or "")


@pytest.mark.scenario
def test_the_average_of_the_weights_is_verified_whatever_the_workers_keep(pool: Pool) -> None:
    """Recorded by two that share the optimizer's state out; a bit that the machine which takes it again flips in a gradient is found."""
    spec = small(ema=0.8, sharding="optimizer")
    again = {"by": 2, "again": 1, "spans": [Span(0, 6), Span(2, 4)]}
    assert checked(pool, spec, **again).same_bits
    found = checked(pool, spec, **again, planted_again={"gradient": (1, 1)})
    assert found.first_difference is not None
    assert found.first_difference[:3] == (2, 1, "gradient_digest")


FULL: dict[str, Any] = {"on the device": "full", "in host memory": {"mode": "full", "offload": True}}


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize(("rows", "by"), [*product(FULL, (3, 2))])
def test_a_fully_sharded_run_is_verified_by_one_process(
    pool: Pool, rows: str, by: int, tmp_path: Path
) -> None:
    """From its checkpoints, of which each worker has written a part. A bit of a part that is another one is found, whether its hash was made to fit or not."""
    saving = {"checkpoint": {"storage": str(tmp_path / "runs"), "every": {"steps": 2}, "keep_last": 9}}
    spec = {**small(ema=0.8, sharding=FULL[rows]), **saving, "record": {"uri": "off", "digest_every": 1}}
    run = recorded(pool, spec, by, {}, in_group_with_an_altered_shard)
    alone = taken_by(pool, 1, {})
    found = verify(run, SPANS, alone, tmp_path / "aside")
    assert found.same_bits and found.steps == 6 + 3 + 2
    parts = (tmp_path / "runs" / RUN).glob("step-*4/*.safetensors")
    assert {path.suffixes[-2] for path in parts} == {f".r{rank:04}" for rank in range(by)}
    for signed, quantity in ((True, "weights_digest"), (False, "checkpoint")):
        flip(tmp_path / "runs" / RUN, 4, "model", signed=signed)
        found = verify(run, [Span(4, 6)], alone, tmp_path / f"aside-{signed}")
        assert found.first_difference is not None
        assert found.first_difference[:3] == (4, None, quantity)


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize("rows", FULL)
def test_one_altered_shard_of_a_run_is_found_where_it_was(pool: Pool, rows: str, tmp_path: Path) -> None:
    """One worker's rows have another bit after step 3, which no other worker has and so none can tell."""
    saving = {"checkpoint": {"storage": str(tmp_path / "runs"), "every": {"steps": 2}, "keep_last": 9}}
    spec = {**small(sharding=FULL[rows]), **saving, "record": {"uri": "off", "digest_every": 1}}
    run = recorded(pool, spec, 3, {"shard": 3}, in_group_with_an_altered_shard)
    found = verify(run, [Span(2, 6)], taken_by(pool, 1, {}), tmp_path / "aside")
    assert found.first_difference is not None
    assert found.first_difference[:3] == (3, None, "weights_digest")


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize(("use", "by"), [("Small", 1), ("Reordered", 2)])
def test_what_parts_two_runs_is_found_whoever_recorded_them(pool: Pool, use: str, by: int) -> None:
    """One run by three workers of unequal shares, each side taken again by this process."""
    with tempfile.TemporaryDirectory() as folder, executed_here(), ExitStack() as stack:
        sides = []
        for name, workers in (("Small", 3), (use, by)):
            saving = {"checkpoint": {"storage": f"{folder}/{name}-{workers}", "every": {"steps": 2}}}
            whole = {**small(), **saving, "job": {"use": f"tests.unit.proof.verified_jobs:{name}"}}
            run = recorded(pool, {**whole, "record": {"uri": "off", "digest_every": 2}}, workers, {})
            again = stack.enter_context(Execution(ProcessSettings(print)))
            sides.append(Side(name, run.spec, run.fields, run.steps, run.evaluations, {}, again, run))
        found = difference(*sides, Path(folder, "aside"))
    if use == "Small":
        assert found.same
        return
    first = found.first_difference
    assert first is not None
    assert (first.step, first.module, first.quantity) == (1, "the model", "output of out")
    assert first.operator == "aten.sum.dim_IntList → aten.flip"


def honest(i: int) -> Document:
    """One of a hundred runs: every job here in turn, each precision, with and without an average."""
    precision = ("fp32", "bf16", "fp16")[i % 3]
    more: Document = {"seed": i} | ({"ema": 0.9} if i % 4 == 0 else {})
    if i % 5 == 3:
        return {**document("digits", 6, precision), **more}
    if i % 5 == 4:
        return {**document("gpt", 6, precision), **more}
    return small(**more, precision=precision)


@pytest.mark.exact
@pytest.mark.parametrize("i", range(100))
def test_nothing_is_found_in_a_hundred_honest_runs(pool: Pool, i: int) -> None:
    by, again = i % 3 + 1, i % 2 + 1
    found = checked(pool, honest(i), by=by, again=again, spans=[Span((0, 2, 4)[i % 3], 6)])
    assert found.same and found.same_bits
