"""G1, G6: a run that could not be resumed says so while it trains. A spare process takes up a checkpoint, and its next step must have the run's bits.

Most spare processes here are forked from one that has seen no job, which is as fresh as a new interpreter and starts in a moment; some are the real ones.
"""

from __future__ import annotations

import importlib
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import psutil
import pytest

import lockstep.training.integrity.resume_check.spare_check
from lockstep.checkpoint.runs.run_folder import AttemptOrigin, RunFolder
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.errors import ResumeError
from lockstep.spec.loading import load_spec
from lockstep.training.integrity import problems
from lockstep.training.integrity.resume_check import launch
from lockstep.training.integrity.resume_check.request import Answer, NotTried, Request, Taken
from lockstep.training.integrity.resume_check.spare_check import is_checked
from lockstep.training.spare_process import ProcessContext
from tests.cluster.shipped import SHIPPED
from tests.distributed import kinds, late_kinds
from tests.distributed.pool import Pool
from tests.distributed.sparing import RUN, STEP, Ended, ForkedSpare, document, forked, run
from tests.distributed.test_hold_kinds import ALL
from tests.forked import Forked

SOME = (late_kinds.NeedsItsTeacher, late_kinds.ContextVariable, late_kinds.AttributeOfOptimizer)
HONEST = ALL[::60]

SELDOM = {"evaluate": {"every": {"steps": 100_000}}}
OFF = {"verify_after_s": None}


def late(kind: type[late_kinds.Late], folder: Path, seed: int = 0, **more: Any) -> dict[str, Any]:
    """A job of a kind, whose state begins after some step that the seed draws, and counts by the first checkpoint."""
    spec = kinds.document(kind)
    spec["job"]["params"] = {
        "begins": random.Random(f"{kind.__name__} {seed}").randrange(3, 16),
        "seed": seed,
    }
    return document(spec, folder, **more)


@pytest.fixture(autouse=True)
def anew() -> None:
    """What the jobs of other tests have left in this process is no state of this one's."""
    importlib.reload(late_kinds)


