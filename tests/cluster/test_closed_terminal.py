"""A terminal that is closed while a command trains in it, as where a connection by ssh breaks: the run is saved."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import termios
from pathlib import Path

import psutil
import pytest

from lockstep.training.worker_environment import WORKER_ENVIRONMENT

ROOT = Path(__file__).parents[2]


def _take_terminal() -> None:
    """Make standard input the terminal of a new session: what is closed there is told to its foreground processes, and only to those."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.scenario
@pytest.mark.parametrize("where", [["--local"], ["--address", "local"]], ids=["local", "ray"])
def test_a_run_in_a_closed_terminal_is_saved(
    where: list[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """By now nothing can be written there: that is no failure either."""
    settings = ["length.epochs=100000", "record.uri=off", f"checkpoint.storage={tmp_path}"]
    words = [sys.executable, "-m", "lockstep", "train", "jobs/digits/train.yaml", *where, *settings]
    kept = {name: value for name, value in os.environ.items() if name not in WORKER_ENVIRONMENT}
    terminal, inside = os.openpty()
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env={**kept, "PYTHONPATH": str(ROOT / "platform")},
        stdin=inside,
        stdout=inside,
        stderr=inside,
        preexec_fn=_take_terminal,
    )
    request.addfinalizer(process.kill)
    os.close(inside)
    shown = b""
    while b"samples/s" not in shown:
        shown += os.read(terminal, 4096)
    everyone = psutil.Process(process.pid).children(recursive=True)
    os.close(terminal)
    assert process.wait(120) == 129
    (record,) = tmp_path.glob("*/run.json")
    assert json.loads(record.read_text())["status"] == "KILLED"
    assert list(tmp_path.glob("*/step-*/manifest.json"))
    assert [each for each in psutil.wait_procs(everyone, timeout=30)[1] if each.is_running()] == []
