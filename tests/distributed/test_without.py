"""A run without some samples, from before it first used one of them, is the run from the beginning without them, bit for bit."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from lockstep import train
from lockstep.calls.problems import FIELD_CHANGED, NOT_USED
from lockstep.calls.resume import resume
from lockstep.calls.sample_removal import resume_without
from lockstep.calls.verify import verify
from lockstep.checkpoint.runs.run_checkpoints import steps_of
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.data.sampler import MicroBatchSampler
from lockstep.driver.options import RunOptions
from lockstep.driver.result import Result
from lockstep.errors import SpecError
from lockstep.plan import Plan
from lockstep.record.ledger.tables import DETERMINISTIC, read_history
from lockstep.training.step import problems as step_problems
from tests.distributed.pool import Pool
from tests.distributed.training import Document, Trained, bits, train_attempt
from tests.forked import Forked
from tests.raised import raises
from tests.unit.proof.verified_jobs import Points, Small

SAMPLES, GLOBAL, MICRO, STEPS = 56, 12, 4, 12


class Interrupted(Small):
    """Is killed after the step that the environment names."""

    placement_variables = ("KILLED_AFTER",)

    def after_step(self, model: nn.Module, step: int) -> None:
        if os.environ.get("KILLED_AFTER") == str(step):
            os.kill(os.getpid(), signal.SIGKILL)


class Spoilt(Small):
    """One sample is not a number."""

    def train_data(self) -> Dataset[Any]:
        points = Points(SAMPLES)
        points.x[SPOILT] = torch.nan
        return points


def plan() -> Plan:
    return Plan.of(SAMPLES, GLOBAL, MICRO, drop_last=False, steps=STEPS)


def order() -> list[Any]:
    every = range(GLOBAL // MICRO)
    return list(MicroBatchSampler(Points(SAMPLES), plan(), every, seed=3, shuffle="full"))


SPOILT = order()[10].ids[1]
"""A sample of step 4, micro-batch 1."""
ONE = [order()[11].ids[0]]
"""Another of step 4."""
WHOLE = order()[12].ids
"""All samples of micro-batch 0 of step 5, by whose batch the statistics of the model's BatchNorm go."""


def spec(folder: Path, use: type[Small] = Interrupted, **more: Any) -> Document:
    return {
        "job": {"use": f"{use.__module__}:{use.__qualname__}"},
        "seed": 3,
        "length": {"steps": STEPS},
        "batch": {"global": GLOBAL, "micro": MICRO},
        "data": {"drop_last": False},
        "ema": 0.9,
        "checkpoint": {"storage": str(folder), "every": {"steps": 2}, "keep_last": 9},
        "record": {"uri": "off", "digest_every": 1},
        "rehearsal": "off",
        **more,
    }


def left_out(folder: Path, ids: Iterable[int], use: type[Small] = Interrupted, **more: Any) -> Document:
    return spec(folder, use, data={"drop_last": False, "without": ",".join(map(str, ids))}, **more)


def ids_in(folder: Path, ids: Iterable[int]) -> Path:
    path = folder / "ids.txt"
    path.write_text("# withdrawn\n" + "".join(f"{i}\n" for i in ids))
    return path


def without(run: Result, ids: Path, *overrides: str) -> Result:
    here = [f"checkpoint.storage={Path(run.folder).parent}", *overrides]
    return resume_without(RunOptions(local=True), run.run_id, ids, here, uri="off")


def rows(run: Result, first: int = 1) -> list[Any]:
    steps, evaluations = read_history(Path(run.folder))
    found: list[Any] = [
        [bits(getattr(row, name)) for name in DETERMINISTIC] for row in steps if row.step >= first
    ]
    return found + [bits(row.metrics) for row in evaluations if row.step >= first]


