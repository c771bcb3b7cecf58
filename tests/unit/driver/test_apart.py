"""A call in a process of its own: what it shows and comes to, and how signals and the parent's end reach it."""

from __future__ import annotations

import html
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lockstep.calls import problems
from lockstep.calls.subprocess_call import apart
from lockstep.driver.options import RunOptions
from lockstep.driver.progress import ProgressLine, Silent
from lockstep.driver.run_view import RunView
from lockstep.driver.signals import Interrupted
from lockstep.record.ledger.rows import EvaluationRow
from tests.unit.driver import called_apart
from tests.unit.record.rows import step_row

ROOT = Path(__file__).parents[3]


class Said(Silent):
    """Keeps what is said, and does something at the first word."""

    def __init__(self, then: Any = lambda text: None) -> None:
        self.lines: list[str] = []
        self._then = then

    def say(self, text: str) -> None:
        self.lines.append(text)
        self._then(text)


def test_the_process_has_the_environment_of_exact_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strings are hashed alike in every such process, whatever this one does."""
    monkeypatch.delenv("MKL_CBWR")
    monkeypatch.setenv("MPLBACKEND", "module://drawing.into.cells")
    said = [Said(), Said()]
    names = ["PYTHONHASHSEED", "MKL_CBWR", "MPLBACKEND"]
    for one, seed in zip(said, ("random", "42"), strict=True):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        found = apart(partial(called_apart.environment, names=names), RunOptions(progress=one))
        assert found == called_apart.result("FINISHED", 3)
    assert said[0].lines[:3] == ["PYTHONHASHSEED=0", "MKL_CBWR=AUTO", "MPLBACKEND=None"]
    assert said[0].lines == said[1].lines


@pytest.mark.parametrize(
    ("name", "told", "code"),
    [
        ("refused", r"^batch\.micro: got 48$", ""),
        ("broken", "^the run broke: ZeroDivisionError: by zero; ", problems.RUN_BROKE.code),
        ("derived", "^length: got 5$", ""),  # by a class that a job has derived
        (
            "gone",
            r"^the process of the run ended without a result \(exit code 7\)",
            problems.PROCESS_LOST.code,
        ),
    ],
)
def test_what_goes_wrong_there_is_raised_here(name: str, told: str, code: str) -> None:
    call, kind = called_apart.CALLS[name]
    with pytest.raises(kind, match=told) as raised:
        apart(call, RunOptions())
    assert raised.value.code == code


def test_rows_and_trials_are_shown_here_as_there() -> None:
    shown: list[object] = []

    class Shown(Silent):
        def show(self, line: ProgressLine) -> None:
            shown.append(line)

        def table(self, *table: object) -> None:
            shown.append(table)

    line = RunView(
        step=step_row(7), evaluation=EvaluationRow(7, 0, {"eval/loss": 0.5}, 0.1, 1.0)
    ).progress_line()
    trials = [{"trial": 0, "fields": {"optimizer.lr": 0.1}}]
    apart(partial(called_apart.showing, line=line, trials=trials), RunOptions(progress=Shown()))
    assert shown == [line, ("1 of 2 trials", trials)]


def interrupt(_text: str) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_asks_the_run_to_stop(tmp_path: Path) -> None:
    left = tmp_path / "left"
    call = partial(called_apart.until_stopped, left=left, patient=True)
    found = apart(call, RunOptions(progress=Said(interrupt)))
    assert (found.status, found.signal_number) == ("KILLED", signal.SIGINT)
    assert left.read_text() == "stopped by 2"


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_it_at_once(tmp_path: Path, second: signal.Signals) -> None:
    def twice(text: str) -> None:
        interrupt(text)
        threading.Timer(0.5, os.kill, [os.getpid(), second]).start()

    said = Said(twice)
    call = partial(called_apart.until_stopped, left=tmp_path / "left", patient=False)
    with pytest.raises(Interrupted) as raised:
        apart(call, RunOptions(progress=said))
    assert raised.value.number == second
    assert not (tmp_path / "left").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(said.lines[0].split()[1]), 0)


def test_a_run_whose_parent_is_killed_stops_as_after_a_signal(tmp_path: Path) -> None:
    left = tmp_path / "left"
    program = (
        "import os, signal, sys; from functools import partial; from pathlib import Path; from tests.unit.driver.test_apart import *\n"
        f"call = partial(called_apart.until_stopped, left=Path({str(left)!r}), patient=True)\n"
        "apart(call, RunOptions(progress=Said(lambda text: os.kill(os.getpid(), signal.SIGKILL))))"
    )
    paths = os.pathsep.join([str(ROOT / "platform"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": paths}, check=False
    )
    assert done.returncode == -signal.SIGKILL
    until = time.monotonic() + 60
    while not left.exists():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_result_is_shown_as_a_table() -> None:
    killed = called_apart.result("KILLED", 7)
    here = replace(killed, folder=str(Path("runs", killed.run_id).absolute()))
    shown = html.unescape(here._repr_html_())
    assert '<th style="text-align: left">status</th>' in shown
    assert "eval/&lt;loss&gt;" in killed._repr_html_()
    assert f"lockstep.resume({killed.run_id!r}, uri='off')" in shown
    there = html.unescape(replace(killed, folder=f"/data/rec/{killed.run_id}")._repr_html_())
    assert f"lockstep.resume({killed.run_id!r}, ['record.folder=/data/rec'], uri='off')" in there
    assert "look at it" not in shown  # recorded nowhere
