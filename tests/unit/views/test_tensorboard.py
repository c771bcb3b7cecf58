"""TensorBoard's own reader finds in an event file what the ledger has: each row once, however often it was written."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from lockstep import resume, train
from lockstep.record.events.metrics import evaluation_points, step_points
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.rows import EvaluationRow, Observation, StepRow
from lockstep.record.ledger.tables import OBSERVATIONS, read_history, read_observations
from lockstep.views import problems, tensorboard
from lockstep.views.curves import Curves, curves_of
from lockstep.views.tensorboard import Written, write_events
from tests.in_process import here
from tests.raised import raises
from tests.unit.record.rows import corrupted, evaluation_row, step_row
from tests.unit.views.recorded import RUN, curves, record

Points = dict[str, list[tuple[int, float, str]]]


def as_stored(value: float) -> str:
    """A value as TensorBoard has it, a float32, to the bit."""
    with np.errstate(over="ignore"):
        return np.float32(value).tobytes().hex()


def in_file(path: str) -> Points:
    """Every scalar in the folder of an event file: step, wall time and the bits of its value, by its key."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(Path(path).parent), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        key: [(one.step, one.wall_time, as_stored(one.value)) for one in accumulator.Scalars(key)]
        for key in accumulator.Tags()["scalars"]
    }


def in_ledger(
    steps: Sequence[StepRow], evaluations: Sequence[EvaluationRow], observed: Sequence[Observation] = ()
) -> Points:
    found: Points = {}
    before = None
    for row in steps:
        for point in step_points(row, before, scaled=False):
            found.setdefault(point.key, []).append((point.step, row.wall_clock, as_stored(point.value)))
        before = row
    for evaluation in evaluations:
        for point in evaluation_points(evaluation):
            found.setdefault(point.key, []).append(
                (point.step, evaluation.wall_clock, as_stored(point.value))
            )
    for one in observed:
        for key, value in one.values.items():
            found.setdefault(key, []).append((one.step, one.wall_clock, as_stored(value)))
    return found


STEPS = [step_row(step) for step in range(1, 41)]
EVALUATIONS = [evaluation_row(step) for step in (10, 20, 30, 40)]


def rows(upto: int) -> list[StepRow | EvaluationRow]:
    """As a run tells them."""
    found: list[StepRow | EvaluationRow] = []
    for step in STEPS[:upto]:
        found += [step, *(one for one in EVALUATIONS if one.step == step.step)]
    return found


def test_the_event_file_has_the_points_of_the_ledger(tmp_path: Path) -> None:
    odd = [step_row(41, loss=math.nan), step_row(42, loss=-math.inf, grad_norm=1e300), step_row(43, lr=-0.0)]
    record(tmp_path, [*rows(40), *odd])
    written = write_events(curves(tmp_path), tmp_path / "logs")
    assert written == Written(RUN, written.file, 47, 47)
    found = in_file(written.file)
    assert found == in_ledger([*STEPS, *odd], EVALUATIONS)
    assert {"train/loss", "train/entropy", "train/lr", "perf/samples_per_s", "eval/loss"} <= found.keys()
    assert [step for step, _, _ in found["train/loss"]] == list(range(1, 44))


def test_observations_are_there_beside_the_rows(tmp_path: Path) -> None:
    """In one order, whether the journal or a table has them, so that a later call adds what is new alone."""
    observed = [
        Observation(step, {"perf/memory/rank_0_mb": 3.0, "layers/0/gradient_norm": 0.5 * step}, step + 0.25)
        for step in (1, 10, 20)
    ]
    record(tmp_path, [*rows(1), observed[0]])
    write_events(curves(tmp_path), tmp_path / "logs")
    record(tmp_path, [*rows(20)[1:], *observed[1:]])
    written = write_events(curves(tmp_path), tmp_path / "logs")
    assert (written.rows, written.added) == (20 + 2 + 3, 20 + 2 + 3 - 2)
    assert in_file(written.file) == in_ledger(STEPS[:20], EVALUATIONS[:2], observed)
    anew = write_events(curves(tmp_path), tmp_path / "again")
    assert Path(anew.file).read_bytes() == Path(written.file).read_bytes()


def test_a_second_call_adds_what_is_new_alone(tmp_path: Path) -> None:
    """What is there is not written again: a TensorBoard that is open goes on reading. After each row, and without a new one."""
    told = rows(40)
    whole = record(tmp_path / "whole", told).parent
    expected = Path(write_events(curves(whole), tmp_path / "expected").file).read_bytes()
    before, have, inode = b"", 0, 0
    for count in (1, 9, 10, 11, 11, 30, len(told)):
        record(tmp_path / "runs", told[have:count])
        written = write_events(curves(tmp_path / "runs"), tmp_path / "logs")
        assert (written.rows, written.added) == (count, count - have)
        now = Path(written.file)
        assert now.read_bytes().startswith(before)
        assert inode in (0, now.stat().st_ino)
        before, have, inode = now.read_bytes(), count, now.stat().st_ino
    assert before == expected
    assert in_file(written.file) == in_ledger(STEPS, EVALUATIONS)


