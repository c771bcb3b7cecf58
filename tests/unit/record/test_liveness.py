"""A run whose process has gone is told from one that lives, on this machine at once and elsewhere by its silence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.record.events.union import Finished
from lockstep.record.mirror.stores import reader
from lockstep.record.recorder import Recorder
from lockstep.record.runs import heartbeat
from lockstep.record.runs.heartbeat import SILENT_S, process_tags, vanished
from lockstep.spec.fields import Spec

NOW = time.time()


def test_this_very_process_lives_however_long_it_was_silent() -> None:
    assert vanished("a", process_tags(NOW - 10 * SILENT_S)) == ""


@pytest.mark.parametrize("reaped", [False, True])
def test_a_killed_process_of_this_machine_is_known_at_once(reaped: bool) -> None:
    script = "import time; from lockstep.record.runs.heartbeat import process_tags; print(process_tags(time.time())['lockstep.process'], flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    tags = {**process_tags(NOW), "lockstep.process": process.stdout.readline().strip()}
    assert vanished("a", tags) == ""
    process.send_signal(signal.SIGKILL)
    if reaped:
        process.wait()
    else:
        time.sleep(0.5)  # a zombie has gone as well
    assert vanished("a", tags).startswith("the process that recorded it is gone (host ")
    process.wait()
    process.stdout.close()


def test_another_process_with_the_same_id_is_not_taken_for_it() -> None:
    tags = process_tags(NOW)
    place, pid, started = tags["lockstep.process"].split()
    assert vanished("a", {**tags, "lockstep.process": f"{place} {pid} {int(started) + 1}"})


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time since this machine was started, as its reader takes it; a home of the reader's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    now = [1000.0]
    monkeypatch.setattr(heartbeat, "_now", lambda: now[0])
    return now


@pytest.mark.parametrize("process", ["", "another-boot/pid:[1] 17 99"])
@pytest.mark.parametrize("wrong_s", [-600.0, 0.0, 600.0, 10 * SILENT_S])
def test_a_process_elsewhere_is_judged_by_a_beat_that_does_not_move(
    process: str, wrong_s: float, clock: list[float]
) -> None:
    """However wrong one of the two clocks is: the beat's own time is never compared with anything."""

    def beat() -> dict[str, str]:
        return {**process_tags(NOW + wrong_s), "lockstep.process": process}

    for _ in range(30):  # a live one, looked at for an hour
        tags = beat()
        for _ in range(6):
            assert vanished("a", tags) == ""
            clock[0] += 20.0
    silent = beat()
    assert vanished("a", silent) == ""
    clock[0] += SILENT_S - 2
    assert vanished("a", silent) == ""
    assert vanished("b", silent) == ""  # another run
    clock[0] += 4
    assert "nothing was heard for 152 s" in vanished("a", silent)
    assert vanished("a", beat()) == ""


def test_what_was_seen_before_the_machine_was_started_again_says_nothing(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = {**process_tags(NOW), "lockstep.process": ""}
    assert vanished("a", silent) == ""
    monkeypatch.setattr(heartbeat, "pid_namespace", lambda: "the next boot")
    clock[0] += 10 * SILENT_S
    assert vanished("a", silent) == ""


def test_a_reader_without_a_home_marks_nothing(
    clock: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    silent = {**process_tags(NOW), "lockstep.process": ""}
    for _ in range(3):
        assert vanished("a", silent) == ""
        clock[0] += 10 * SILENT_S


def test_a_run_that_never_said_anything_is_left_alone() -> None:
    assert vanished("a", {}) == ""


READER = """
import sys, time
from pathlib import Path
from lockstep.record.runs import heartbeat
from lockstep.record.mirror.stores import reader
shift, uri, run_id = float(sys.argv[1]), sys.argv[2], sys.argv[3]
now = time.time
time.time = lambda: now() + shift
heartbeat.pid_namespace = lambda: "another machine"
heartbeat.SILENT_S = 3.0
print(reader(uri, Path(sys.argv[4])).run(run_id).status)
"""


@pytest.mark.parametrize("kept", ["off", pytest.param("mlflow", marks=pytest.mark.exact)])
@pytest.mark.parametrize("shift_s", [pytest.param(-600.0, marks=pytest.mark.exact), 600.0])
@pytest.mark.scenario
def test_readers_with_wrong_clocks_leave_a_live_run_alone(
    shift_s: float,
    kept: str,
    request: pytest.FixtureRequest,
    spec: Callable[..., Spec],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One in another process looks at a real store; then one that is right marks a run that was cut off, and the run takes it back."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("lockstep.record.mirror.reconciler.BEAT_S", 0.2)
    monkeypatch.setattr("lockstep.record.writer.FLUSH_S", 0.1)
    uri = kept if kept == "off" else request.getfixturevalue("database")
    folder = tmp_path / "runs"
    recorder = Recorder(spec(uri))
    recorder.start()
    run_id = recorder.run_id()

    def looked() -> str:
        return subprocess.run(
            [sys.executable, "-c", READER, str(shift_s), uri, run_id, str(folder)],
            capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        ).stdout.strip()  # fmt: skip

    assert [looked() for _ in range(2)] == ["RUNNING"] * 2
    with monkeypatch.context() as patched:
        patched.setattr("lockstep.record.mirror.reconciler.BEAT_S", 1e9)
        time.sleep(0.5)
        assert looked() == "RUNNING"
        time.sleep(3.0)
        assert looked() == "FAILED"
    until = time.monotonic() + 30
    while (run := reader(uri, folder).run(run_id)).status != "RUNNING":
        assert time.monotonic() < until
        time.sleep(0.1)
    assert run.tags["lockstep.vanished"] == run.tags["lockstep.error"] == ""
    recorder.tell(Finished({}))
    recorder.close()
    ended = reader(uri, folder).run(run_id)
    assert (ended.status, ended.tags["lockstep.vanished"], ended.tags["lockstep.error"]) == (
        "FINISHED",
        "",
        "",
    )