def alive(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


# --- state that a resume loses --------------------------------------------------------------------------------


def check_found(kind: type[late_kinds.Late], folder: Path, seed: int) -> None:
    """The run ends by itself, with its newest checkpoint, and says what is wrong."""
    with forked():
        ended = run(late(kind, folder, seed))
    assert isinstance(ended.error, ResumeError), (ended.step, ended.warnings)
    assert (ended.error.code, ended.error.facts["step"]) == (problems.RESUMED_OTHERWISE.code, str(STEP))
    assert kind.named in str(ended.error)
    assert ended.checkpoints[-1] == ended.step
    assert not ended.checked


@pytest.mark.scenario
@pytest.mark.thinned(3)
@pytest.mark.parametrize("kind", SOME, ids=lambda kind: kind.__name__)
def test_state_that_begins_late_and_is_in_no_checkpoint_ends_the_run(
    kind: type[late_kinds.Late], tmp_path: Path
) -> None:
    check_found(kind, tmp_path, seed=1)


@pytest.mark.exact
@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("kind", late_kinds.EVERY, ids=lambda kind: kind.__name__)
def test_state_that_begins_late_is_found_whatever_it_is(
    kind: type[late_kinds.Late], seed: int, tmp_path: Path
) -> None:
    check_found(kind, tmp_path, seed)


def train_apart(spec: dict[str, Any], step: int, answer: str, attempt: int) -> None:
    origin = AttemptOrigin() if attempt == 1 else AttemptOrigin(RUN, attempt, STEP)
    ended = run(spec, most=step, pause_s=0.0, origin=origin)
    Path(answer).write_bytes(pickle.dumps(ended))


def apart(spec: dict[str, Any], step: int, folder: Path, attempt: int = 1) -> Ended:
    """A run of so many steps in a process of its own, from its beginning or from the first checkpoint."""
    answer = folder / f"answer-{attempt}"
    process = Forked(train_apart, spec, step, str(answer), attempt)
    out, err = process.communicate(120)
    assert answer.is_file(), out + err
    ended: Ended = pickle.loads(answer.read_bytes())
    return ended


def check_unseen(kind: type[late_kinds.Late], folder: Path) -> None:
    spec = late(kind, folder / "runs", seed=1, checkpoint=OFF)
    whole = apart(spec, STEP + 10, folder)
    assert whole.error is None
    assert whole.step == STEP + 10
    attempt = RunFolder.open(open_storage(str(folder / "runs")), RUN).claim().number
    resumed = apart(spec, STEP + 10, folder, attempt)
    assert resumed.error is not None or resumed.rows[:2] != whole.rows[STEP : STEP + 2]


@pytest.mark.scenario
@pytest.mark.parametrize("kind", SOME[1:2], ids=lambda kind: kind.__name__)
def test_without_the_check_it_trains_on_and_a_resume_differs(
    kind: type[late_kinds.Late], tmp_path: Path
) -> None:
    """The negative control."""
    check_unseen(kind, tmp_path)


@pytest.mark.exact
@pytest.mark.parametrize("kind", late_kinds.EVERY, ids=lambda kind: kind.__name__)
def test_without_the_check_every_one_of_them_trains_on(kind: type[late_kinds.Late], tmp_path: Path) -> None:
    check_unseen(kind, tmp_path)


# --- honest jobs ----------------------------------------------------------------------------------------------


def check_silent(spec: dict[str, Any]) -> None:
    with forked():
        ended = run(spec)
    assert ended.error is None
    assert ended.checked == [STEP], (ended.step, ended.warnings)
    assert not [text for text in ended.warnings if "resume" in text and "rehearsal" not in text]


@pytest.mark.scenario
@pytest.mark.thinned(4)
@pytest.mark.parametrize("kind", HONEST, ids=lambda kind: kind.__name__)
def test_an_honest_job_is_proven_and_told_nothing(kind: type[kinds.Kind], tmp_path: Path) -> None:
    check_silent(document(kinds.document(kind), tmp_path))


@pytest.mark.exact
@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_honest_job_is_proven(kind: type[kinds.Kind], tmp_path: Path) -> None:
    check_silent(document(kinds.document(kind), tmp_path))


@pytest.mark.exact
@pytest.mark.parametrize(
    "name", [name for name in SHIPPED if name != "phases in fp16"]
)  # which is made to overflow: its loss scale does not last for as many steps
def test_every_shipped_job_is_proven(name: str, tmp_path: Path) -> None:
    check_silent(document(SHIPPED[name](tmp_path), tmp_path / "runs", length={"steps": 100_000}, **SELDOM))


SETTINGS: list[dict[str, Any]] = [
    {"precision": "bf16"},
    {"precision": "fp16"},
    {"ema": 0.9},
    {"data": {"loader_processes": 2}},
    {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}, "schedule": {"name": "linear"}},
]


@pytest.mark.scenario
@pytest.mark.parametrize("settings", SETTINGS[1:2], ids=str)
def test_an_honest_job_is_proven_with_some_settings(settings: dict[str, Any], tmp_path: Path) -> None:
    check_silent(document({**kinds.document(kinds.BatchNorm), **settings}, tmp_path))


@pytest.mark.exact
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_an_honest_job_is_proven_with_any_settings(
    settings: dict[str, Any], seed: int, tmp_path: Path
) -> None:
    kind = (kinds.Dropouts, kinds.Mixup, kinds.BatchNorm, kinds.Lazy)[seed % 4]
    check_silent(document({**kinds.document(kind), **settings, "seed": seed}, tmp_path))


def on_two(spec: dict[str, Any]) -> Ended:
    """In a process of the pool: what its rank came to."""
    with forked():
        return run(spec, pause_s=0.05)


@pytest.mark.exact
@pytest.mark.parametrize("sharding", ["none", "optimizer", "full"])
def test_a_run_on_two_workers_is_proven(pool: Pool, tmp_path: Path, sharding: str) -> None:
    spec = document({**kinds.document(kinds.Dropouts), "sharding": sharding}, tmp_path)
    first, other = pool.run(2, on_two, spec)
    assert (first.error, other.error) == (None, None)
    assert (first.checked, other.checked) == ([STEP], [])