def test_a_writer_that_does_not_look_at_what_is_there_writes_it_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of all these: the comparison sees doubles."""

    def add(file: BinaryIO, curves: Curves) -> tuple[int, int]:
        file.seek(0, os.SEEK_END)
        records = list(tensorboard._records(curves))
        file.writelines(records)
        return len(records), len(records)

    monkeypatch.setattr(tensorboard, "_add", add)
    record(tmp_path, rows(12))
    write_events(curves(tmp_path), tmp_path / "logs")
    found = in_file(write_events(curves(tmp_path), tmp_path / "logs").file)
    assert found != in_ledger(STEPS[:12], EVALUATIONS[:1])
    assert len(found["train/loss"]) == 24


def test_a_file_that_was_cut_off_is_made_whole(tmp_path: Path) -> None:
    """Whoever was killed while it wrote left any part of a record behind."""
    record(tmp_path, rows(12))
    path = Path(write_events(curves(tmp_path), tmp_path / "logs").file)
    whole = path.read_bytes()
    for size in (0, 1, 30, 200, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        write_events(curves(tmp_path), tmp_path / "logs")
        assert path.read_bytes() == whole


def test_a_row_that_was_recorded_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    """After wrong bits steps are taken again: the file is written anew, and has none of them twice. So for another spec."""
    record(tmp_path, rows(12))
    path = Path(write_events(curves(tmp_path), tmp_path / "logs").file)
    before = path.read_bytes()
    again = [step_row(step, loss=7.0, attempt=2) for step in (11, 12, 13)]
    record(tmp_path, [corrupted(12, since=10), *again])
    written = write_events(curves(tmp_path), tmp_path / "logs")
    assert not path.read_bytes().startswith(before)
    assert in_file(written.file) == in_ledger([*STEPS[:10], *again], EVALUATIONS[:1])
    record(tmp_path, [], name="renamed", seed=3)
    written = write_events(curves(tmp_path), tmp_path / "logs")
    assert written.file == str(path), "one folder a run"
    assert in_file(written.file) == in_ledger([*STEPS[:10], *again], EVALUATIONS[:1])


def test_a_journal_that_is_being_written_is_read(tmp_path: Path) -> None:
    folder = record(tmp_path, rows(35))
    journal = Journal(folder)
    with (folder / "journal.jsonl").open("ab") as file:
        file.write(b'{"step":[36,3')  # half a line
    written = write_events(curves(tmp_path), tmp_path / "logs")
    journal.close()
    assert in_file(written.file) == in_ledger(STEPS[:35], EVALUATIONS[:3])


def test_the_spec_is_there_as_text_and_as_hyperparameters(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    record(tmp_path, rows(3), optimizer={"name": "sgd", "lr": 0.5, "nesterov": False}, workers={"max": 3})
    accumulator = EventAccumulator(str(Path(write_events(curves(tmp_path), tmp_path / "logs").file).parent))
    accumulator.Reload()
    (text,) = accumulator.Tensors("spec")
    assert b"    seed: 0\n" in text.tensor_proto.string_val[0]
    content = accumulator.SummaryMetadata(SESSION_START_INFO_TAG).plugin_data.content
    found = HParamsPluginData.FromString(content).session_start_info.hparams
    assert found["optimizer.lr"].number_value == 0.5
    assert found["optimizer.name"].string_value == "sgd"
    assert "workers.max" not in found, "placement changes no bit"


@pytest.mark.scenario
def test_a_run_that_was_stopped_and_resumed_is_there_once(tmp_path: Path) -> None:
    """A real run: its curves before and after it is taken up, from a folder and from a store's copy of the ledger."""
    spec: Mapping[str, Any] = {
        "job": {"use": "tests.unit.views.jobs:Stopped"},
        "batch": {"global": 32},
        "length": {"steps": 20},
        "evaluate": {"every": {"steps": 4}},
        "record": {"uri": "off"},
        "checkpoint": {"storage": str(tmp_path)},
        "rehearsal": "off",
    }
    stopped = train(spec, local=True)
    assert (stopped.status, stopped.step) == ("KILLED", 8)
    folder = tmp_path / stopped.run_id
    early = write_events(curves_of(stopped.run_id, "off", folder), tmp_path / "logs")
    found = in_file(early.file)
    assert [step for step, _, _ in found["train/loss"]] == list(range(1, 9))
    whole = resume(stopped.run_id, [f"record.folder={tmp_path}"], local=True, uri="off")
    assert (whole.status, whole.step) == ("FINISHED", 20)
    history = read_history(folder)
    written = write_events(curves_of(stopped.run_id, "off", folder), tmp_path / "logs")
    observed = read_observations(folder / OBSERVATIONS)
    assert in_file(written.file) == in_ledger(history.steps, history.evaluations, observed)
    assert written.rows == 20 + 5 + len(observed)
    (folder / "journal.jsonl").unlink()
    alone = write_events(curves_of(stopped.run_id, "off", folder), tmp_path / "of the ledger")
    assert Path(alone.file).read_bytes() == Path(written.file).read_bytes()


def test_the_command_writes_several_runs_and_refuses_what_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def call(*words: str) -> tuple[int, str, str]:
        return here(monkeypatch, capfd, tmp_path, "record", "tensorboard", *words, "--uri", "off")

    record(tmp_path / "runs", rows(5))
    code, out, _ = call(RUN, RUN, "--json")
    assert code == 0
    told = json.loads(out)
    assert told == {
        "logdir": "tensorboard",
        "runs": [{"run_id": RUN, "file": told["runs"][0]["file"], "rows": 5, "added": 5}],
    }
    assert in_file(str(tmp_path / told["runs"][0]["file"])) == in_ledger(STEPS[:5], [])
    code, out, err = call(RUN, "nothing", "--logdir", "elsewhere")
    assert (code, out) == (2, "")
    assert err.startswith("lockstep: run nothing: ")
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "elsewhere").exists(), "nothing is left behind"
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "tensorboard", None)
        code, _, err = call(RUN)
    assert code == 2
    assert (
        err
        == "lockstep: tensorboard: the package is not installed; pip install 'lockstep-train[tensorboard]'\n"
    )


def test_a_run_without_a_step_is_refused(tmp_path: Path) -> None:
    record(tmp_path, [])
    with raises(problems.NO_STEP):
        curves(tmp_path)
