"""A clock that stands while the process is stopped, and goes on while it waits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from lockstep import running_time
from lockstep.clusters.bounded_calls import within
from lockstep.errors import SilentError

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, threading, time
from lockstep import running_time
from lockstep.clusters import bounded_calls
running_time.MOST_S, running_time.SLICE_S = 0.5, 0.1
began, since = running_time.running_s(), time.monotonic()
bounded_calls.within(2.0, "it", lambda: (print(flush=True), time.sleep(1.0)))
print(json.dumps([running_time.running_s() - began, time.monotonic() - since]))
"""


LIMITS = """
import json, threading
from types import SimpleNamespace as Double
from lockstep import running_time
from lockstep.attempts import worker_group
from lockstep.attempts.attempt_watch import AttemptWatch
from lockstep.attempts.worker_group import WorkerGroup
from lockstep.sweeps import recorders, trial_run

LIMIT_S = 1.0
running_time.MOST_S, running_time.SLICE_S = 0.2, 0.1
worker_group.END_S = recorders.ANSWER_S = recorders.CLOSING_S = trial_run.SAVE_S = LIMIT_S


def made(kind, **parts):
    instance = object.__new__(kind)
    vars(instance).update(parts)
    return instance


never, nothing = threading.Event(), lambda *_: None
group = made(
    WorkerGroup, _started=True, _trainer=None, over=never, origin=Double(attempt=1), joining_workers=Double(end=nothing)
)
watch = made(
    AttemptWatch,
    _spec=Double(faults=Double(longest_silence_s=LIMIT_S)),
    _recording=Double(ask_stop=nothing),
    _workers=Double(over=never, end=nothing),
)
actor = recorders.RecordersActor("", [])
actor._closing = [threading.Thread(target=never.wait, daemon=True)]
actor._closing[0].start()
waits = {
    "the end of the workers": group.end,
    "the last save of an attempt": watch._end_saved,
    "the run of a trial": made(recorders.TrialRecorder, _looked=never).known_or_reused,
    "the records of a sweep": lambda: actor.close("over"),
    "the save of a trial": lambda: trial_run.TrialRun(None, "0", {}, nothing).wait_for_checkpoint(1),
}
counted_s = {}


def count(name, wait):
    began = running_time.running_s()
    try:
        wait()
    except Exception:
        pass
    counted_s[name] = running_time.running_s() - began


threads = [threading.Thread(target=count, args=waiting) for waiting in waits.items()]
for thread in threads:
    thread.start()
print(flush=True)
for thread in threads:
    thread.join()
print(json.dumps(counted_s))
"""


def stopped(program: str, seconds: float) -> Any:
    """What a program prints last that is stopped for so long after its first line."""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "platform")},
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    process.send_signal(signal.SIGCONT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return json.loads(out)


@pytest.mark.scenario
def test_a_process_that_is_stopped_and_continued_has_waited_for_nobody() -> None:
    """A wait of two seconds outlives a stop of three; by the wall's clock it would have ended."""
    counted_s, passed_s = stopped(PROGRAM, 3.0)
    assert counted_s < 2.0 < 3.0 < passed_s


@pytest.mark.scenario
def test_limits_on_other_processes_outlive_a_stop() -> None:
    """Each of one second; by the wall's clock all of them would end as the process continues, after a fraction of one."""
    counted_s = stopped(LIMITS, 1.5)
    assert len(counted_s) == 5
    assert {name: s for name, s in counted_s.items() if s < 1.0} == {}


def test_a_wait_that_is_too_long_ends() -> None:
    """The control: nothing was stopped."""
    with pytest.raises(SilentError, match="it did not answer for 1 s"):
        within(1.0, "it", lambda: time.sleep(60.0))


def test_a_wait_tells_whether_it_was_over_in_time() -> None:
    over, thread = Event(), Thread(target=time.sleep, args=(0.0,))
    thread.start()
    assert running_time.join(thread, 60.0)
    assert not running_time.wait_for(over.wait, 0.05)
    over.set()
    assert running_time.wait_for(over.wait, 60.0)
    assert running_time.wait_for(over.wait, -1.0)  # as with several waits that share a limit


def test_it_counts_what_passes_between_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(running_time.time, "monotonic", lambda: now[0])
    clock = running_time._RunningTime()
    readings = []
    for passed_s in (0.5, 1.0, 3600.0, 0.25):
        now[0] += passed_s
        readings.append(clock.read_s())
    assert readings == [0.5, 1.5, 1.5 + running_time.MOST_S, 1.75 + running_time.MOST_S]
