"""The end of a driver's connection to Ray, while threads of the driver still use it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import threading
from lockstep.clusters.background import answered, in_background
from lockstep.clusters.connection import connected
from lockstep.errors import JobError

try:
    with connected("local", verbose=False):
        import ray
        never = ray.remote(num_cpus=1000)(lambda: None).remote()
        in_background(answered, never, 60.0, name="asks")
        raise JobError("a label is out of range")
except JobError as error:
    print("told:", error, [one.name for one in threading.enumerate() if one.name in {"asks", "lockstep-import"}])
    raise SystemExit(3)
"""


@pytest.mark.scenario
def test_an_error_is_told_once_no_thread_waits_for_an_answer_of_ray() -> None:
    """Ray may end a process in which a thread calls it after the connection has ended, and its error is lost."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (3, "told: a label is out of range []"), done.stderr
