"""The line of progress: a rate, and so a time left, only once there is one. Where it cannot be shown, nothing else changes."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from contextlib import suppress

import pytest

from lockstep.driver.progress import FEW_STEPS
from lockstep.driver.run_view import RunView
from tests.unit.record.rows import evaluation_row, step_row


def shown(view: RunView, step: int, wall_clock: float, attempt: int = 1) -> str:
    view.take(step_row(step, wall_clock=wall_clock, attempt=attempt))
    line = view.progress_line()
    assert line is not None
    return line.text


def test_a_line_says_what_is_known_so_far() -> None:
    view = RunView(total_steps=1000)
    assert view.progress_line() is None
    row = step_row(1, wall_clock=1.0)
    assert shown(view, 1, 1.0) == f"epoch {row.epoch + 1} · step 1/1000 · loss {row.loss:.4f}"
    view.take(evaluation_row(1))
    assert "eval/" in shown(view, 2, 2.0)
    assert "samples/s · waiting for data" in shown(view, 1 + FEW_STEPS, 10.0)


def test_no_time_left_is_told_from_the_first_steps() -> None:
    """They are slower than all that follow, and on Ray two polls may be one step apart."""
    view = RunView(total_steps=1000)
    assert "left" not in shown(view, 1, 100.0)
    assert "left" not in shown(view, 2, 130.0)
    assert "16:34 left" in shown(view, 1 + FEW_STEPS, 100.0 + FEW_STEPS)


def test_a_resumed_run_does_not_count_the_time_in_between() -> None:
    """The rows of the attempt before are shown first."""
    view = RunView(total_steps=1000)
    for step in range(1, 20):
        shown(view, step, float(step))
    assert "left" not in shown(view, 20, 90_000.0, attempt=2)
    assert "16:15 left" in shown(view, 25, 90_005.0, attempt=2)


SHOWN = """
import os, pty, sys, threading, time
from lockstep.cli.cluster import _say, _show
from lockstep.driver.progress import Line
from lockstep.driver.run_view import RunView
from tests.unit.record.rows import step_row
exec(sys.argv[1])
failed = []
threading.excepthook = failed.append
line = Line()
with line.running():
    exec(sys.argv[2])
    for step in range(3):
        line.say("warning: once")
        line.show(RunView(step=step_row(1 + step), total_steps=10).progress_line())
        line.table("1 of 2 trials", [])
        time.sleep(0.3)  # the live line is written by a thread of its own
_say("job demo")
_show("its output")
print("trained", failed)
sys.exit(130)
"""


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("begin", "meanwhile"),
    [
        pytest.param("read, write = os.pipe(); os.dup2(write, 2)", "os.close(read)", id="the reader is gone"),
        pytest.param("os.dup2(os.open('/dev/full', os.O_WRONLY), 2)", "", id="the disk is full"),
        pytest.param(
            "master, slave = pty.openpty(); os.dup2(slave, 2)", "os.close(master)", id="the terminal is gone"
        ),
    ],
)
def test_a_display_that_breaks_ends_nothing_but_itself(begin: str, meanwhile: str) -> None:
    """The command goes on, answers on standard output, and has its own exit code."""
    done = subprocess.run(
        [sys.executable, "-c", SHOWN, begin, meanwhile],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TERM": "xterm"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("trained []\n", 130)


NAMED = """
from lockstep.driver.progress import Line
from lockstep.driver.run_view import RunView
from lockstep.record.ledger.rows import EvaluationRow
from tests.unit.record.rows import step_row
line = Line()
with line.running():
    line.show(RunView(step=step_row(1), evaluation=EvaluationRow(1, 0, {"eval/f1[macro]": 0.5, "eval/acc[/top]": 0.5}, 0.1, 1.0)).progress_line())
    line._live.refresh()
    line.table("trials [/of] a sweep", [
        {"trial": 0, "status": "ended", "step": 3, "metric": 0.1, "fields": {"job.params.path": "[/data]:x:"}}
    ])
"""


def test_names_are_shown_as_they_are() -> None:
    """What is in brackets is no markup: it had been left out, or had ended the run."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", NAMED],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "TERM": "xterm",
            "COLUMNS": "200",
        },
        stderr=slave,
    )
    os.close(slave)
    shown = b""
    with suppress(OSError):  # the terminal is gone
        while part := os.read(master, 4096):
            shown += part
    assert process.wait() == 0, shown.decode()
    for text in (
        b"eval/f1[macro] 0.5",
        b"eval/acc[/top] 0.5",
        b"trials [/of] a sweep",
        b"job.params.path=[/data]:x:",
    ):
        assert text in shown
