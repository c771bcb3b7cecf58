"""A run of two workers on four nodes that loses a worker, then a node, each time when processes stand by; told in `told.json`.

    python -m tests.cluster.standing_by FOLDER

In a process of its own: Ray adds nodes on the main thread alone.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.chaos.cluster import Nodes, started
from tests.cluster.elastic import PATIENCE_S, Running
from tests.cluster.test_supervisor import spec

CALM_S = 3.0
"""A process that has used no processor for so long has done its imports."""


def wait_for_standbys(nodes: Nodes) -> None:
    """Until a process stands by on both nodes of the run and on the one to spare. The others have none: which they are is chance to Ray."""
    until = time.monotonic() + PATIENCE_S
    while sum(any(map(stands_by, nodes.named(node, "IDLE"))) for node in nodes.nodes) < 3:
        assert time.monotonic() < until, [nodes.named(node, "IDLE") for node in nodes.nodes]


def stands_by(process: psutil.Process) -> bool:
    """Whether it has torch in its memory and is at rest."""
    with suppress(psutil.NoSuchProcess):
        before = sum(process.cpu_times()[:2])
        time.sleep(CALM_S)
        has_torch = any("libtorch_cpu" in entry.path for entry in process.memory_maps())
        return has_torch and sum(process.cpu_times()[:2]) - before < 0.05 * CALM_S
    return False


def main(folder: Path) -> None:
    with started(4) as nodes:
        import ray

        ray.init(address=nodes.address, log_to_driver=False, logging_level=logging.ERROR)
        document = spec(
            folder,
            job={"use": "tests.cluster.broken_jobs:SlowDigits", "params": {"width": 4, "pause_s": 0.08}},
            length={"steps": 400},
            workers={"min": 2, "max": 2},
            faults={"standby_after_s": 1.0},
        )
        run = Running(document)
        run.heard.wait_for(1)
        wait_for_standbys(nodes)
        nodes.workers(nodes.busy()[-1])[0].kill()
        run.heard.wait_for(2)
        wait_for_standbys(nodes)
        nodes.kill(nodes.busy()[-1])
        (folder / "told.json").write_text(json.dumps(run.result().as_dict()))
        ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
