"""Whether a job can be imported and made, tried in a process of its own: it is a user's code, and may do anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from lockstep.errors import LockstepError
from lockstep.exit_codes import ExitCode
from lockstep.interpreters import job_words
from lockstep.printing import complain


def import_problem(use: str, params: Mapping[str, Any], limit_s: float) -> str | None:
    """Why the job that `use` names cannot be made with `params`, in a line; None where it can."""
    command = job_words(__name__, use, json.dumps(dict(params)))
    try:
        done = subprocess.run(
            command,
            env={"PYTHONHASHSEED": "0", **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"job.use: {use!r} was not imported within {limit_s:.0f} s"
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode == ExitCode.REFUSED and lines:
        return lines[-1]
    return f"job.use: the process that imported {use!r} ended with {done.returncode}{f': {lines[-1]}' if lines else ''}"


def main() -> None:
    """Make the job that the arguments name."""
    from lockstep.job.loading import load_job

    use, params = sys.argv[1:]
    try:
        load_job(use, json.loads(params))
    except LockstepError as error:
        complain(str(error))
        raise SystemExit(ExitCode.REFUSED) from None
