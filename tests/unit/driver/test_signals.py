"""What counts as a second signal, by which a command ends at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.driver import signals
from lockstep.driver.signals import Interrupted, StopSignal

ROOT = Path(__file__).parents[3]
TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


@pytest.mark.parametrize(
    ("sent", "ends"),
    [
        ([TERM, TERM], False),  # as by Slurm at the end of a job's time
        ([TERM, TERM, TERM], False),
        ([INT, INT], True),  # Ctrl-C twice
        ([INT, TERM], True),
        ([TERM, INT], True),
        ([HUP, HUP, TERM, HUP], False),  # by a terminal that is closed, its shell and the login's manager
        ([TERM, HUP], False),
        ([INT, HUP], False),
        ([HUP, INT], True),
    ],
)
def test_a_sigterm_that_is_sent_again_is_the_same_request(sent: list[signal.Signals], ends: bool) -> None:
    with StopSignal() as stop:
        os.kill(os.getpid(), sent[0])
        assert (stop.number, stop.asked) == (sent[0], True)
        try:
            for number in sent[1:]:
                os.kill(os.getpid(), number)
        except Interrupted as error:
            assert (ends, error.number) == (True, sent[-1])
        else:
            assert not ends
        assert stop.number == sent[0]


def test_a_hangup_that_the_caller_ignores_is_ignored() -> None:
    """As under `nohup`."""
    previous = signal.signal(HUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            stop.listen()
            os.kill(os.getpid(), HUP)
            assert not stop.asked
        assert signal.getsignal(HUP) is signal.SIG_IGN
    finally:
        signal.signal(HUP, previous)


def test_a_sigterm_some_seconds_later_is_another_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "SAME_S", 0.05)
    with StopSignal():
        os.kill(os.getpid(), TERM)
        time.sleep(0.1)
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), TERM)


PROGRAM = """
import os, signal, sys, time
from lockstep.driver import signals
signals.SAME_S, signals.GRACE_S = float(sys.argv[1]), 0.1
signals.end_on_second_signal()
with signals.StopSignal() as stop:
    signal.signal(signal.SIGTERM, lambda *_: None)  # as deaf as in a call of C
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
    time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize(("same_s", "waits_s", "code"), [("60", "1", 0), ("0", "60", 143)])
def test_a_command_that_is_deaf_is_ended_by_another_request_alone(
    same_s: str, waits_s: str, code: int
) -> None:
    words = [sys.executable, "-c", PROGRAM, same_s, waits_s]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "platform")}
    assert subprocess.run(words, env=environment, timeout=60, check=False).returncode == code
