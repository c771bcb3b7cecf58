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
import sys
from lockstep.clusters.connection import connected

with connected("local", verbose=sys.argv[1] == "verbose"):
    import ray
    node = ray._private.worker._global_node
    print(*sorted(kind for kind, _ in node.live_processes()))
    own = [vars(type(node))[name] for name in ("start_monitor", "start_api_server", "start_log_monitor")]
    own += [ray._private.services.get_node, ray._private.services.ConsolePopen]
    print("Ray's own functions:", all(one.__module__.startswith("ray._private") for one in own))
print("left:", node.live_processes())
"""


@pytest.mark.thinned(3)
@pytest.mark.scenario
@pytest.mark.parametrize(
    ("public", "says", "processes"),
    [
        ("0", "quiet", "gcs_server raylet"),
        ("0", "verbose", "gcs_server log_monitor raylet"),
        ("1", "quiet", "dashboard gcs_server log_monitor monitor raylet"),
    ],
)
def test_a_cluster_of_its_own_has_no_process_that_nobody_uses(public: str, says: str, processes: str) -> None:
    """Ray's way, the control, waits for a dashboard that serves nothing, and at the end for an autoscaler that no longer hears."""
    done = subprocess.run(
        [sys.executable, "-c", OWN_CLUSTER, says],
        env={**os.environ, "LOCKSTEP_PUBLIC_RAY": public},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if not line.startswith("(")]
    assert lines == [processes, "Ray's own functions: True", "left: []"], done.stderr
