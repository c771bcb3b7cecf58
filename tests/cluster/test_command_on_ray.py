"""The command with a Ray cluster of its own, as the README starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_sigterm_to_the_driver_ends_the_run_as_killed(tmp_path: Path) -> None:
    """Exit code 143, the run marked KILLED, and one JSON object that says so."""
    words = [
        "jobs/digits/train.yaml",
        "--address",
        "local",
        "--json",
        "length.epochs=100000",
        "record.uri=off",
    ]
    kept = {name: value for name, value in os.environ.items() if name not in {"PYTHONHASHSEED", "MKL_CBWR"}}
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep", "train", *words, f"checkpoint.storage={tmp_path}"],
        cwd=ROOT,
        env={**kept, "PYTHONPATH": str(ROOT / "platform")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("*/environment.json")):
        assert time.monotonic() < deadline, "the run did not start"
        assert process.poll() is None, process.communicate()
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=90)
    assert process.returncode == 143, err
    (line,) = out.splitlines()
    assert json.loads(line)["status"] == "KILLED"
    (record,) = tmp_path.glob("*/run.json")
    assert json.loads(record.read_text())["status"] == "KILLED"
