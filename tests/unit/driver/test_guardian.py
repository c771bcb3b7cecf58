"""A run in one process that hangs, or is killed, is ended and recorded by the process beside it; one that a person holds is left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.driver.guardian import Guardian, ending_line

pytestmark = pytest.mark.scenario

ROOT = Path(__file__).parents[3]

RUN = """
import os, re, signal, sys, threading, time
from pathlib import Path
from lockstep.driver.guardian import Guardian
from lockstep.driver.stacks import stacks_on_signal
from lockstep.spec.loading import load_spec

spec = load_spec({"job": {"use": "any:Job"}, "length": {"steps": 1}, "record": {"uri": "off"}, "checkpoint": {"storage": sys.argv[1]}})
with stacks_on_signal() as stacks, Guardian(spec.document(), spec.folder, watched=(1.0, 3.0), notify="cat > notified") as guardian:
    guardian.tell(stacks=stacks)
    guardian.alive(1)
    print(flush=True)
"""


def run(folder: Path, then: str) -> subprocess.Popen[str]:
    """A process with a guardian, which has given one sign of life and goes on with `then`."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUN + f"    {then}\n", str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'platform'}:{ROOT}"},
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    return process


def recorded(folder: Path) -> dict[str, Any]:
    """The run that the guardian has recorded."""
    until = time.monotonic() + 60
    while not (files := list(folder.glob("*/error.txt"))):
        assert time.monotonic() < until
        time.sleep(0.1)
    found: dict[str, Any] = json.loads((files[0].parent / "run.json").read_text())
    while found["status"] == "RUNNING":
        assert time.monotonic() < until
        found = json.loads((files[0].parent / "run.json").read_text())
    return found


@pytest.mark.thinned(2)
@pytest.mark.parametrize("hangs", ["time.sleep(600)", "re.match('(a+)+$', 'a' * 60 + 'b')"])
def test_a_process_that_makes_no_progress_is_killed_and_recorded(tmp_path: Path, hangs: str) -> None:
    """Also where C code holds Python's lock. The stacks of its threads are in the record."""
    process = run(tmp_path, hangs)
    _, err = process.communicate(timeout=60)
    found = recorded(tmp_path)
    assert process.returncode == -signal.SIGKILL
    assert found["status"] == "FAILED"
    assert found["tags"]["lockstep.error"].startswith("it made no progress for 1 s, so it was ended")
    assert err.startswith("lockstep: it made no progress for 1 s")
    told = json.loads((tmp_path / "notified").read_text())
    assert (told["event"], told["status"], told["step"]) == ("failure", "FAILED", 0)
    assert told["error"].startswith("it made no progress")
    assert told["run_id"] and tmp_path / told["run_id"] == Path(told["folder"])
    (stacks,) = tmp_path.glob("*/stacks.txt")
    assert "most recent call first" in stacks.read_text()


def test_signs_of_life_keep_it(tmp_path: Path) -> None:
    process = run(tmp_path, "[(time.sleep(0.5), guardian.alive(n)) for n in range(2, 12)]")
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 0
    assert not list(tmp_path.glob("*/error.txt"))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("held", ["breakpoint()", "os.kill(os.getpid(), signal.SIGSTOP)"])
def test_what_a_person_holds_is_not_taken_for_hung(tmp_path: Path, held: str) -> None:
    """At a debugger's prompt, and stopped as by Ctrl-Z; the control is the sleep above."""
    process = run(tmp_path, held)
    time.sleep(12.0)
    assert process.poll() is None
    process.send_signal(signal.SIGCONT)
    assert process.communicate("continue\n", timeout=60)[0] is not None
    assert process.returncode == 0
    assert not list(tmp_path.glob("*/error.txt"))


def test_a_killed_process_leaves_no_run_where_none_had_begun(tmp_path: Path) -> None:
    process = run(tmp_path, "time.sleep(600)")
    process.kill()
    process.communicate(timeout=60)
    assert not list(tmp_path.iterdir())  # and nobody is notified


def test_a_run_goes_on_without_its_guardian(tmp_path: Path) -> None:
    with Guardian({}, tmp_path) as guardian:
        assert guardian._process is not None
        guardian._process.kill()
        guardian.tell(run_id="a")
        guardian.alive(100_000)
        assert guardian.record("why", "") == (None, "record: its guardian is gone")


KILLED_RUN = """
import os, signal, sys
from pathlib import Path
from lockstep.driver.guardian import Guardian
from lockstep.record.events.union import Started
from lockstep.record.recorder import Recorder
from lockstep.spec.loading import load_spec

sys.path.insert(0, str(Path.cwd()))
spec = load_spec({"job": {"use": "any:Job"}, "length": {"steps": 1}, "record": {"uri": "off"}, "checkpoint": {"storage": sys.argv[1]}})
guardian = Guardian(spec.document(), spec.folder)
with guardian:
    recorder = Recorder(spec, apart=False)
    recorder.start()
    recorder.tell(Started({"identity": "abc"}))
    guardian.tell(run_id=recorder.run_id())
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_is_guarded_whatever_files_lie_beside_the_job(tmp_path: Path) -> None:
    """Files with the names of Python's modules end neither the guardian nor what records the end."""
    for name in ("random", "typing", "queue"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(7)")
    runs = tmp_path / "runs"
    runs.mkdir()
    # A process that has imported Python's own before it searches the folder.
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import random, typing, queue\n" + KILLED_RUN, str(runs)],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": f"{ROOT / 'platform'}:{ROOT}"}, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    found = recorded(runs)
    assert found["status"] == "FAILED"
    assert "it was killed, or it crashed" in found["tags"]["lockstep.error"]


def test_the_line_says_which_run_and_what_is_not_recorded() -> None:
    assert ending_line("why", "a", Path("runs"), "") == "why; run a, whose error.txt is in 'runs/a'"
    assert ending_line("why", None, Path("runs"), "the store is away") == "why (the store is away)"
