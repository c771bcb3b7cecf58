"""A run of two workers on three nodes that loses a worker, then a node, each time when processes stand by; told in `told.json`.

    python -m tests.cluster.standing_by FOLDER

In a process of its own: Ray adds nodes on the main thread alone.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from lockstep import train
from lockstep.orchestration.result import Result
from tests.chaos.cluster import Nodes, started
from tests.cluster.elastic import PATIENCE_S, Heard
from tests.cluster.test_supervisor import spec

CALM_S = 3.0
"""A process that has used no processor for so long has done its imports."""


def wait_for_standbys(nodes: Nodes) -> None:
    """Until an idle process with torch in its memory is at rest on every node."""
    until = time.monotonic() + PATIENCE_S
    while not all(any(map(at_rest, idle(nodes, node))) for node in nodes.nodes):
        assert time.monotonic() < until, [idle(nodes, node) for node in nodes.nodes]


def idle(nodes: Nodes, node: Any) -> Sequence[psutil.Process]:
    return nodes.named(node, "IDLE")


def at_rest(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        before = sum(process.cpu_times()[:2])
        time.sleep(CALM_S)
        has_torch = any("libtorch_cpu" in entry.path for entry in process.memory_maps())
        return has_torch and sum(process.cpu_times()[:2]) - before < 0.05 * CALM_S
    return False


def main(folder: Path) -> None:
    with started(3) as nodes:
        import ray

        ray.init(address=nodes.address, log_to_driver=False, logging_level=logging.ERROR)
        heard, results = Heard(), list[Result]()
        document = spec(
            folder,
            job={"use": "tests.cluster.broken_jobs:SlowDigits", "params": {"width": 4, "pause_s": 0.08}},
            length={"steps": 400},
            workers={"min": 2, "max": 2},
            faults={"standby_after_s": 1.0},
        )
        thread = threading.Thread(target=lambda: results.append(train(document, progress=heard)), daemon=True)
        thread.start()
        heard.wait_for(1)
        wait_for_standbys(nodes)
        nodes.workers(nodes.busy()[-1])[0].kill()
        heard.wait_for(2)
        wait_for_standbys(nodes)
        nodes.kill(nodes.busy()[-1])
        thread.join(PATIENCE_S)
        (result,) = results
        (folder / "told.json").write_text(json.dumps({**result.as_dict(), "lines": heard.lines}))
        ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