@pytest.mark.scenario
def test_all_of_two_workers_end_with_the_error(pool: Pool, tmp_path: Path) -> None:
    for ended in pool.run(2, on_two, late(late_kinds.JobAttribute, tmp_path)):
        assert isinstance(ended.error, ResumeError)
        assert "no checkpoint restores job.patience" in str(ended.error)


# --- a spare process that fails -------------------------------------------------------------------------------


class Killed(ForkedSpare):
    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._process.kill()


class Stopped(ForkedSpare):
    pids: ClassVar[list[int]] = []

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._process.send_signal(signal.SIGSTOP)
        self.pids.append(self._process.pid)


class TooLate(ForkedSpare):
    """It comes to read a checkpoint that is deleted by then."""

    def __init__(self, request: Request) -> None:
        super().__init__(replace(request, step=request.step + 1))


def check_harmless(spec: dict[str, Any], spare: type[ForkedSpare], told: str) -> None:
    with mock.patch.object(lockstep.training.integrity.resume_check.spare_check, "start_spare", spare):
        ended = run(spec)
    assert ended.error is None
    assert not ended.checked
    (text,) = (text for text in ended.warnings if text.startswith("resume check"))
    assert told in text


def test_a_killed_spare_is_told_once_and_the_run_goes_on(tmp_path: Path) -> None:
    check_harmless(document(kinds.document(kinds.Dropouts), tmp_path), Killed, "ended with -9")


def test_a_spare_that_never_answers_is_ended(tmp_path: Path) -> None:
    with mock.patch.object(lockstep.training.integrity.resume_check.spare_check, "LIMIT_S", 0.3):
        spec = document(kinds.document(kinds.Dropouts), tmp_path)
        check_harmless(spec, Stopped, "had not answered after 0 s")
    assert not any(map(alive, Stopped.pids))


@pytest.mark.scenario
def test_a_checkpoint_that_is_deleted_meanwhile_does_no_harm(tmp_path: Path) -> None:
    check_harmless(document(kinds.document(kinds.Dropouts), tmp_path), TooLate, "could not read it")


@pytest.mark.scenario
def test_retention_that_is_faster_than_the_spare_does_no_harm(tmp_path: Path) -> None:
    """Every step is saved, and only the newest checkpoint is kept."""
    keep = {"every": {"steps": 1}, "keep_last": 1}
    with forked():
        ended = run(document(kinds.document(kinds.Dropouts), tmp_path, checkpoint=keep), most=200)
    assert ended.error is None
    assert ended.step <= 200


@pytest.mark.scenario
def test_no_spare_outlives_the_run(tmp_path: Path) -> None:
    with mock.patch.object(lockstep.training.integrity.resume_check.spare_check, "start_spare", Stopped):
        assert run(document(kinds.document(kinds.Dropouts), tmp_path), most=STEP + 60).error is None
    assert Stopped.pids
    assert not any(map(alive, Stopped.pids))


class FlippedOnce(ForkedSpare):
    """The first one hands over a bit that has flipped."""

    flips: ClassVar[int] = 1

    def answer(self) -> Answer | str:
        answer = super().answer()
        assert isinstance(answer, Taken)
        if type(self).flips == 0:
            return answer
        type(self).flips -= 1
        tensors = dict(answer.evidence.tensors)
        tensors["0.weight"] ^= 1
        return replace(answer, evidence=replace(answer.evidence, tensors=tensors))


@pytest.mark.scenario
def test_a_difference_that_another_process_does_not_confirm_ends_nothing(tmp_path: Path) -> None:
    check_harmless(
        document(kinds.document(kinds.Dropouts), tmp_path), FlippedOnce, "first '0.weight' after the update"
    )


@pytest.mark.scenario
def test_where_memory_is_short_the_check_is_left_out_and_told(tmp_path: Path) -> None:
    def lacking(device: object) -> str:
        return "it wants 10 MB of memory, of which 5 MB can be had"

    with mock.patch.object(lockstep.training.integrity.resume_check.spare_check, "lacking_memory", lacking):
        check_harmless(document(kinds.document(kinds.Dropouts), tmp_path), ForkedSpare, "wants 10 MB")


