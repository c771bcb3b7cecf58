"""A clock that stands while the process is stopped, and goes on while it waits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep import running_time
from lockstep.clusters.bounded_calls import within
from lockstep.errors import SilentError

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, threading, time
from lockstep import running_time
from lockstep.clusters import bounded_calls
running_time.MOST_S, bounded_calls.SLICE_S = 0.5, 0.1
began, since = running_time.running_s(), time.monotonic()
bounded_calls.within(2.0, "it", lambda: (print(flush=True), time.sleep(1.0)))
print(json.dumps([running_time.running_s() - began, time.monotonic() - since]))
"""


def test_a_process_that_is_stopped_and_continued_has_waited_for_nobody() -> None:
    """A wait of two seconds outlives a stop of three; by the wall's clock it would have ended."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "platform")},
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGSTOP)
    time.sleep(3.0)
    process.send_signal(signal.SIGCONT)
    out, _ = process.communicate(timeout=60)
    counted_s, passed_s = json.loads(out)
    assert process.returncode == 0
    assert counted_s < 2.0 < 3.0 < passed_s


def test_a_wait_that_is_too_long_ends() -> None:
    """The control: nothing was stopped."""
    with pytest.raises(SilentError, match="it did not answer for 1 s"):
        within(1.0, "it", lambda: time.sleep(60.0))


def test_it_counts_what_passes_between_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(running_time.time, "monotonic", lambda: now[0])
    clock = running_time._RunningTime()
    readings = []
    for passed_s in (0.5, 1.0, 3600.0, 0.25):
        now[0] += passed_s
        readings.append(clock.read_s())
    assert readings == [0.5, 1.5, 1.5 + running_time.MOST_S, 1.75 + running_time.MOST_S]