def digests(run: Result) -> tuple[Any, Any]:
    return run.weights_digest, run.ema_digest


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A finished run, with checkpoints after every second step."""
    return train(spec(tmp_path_factory.mktemp("original")), local=True)


@pytest.mark.scenario
@pytest.mark.parametrize(
    ("ids", "first"),
    [
        pytest.param(ONE, 4, id="one", marks=pytest.mark.exact),
        pytest.param(WHOLE, 5, id="a whole micro-batch", marks=pytest.mark.exact),
        pytest.param([*ONE, *WHOLE], 4, id="both"),
    ],
)
def test_the_rest_of_the_run_has_the_bits_of_one_that_never_had_the_samples(
    original: Result, tmp_path: Path, ids: list[int], first: int
) -> None:
    forked = without(original, ids_in(tmp_path, ids))
    never = train(left_out(tmp_path / "never", ids), local=True)
    step = (first - 1) // 2 * 2
    assert [row.step for row in read_history(Path(forked.folder)).steps] == [*range(step + 1, STEPS + 1)]
    assert rows(forked) == rows(never, step + 1)
    assert digests(forked) == digests(never)
    assert digests(forked) != digests(original)
    assert rows(never)[: first - 1] == rows(original)[: first - 1]
    kept = json.loads((Path(forked.folder) / "without.json").read_text())
    assert kept["what"].startswith(f"{len({*ids})} sample")
    fields = json.loads((Path(forked.folder) / "fields.json").read_text())
    assert fields["data.without"] == kept["what"]
    assert fields["fork"].endswith(f"@{step} exact")


@pytest.mark.scenario
def test_a_checkpoint_from_after_the_first_use_has_learnt_from_the_sample(
    original: Result, tmp_path: Path
) -> None:
    """What makes the fork exact is where it starts."""
    never = train(left_out(tmp_path, ONE), local=True)
    late = left_out(
        Path(original.folder).parent, ONE, fork={"run": original.run_id, "step": 4, "exact": True}
    )
    assert digests(train(late, local=True)) != digests(never)


@pytest.mark.scenario
def test_any_workers_and_loader_processes_give_the_same_bits(
    pool: Pool, original: Result, tmp_path: Path
) -> None:
    fork = {"run": original.run_id, "step": 2, "storage": str(Path(original.folder).parent), "exact": True}
    forked: Document = left_out(tmp_path, [*ONE, *WHOLE], fork=fork)
    alone = train_attempt(forked, "alone", AttemptOrigin())
    forked["data"]["loader_processes"] = 1
    found: list[Trained] = pool.run(2, train_attempt, forked, "two", AttemptOrigin())
    assert [one.rows for one in found] == [alone.rows] * 2
    assert [one.weights_digest for one in found] == [alone.weights_digest] * 2
    never = train_attempt(left_out(tmp_path, [*ONE, *WHOLE]), "never", AttemptOrigin())
    assert never.weights_digest == alone.weights_digest
    assert never.rows[2:] == alone.rows


@pytest.mark.scenario
def test_a_run_without_samples_that_is_killed_goes_on_to_the_same_bits(
    original: Result, tmp_path: Path
) -> None:
    storage = Path(original.folder).parent
    before = {path.name for path in storage.iterdir()}
    killed = Forked(
        by_command, original.run_id, str(ids_in(tmp_path, WHOLE)), str(storage), env={**os.environ, "KILLED_AFTER": "11"}
    )  # fmt: skip
    assert killed.wait(120) == -signal.SIGKILL
    (run_id,) = {path.name for path in storage.iterdir() if path.is_dir()} - before
    assert max(steps_of(str(storage), run_id)) in (6, 8, 10)  # what was written by then
    found = resume(run_id, [f"checkpoint.storage={storage}"], local=True, uri="off")
    assert digests(found) == digests(train(left_out(tmp_path / "never", WHOLE), local=True))
    assert verify(run_id, uri="off", storage=storage, local=True, all_steps=True).same_bits


def by_command(run_id: str, ids: str, storage: str) -> None:
    resume_without(RunOptions(local=True), run_id, Path(ids), [f"checkpoint.storage={storage}"], uri="off")


@pytest.mark.exact
def test_a_run_that_a_spoilt_sample_ended_is_trained_without_it(tmp_path: Path) -> None:
    nine = {"length": {"steps": 9}}  # in step 10 its BatchNorm would be left with one sample
    with raises(step_problems.LOSS_NOT_FINITE, step=4, micro_batch=1, got="nan") as told:
        train(spec(tmp_path, Spoilt, **nine), local=True)
    run_id = next(path.name for path in tmp_path.iterdir() if path.name in str(told.value))
    here = [f"checkpoint.storage={tmp_path}"]
    found = resume_without(RunOptions(local=True), run_id, ids_in(tmp_path, [SPOILT]), here, uri="off")
    assert found.status == "FINISHED"
    assert digests(found) == digests(
        train(left_out(tmp_path / "never", [SPOILT], Spoilt, **nine), local=True)
    )


@pytest.mark.exact
def test_where_no_checkpoint_is_old_enough_the_run_starts_over(original: Result, tmp_path: Path) -> None:
    first = [order()[1].ids[2]]
    found = without(original, ids_in(tmp_path, first))
    assert read_history(Path(found.folder)).steps[0].step == 1
    assert digests(found) == digests(train(left_out(tmp_path / "never", first), local=True))
    again = without(found, ids_in(tmp_path, [*first, *ONE]))
    assert digests(again) == digests(train(left_out(tmp_path / "more", [*first, *ONE]), local=True))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3\nfour\n", r"^without: line 2 of '.*' is 'four', wanted the number of a sample, counted from 0$"),
        ("-3\n", r"^without: line 1 of '.*' is '-3'"),
        ("# none\n\n", r"^without: '.*' has no ids; give one a line$"),
        ("3\n56\n", r"^without: got id 56, wanted samples of train_data, which has 56, counted from 0$"),
        (None, r"^without: '.*' cannot be read"),
    ],
)
def test_ids_that_are_none_are_told_in_one_line(
    original: Result, tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "ids.txt"
    if text is not None:
        path.write_text(text)
    before = sorted(Path(original.folder).parent.iterdir())
    with pytest.raises(SpecError, match=message) as told:
        without(original, path)
    assert told.value.exit_code == 2
    assert sorted(Path(original.folder).parent.iterdir()) == before


def test_ids_that_the_run_never_uses_and_other_changes_are_refused(tmp_path: Path) -> None:
    short = train(spec(tmp_path, length={"steps": 2}), local=True)
    with raises(NOT_USED, run=short.run_id):
        without(short, ids_in(tmp_path, WHOLE))
    with raises(FIELD_CHANGED, field="optimizer.lr", run=short.run_id):
        without(short, ids_in(tmp_path, WHOLE), "optimizer.lr=1.0")


def test_a_step_that_is_left_without_a_sample_is_refused_by_name(tmp_path: Path) -> None:
    all_of_it = [i for key in order() if key.step == 2 for i in key.ids]
    with raises(step_problems.NO_WEIGHT, step=3, got="0.0", hint=" (data.without leaves samples out)"):
        train(left_out(tmp_path, all_of_it), local=True)