class EditedSince(kinds.Kind):
    """A job whose code is not what the run began with: here because a variable says so."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        if os.environ.get("POOL_EDITED"):
            raise RuntimeError("half edited")


class Edited(ForkedSpare):
    def __init__(self, request: Request) -> None:
        environment = {**request.context.environment, "POOL_EDITED": "1"}
        super().__init__(replace(request, context=replace(request.context, environment=environment)))


@pytest.mark.scenario
def test_a_job_that_cannot_be_made_a_second_time_ends_nothing(tmp_path: Path) -> None:
    """Its source was edited, or the run has the port that it wants: neither says that a resume would fail."""
    check_harmless(document(kinds.document(EditedSince), tmp_path), Edited, "could not try it")


# --- the real process -----------------------------------------------------------------------------------------


@pytest.mark.scenario
def test_the_check_changes_no_bit(tmp_path: Path) -> None:
    on = document(kinds.document(kinds.Dropouts), tmp_path / "on")
    off = document(kinds.document(kinds.Dropouts), tmp_path / "off", checkpoint=OFF)
    with forked():
        checked = run(on)
    plain = run(off, most=checked.step, pause_s=0.0)
    assert (checked.checked, plain.checked) == ([STEP], [])
    assert plain.rows == checked.rows


WAITS = """
import os, sys, time
from lockstep.training.spare_process import make_way
make_way(int(sys.argv[1]))
print(os.getpid(), os.getpriority(os.PRIO_PROCESS, 0), flush=True)
time.sleep(60)
"""

PARENT = f"""
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {WAITS!r}, str(os.getpid())])
time.sleep(60)
"""


def test_a_spare_ends_with_its_parent_and_has_the_least_priority() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, niceness = map(int, parent.stdout.readline().split())
    assert niceness == 19
    assert alive(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until = time.monotonic() + 10
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert not alive(pid)


@pytest.mark.scenario
def test_a_real_process_answers_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that is not there it can only say so, from the surroundings that the run began in."""
    spec = load_spec(document(kinds.document(kinds.Dropouts), tmp_path / "runs"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(launch.tempfile, "tempdir", None)
    before = set(tmp_path.rglob("*"))
    process = launch.SpareProcess(Request(spec.document(), "run", 20, "cpu", ProcessContext.here()))
    until = time.monotonic() + 240
    while not process.ended() and time.monotonic() < until:
        time.sleep(0.05)
    answer = process.answer()
    process.end()
    assert isinstance(answer, NotTried), answer
    assert "no run run in" in answer.message
    assert 0 < answer.cpu_s < 60
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.exact
def test_what_the_job_has_put_into_its_process_since_is_not_handed_on(tmp_path: Path) -> None:
    """An outage leaves no variable of a process."""
    spec = late(late_kinds.Environment, tmp_path)
    with forked():
        ended = run(spec)
    os.environ.pop("LATE_FACTOR", None)
    assert isinstance(ended.error, ResumeError)


# --- where it is done -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "checked"),
    [
        ({}, True),
        ({"rehearsal": "quick"}, True),
        ({"determinism": {"mode": "strict", "recheck": 0.01}}, True),
        ({"determinism": {"mode": "strict", "recheck": 0}}, False),
        ({"determinism": "fast"}, False),
        ({"reduction": "native"}, False),
        ({"rehearsal": "off"}, False),
        ({"checkpoint": {"verify_after_s": None}}, False),
    ],
    ids=str,
)
def test_where_checkpoints_are_tried(settings: dict[str, Any], checked: bool) -> None:
    assert is_checked(load_spec({"job": {"use": "a:B"}, **settings})) is checked


@pytest.mark.scenario
def test_a_run_shorter_than_a_minute_starts_no_process(tmp_path: Path) -> None:
    def never(request: Request) -> Any:
        raise AssertionError("a process was started")

    with mock.patch.object(lockstep.training.integrity.resume_check.spare_check, "start_spare", never):
        spec = document(kinds.document(kinds.Dropouts), tmp_path, checkpoint={"verify_after_s": 60.0})
        assert run(spec, most=100, pause_s=0.0).error is None
