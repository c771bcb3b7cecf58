"""The end of a driver's connection to Ray, while threads of the driver still use it."""

from __future__ import annotations

import os
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


OWN_CLUSTER = """
from lockstep.clusters.connection import connected

with connected("local", verbose=False):
    import ray
    node = ray._private.worker._global_node
    monitor = dict(node.live_processes())["monitor"]
    shutdown = ray.shutdown

    def seen():
        print("monitor:", monitor.poll())
        shutdown()

    ray.shutdown = seen
print("left:", node.live_processes())
"""


@pytest.mark.scenario
@pytest.mark.parametrize(("public", "monitor"), [("0", "-9"), ("1", "None")])
def test_the_end_of_a_cluster_of_its_own_does_not_wait_for_its_monitor(public: str, monitor: str) -> None:
    """Ray ends the GCS first, then asks the monitor, which no longer hears, and waits a second for it. The control is Ray's way."""
    done = subprocess.run(
        [sys.executable, "-c", OWN_CLUSTER],
        env={**os.environ, "LOCKSTEP_PUBLIC_RAY": public},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.splitlines() == [f"monitor: {monitor}", "left: []"], done.stderr
