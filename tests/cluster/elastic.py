"""A run on a cluster of several Ray nodes that grows, is drained and loses a node, told in `told.json`.

    python -m tests.cluster.elastic FOLDER

In a process of its own: Ray adds nodes on the main thread alone.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from lockstep import train
from lockstep.clusters.ray_settings import RAY_SETTINGS
from lockstep.driver.progress import ProgressLine
from lockstep.driver.result import Result
from tests.cluster.test_supervisor import spec

PATIENCE_S = 600.0
STEPS = 300
"""Of the run, which trains on while joining workers start. Held at their pace until all has happened."""


class Heard:
    """A run's progress: the lines that it says."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.step = 0
        self.attempt = 0
        self.error: Exception | None = None
        """What the run has ended with, where it has."""

    def say(self, text: str) -> None:
        self.lines.append(text)

    def show(self, line: ProgressLine) -> None:
        self.step, self.attempt = line.step, line.attempt

    def wait_for(self, attempt: int) -> None:
        """Until this attempt has done two steps or more."""
        until, first = time.monotonic() + PATIENCE_S, None
        while first is None or self.step < first + 2:
            if self.attempt == attempt and first is None:
                first = self.step
            if self.error is not None:
                raise self.error
            assert time.monotonic() < until, (attempt, self.lines)
            time.sleep(0.1)


class Running:
    """A run in a thread of its own."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.heard = Heard()
        self._results: list[Result] = []
        self._thread = threading.Thread(target=lambda: self._train(document), daemon=True)
        self._thread.start()

    def _train(self, document: dict[str, Any]) -> None:
        try:
            self._results.append(train(document, progress=self.heard))
        except Exception as error:
            self.heard.error = error
            raise

    def result(self) -> Result:
        """What it came to, once it has ended."""
        self._thread.join(PATIENCE_S)
        (result,) = self._results
        return result


def main(folder: Path) -> None:
    os.environ |= RAY_SETTINGS | {"RAY_AUTH_MODE": "disabled"}
    import ray
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as own:
        cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 1,
                "temp_dir": own,
                "include_dashboard": False,
                # A node that is gone is noticed after ten seconds rather than half a minute, and one on a busy machine is not taken for gone.
                "_system_config": {
                    "health_check_initial_delay_ms": 1000,
                    "health_check_period_ms": 1000,
                    "health_check_failure_threshold": 10,
                },
            },
        )
        # Before any other node: a driver belongs to whichever node it finds, and ends with it.
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        first = cluster.add_node(num_cpus=1)
        fast = folder / "fast-from-now-on"
        document = spec(
            folder,
            job={"use": "tests.cluster.broken_jobs:Held", "params": {"width": 4, "until": str(fast)}},
            length={"steps": STEPS},
            workers={"min": 1, "max": 4},
        )
        run = Running(document)
        heard = run.heard

        heard.wait_for(1)  # two workers
        second = cluster.add_node(num_cpus=2)
        heard.wait_for(2)  # four
        subprocess.run(
            [
                sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", cluster.address, "--node-id", second.node_id,
                "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot", "--deadline-remaining-seconds", "600",
            ],
            check=True, capture_output=True,
        )  # fmt: skip
        heard.wait_for(3)  # two
        cluster.remove_node(first, allow_graceful=False)
        heard.wait_for(4)  # one
        fast.touch()
        (folder / "told.json").write_text(json.dumps({**run.result().as_dict(), "lines": heard.lines}))
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
