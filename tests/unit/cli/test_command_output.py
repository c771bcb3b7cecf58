"""What a command says at its end, in a terminal."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import typer

from lockstep.cli.command_output import answered, json_text
from lockstep.errors import SpecError
from lockstep.printing import folded
from tests.forked import ROOT, script

TEXT = """finished: step 55, epoch 5, 1 worker
metrics           train/loss 0.2422  eval/loss 0.1504  eval/accuracy 0.9698
weights_digest    6e608a6582842e718d431557ee25f67958716bbb5dbac34d8ab4b898c5ce51e5
RUN   NAME    STATUS
spec: {seed:  17}
  eval/loss 0.0254     trial 8   pruned    step 108     optimizer.lr=0.00312222  precision=fp16
  trial 3   failed: the loss of step 14 is not finite: nan; lower optimizer.lr or set clip_norm"""


def test_several_things_under_one_name_are_broken_between_two_of_them() -> None:
    """Whatever is one word, a table or YAML is left to the terminal."""
    assert folded(TEXT, 100) == TEXT
    lines = TEXT.split("\n")
    assert folded(TEXT, 70).split("\n") == [
        lines[0],
        "metrics           train/loss 0.2422  eval/loss 0.1504",
        "                  eval/accuracy 0.9698",
        *lines[2:5],
        "  eval/loss 0.0254     trial 8   pruned    step 108",
        "    optimizer.lr=0.00312222  precision=fp16",
        "  trial 3",
        "    failed: the loss of step 14 is not finite: nan; lower optimizer.lr",
        "    or set clip_norm",
    ]
    assert folded(TEXT, 5).split("\n")[1:3] == [
        "metrics           train/loss 0.2422",
        f"{'':18}eval/loss 0.1504",
    ]


def test_json_has_no_number_that_json_does_not_know() -> None:
    """Any parser takes it: null stands for NaN and the infinities, however deep; every other value is as it was."""
    told = {
        "metrics": {"eval/n": math.nan, "eval/i": -math.inf, "eval/x": 1e300},
        "curve": [(3, math.inf)],
        "s": "NaN",
    }

    def refuse(name: str) -> None:
        raise AssertionError(name)

    found = json.loads(json_text(told), parse_constant=refuse)
    assert found == {
        "metrics": {"eval/n": None, "eval/i": None, "eval/x": 1e300},
        "curve": [[3, None]],
        "s": "NaN",
    }


REFUSED = """
import os, sys
import typer
from lockstep.cli.command_output import answered
from lockstep.errors import SpecError
read, write = os.pipe()
os.dup2(write, 2)
os.close(read)
try:
    with answered(as_json=True, verbose=False):
        raise SpecError("seed: got -1")
except typer.Exit as end:
    sys.exit(end.exit_code)
"""


def test_an_error_whose_line_nobody_reads_has_its_exit_code_and_its_object() -> None:
    """The reader of standard error is gone."""
    paths = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", REFUSED],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2
    assert json.loads(done.stdout) == {"status": "FAILED", "error": "seed: got -1", "exit_code": 2}


def test_what_the_system_refuses_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, answered(as_json=True, verbose=False):
        raise PermissionError(13, "Permission denied", "/theirs/spec.yaml")
    assert ended.value.exit_code == 1
    out, err = capfd.readouterr()
    line = "[Errno 13] Permission denied: '/theirs/spec.yaml'; --verbose shows where"
    assert err == f"lockstep: {line}\n"
    assert json.loads(out) == {"status": "FAILED", "error": line, "exit_code": 1}


# --- a standard output that takes nothing -----------------------------------------------------------------


@contextmanager
def standard_output(descriptor: int) -> Iterator[None]:
    """It leads elsewhere; the descriptor is closed."""
    kept = os.dup(1)
    os.dup2(descriptor, 1)
    os.close(descriptor)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def full() -> int:
    return os.open("/dev/full", os.O_WRONLY)


LOST = "lockstep: standard output: the answer cannot be written: No space left on device\n"


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(("code", "wanted"), [(None, 3), (0, 3), (143, 143)])
def test_an_answer_that_cannot_be_written_is_one_line(
    as_json: bool, code: int | None, wanted: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """The exit code is that of a failure, or the command's own where that is none of success."""
    with (
        standard_output(full()),
        pytest.raises(typer.Exit) as ended,
        answered(as_json, verbose=False, unanswered=3) as answer,
    ):
        answer({}, str, code)
    assert (ended.value.exit_code, capfd.readouterr().err) == (wanted, LOST)


def test_an_error_that_cannot_be_written_keeps_its_code(capfd: pytest.CaptureFixture[str]) -> None:
    with standard_output(full()), pytest.raises(typer.Exit) as ended, answered(as_json=True, verbose=False):
        raise SpecError("seed: wrong")
    assert (ended.value.exit_code, capfd.readouterr().err) == (2, "lockstep: seed: wrong\n" + LOST)


def test_a_reader_that_has_left_is_told_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """`lockstep list | head -1`."""
    read, write = os.pipe()
    os.close(read)
    with (
        standard_output(write),
        pytest.raises(typer.Exit) as ended,
        answered(as_json=False, verbose=False) as answer,
    ):
        answer({}, str)
    assert (ended.value.exit_code, capfd.readouterr().err) == (1, "")


@pytest.mark.scenario
def test_a_run_whose_answer_cannot_be_written_has_not_succeeded(tmp_path: Path) -> None:
    words = [
        "lockstep", "train", "jobs/digits/train.yaml", "--local", "--json", "length.steps=2", "record.uri=off",
        "job.use=tests.untraced_jobs:UntracedDigits", f"checkpoint.storage={tmp_path}",
    ]  # fmt: skip
    text = f"""
import os, sys
os.environ["PYTHONHASHSEED"] = "0"
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
sys.path[:0] = [{str(ROOT / "platform")!r}]
sys.argv = {words}
from lockstep.cli.entry import run
run()
"""
    process = script(text)
    _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (1, LOST)
    (record,) = tmp_path.glob("*/run.json")
    assert json.loads(record.read_text())["status"] == "FINISHED"


CLOSED = """
import json, os, sys
for number in {closed}:
    os.close(number)
    setattr(sys, ("stdin", "stdout", "stderr")[number], None)
from lockstep.cli.command_output import open_standard_streams
open_standard_streams()
other = os.open({file!r}, os.O_RDWR | os.O_CREAT)
print("out")
print("err", file=sys.stderr)
assert sys.stdin.read() == ""
os.system("echo of a child; echo of a child >&2; cat")
os.write(other, str(other > 2).encode())
"""


@pytest.mark.parametrize("closed", [[1], [0, 1, 2], [2]])
def test_closed_streams_are_opened_before_a_file_takes_their_number(
    closed: list[int], tmp_path: Path
) -> None:
    """Nothing that is printed, here or by a child, is written into a file of the run."""
    file = tmp_path / "file"
    done = subprocess.run(
        [sys.executable, "-c", CLOSED.format(closed=closed, file=str(file))],
        cwd=ROOT / "platform",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    told = {1: done.stdout, 2: done.stderr}
    assert done.returncode == 0, done.stderr
    assert file.read_text() == "True"
    assert [text == "" for number, text in told.items()] == [number in closed for number in told]


def test_a_command_may_have_no_standard_output() -> None:
    """As under cron or a service manager; the control has its standard output."""
    for redirected, told in ((">&-", False), ("", True)):
        done = subprocess.run(
            ["sh", "-c", f'exec "$0" -m lockstep --version {redirected}', sys.executable],
            cwd=ROOT / "platform",
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr, bool(done.stdout)) == (0, "", told)
