"""The `lockstep` command as tests of whole runs start it: in a process group of its own, with its result as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMMAND = "TEST_COMMAND"
"""The variable by which the processes of a command are told from those of other tests: the folder of its runs."""


def command(folder: Path, *words: str) -> subprocess.Popen[str]:
    """A command whose checkpoints and records are below `folder`."""
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep", *words, "--json", f"checkpoint.storage={folder}"],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "platform"), str(ROOT)]),
            COMMAND: str(folder),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What a command that comes to a good end says of its run."""
    out, err = process.communicate(timeout=480)
    assert process.returncode == 0, err
    result: dict[str, Any] = json.loads(out)
    return result
