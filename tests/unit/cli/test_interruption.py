"""A signal before a run begins, or to a command that trains none: one line, the object, the signal's exit code; nothing half imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import lockstep
from tests.unit.cli.test_command import ROOT, environment

JOB = """
import os, signal, time
import lockstep
from torch import nn
from tests.untraced_jobs import UntracedDigits

def interrupted():
    os.kill(os.getpid(), signal.{sent})
    time.sleep(300)

class Wrong(UntracedDigits):
    def model(self):
        try:
            interrupted()
        finally:
            open("cleared", "w").close()
"""

SWALLOWED = """
try:
    interrupted()
except BaseException:
    pass
"""

SIGNALS = pytest.mark.parametrize(("sent", "code"), [("SIGINT", 130), ("SIGTERM", 143)])


def ended(folder: Path, source: str, *words: str) -> tuple[int, str, str]:
    """How a command with this job ends."""
    (folder / "theirs.py").write_text(source)
    overrides = ["job.use=theirs:Wrong", "record.uri=off", "checkpoint.storage=runs"]
    process = lockstep(words[0], str(ROOT / "jobs/digits/train.yaml"), *words[1:], *overrides, cwd=folder)
    out, err = process.communicate(timeout=300)
    return process.wait(), out, err


@SIGNALS
@pytest.mark.parametrize("as_json", [True, False])
def test_a_signal_while_modules_are_imported_ends_the_command(
    sent: str, code: int, as_json: bool, tmp_path: Path
) -> None:
    """Even where the module would swallow an exception. No run is begun."""
    source = JOB.format(sent=sent) + SWALLOWED
    found, out, err = ended(tmp_path, source, "train", "--local", *(["--json"] if as_json else []))
    assert (found, err) == (code, "lockstep: ended at once by a signal\n")
    told = {"status": "KILLED", "error": "ended at once by a signal", "exit_code": code}
    assert [json.loads(line) for line in out.splitlines()] == ([told] if as_json else [])
    assert not (tmp_path / "runs").exists()


@SIGNALS
def test_a_command_that_trains_no_run_clears_away_what_it_has_begun(
    sent: str, code: int, tmp_path: Path
) -> None:
    found, out, err = ended(tmp_path, JOB.format(sent=sent), "estimate", "--json")
    assert (found, err) == (code, "lockstep: ended at once by a signal\n")
    assert json.loads(out)["exit_code"] == code
    assert (tmp_path / "cleared").exists()


def program(text: str) -> subprocess.CompletedProcess[str]:
    begin = "import os, signal, sys\nfrom lockstep.cli.interruption import take_signals\n"
    return subprocess.run(
        [sys.executable, "-c", begin + text],
        env={**environment(), "PYTHONHASHSEED": "random"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_signal_before_the_command_is_known_is_answered_too() -> None:
    done = program("take_signals(as_json=True)\nos.kill(os.getpid(), signal.SIGTERM)\nraise SystemExit(0)")
    assert (done.returncode, done.stderr) == (143, "lockstep: ended at once by a signal\n")
    assert json.loads(done.stdout)["exit_code"] == 143


def test_a_signal_to_a_command_that_starts_over_reaches_the_new_interpreter() -> None:
    again = (
        "from lockstep.cli.interruption import take_signals; take_signals(as_json=False); raise SystemExit(0)"
    )
    text = f"""
from lockstep.cli.entry import run
def interrupted(program, words, replace=os.execv):
    os.kill(os.getpid(), signal.SIGINT)
    replace(program, [program, "-c", {again!r}])
os.execv = interrupted
sys.argv = ["lockstep", "estimate"]
run()
"""
    done = program(text)
    assert (done.returncode, done.stderr) == (130, "lockstep: ended at once by a signal\n")


def test_signals_of_children_and_ignored_ones_are_left_alone() -> None:
    text = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
take_signals(as_json=False)
assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
child = os.fork()
if not child:
    os._exit(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)
assert os.waitpid(child, 0)[1] == 0
"""
    done = program(text)
    assert done.returncode == 0, done.stderr
