"""A run whose only node is drained, with nowhere to go: it saves twice and trains on; told in `told.json`.

    python -m tests.cluster.notice FOLDER

In a process of its own: Ray adds nodes on the main thread alone.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from pathlib import Path

from tests.chaos.cluster import started
from tests.cluster.elastic import PATIENCE_S, Running
from tests.cluster.test_supervisor import spec

DEADLINE_S = 40
"""From the notice on; the second save is due 20 s before."""


def main(folder: Path) -> None:
    with started(1) as nodes:
        import ray

        ray.init(address=nodes.address, log_to_driver=False, logging_level=logging.ERROR)
        document = spec(
            folder,
            job={"use": "tests.cluster.broken_jobs:SlowDigits", "params": {"width": 4, "pause_s": 0.1}},
            length={"steps": 110},
            workers={"min": 1, "max": 1},
            checkpoint={"storage": str(folder / "runs"), "every": {"steps": 1000}},
        )
        run = Running(document)
        heard = run.heard
        heard.wait_for(1)
        (node,) = nodes.nodes
        noticed = time.monotonic()
        subprocess.run(
            [
                sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", nodes.address, "--node-id", node.node_id,
                "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot", "--deadline-remaining-seconds", str(DEADLINE_S),
            ],
            check=True, capture_output=True,
        )  # fmt: skip
        until = time.monotonic() + PATIENCE_S
        while len(saves := [line for line in heard.lines if line.startswith("saving, and going on")]) < 2:
            assert time.monotonic() < until, heard.lines
            time.sleep(0.1)
        time.sleep(3.0)  # the save is done after the next step
        seconds, steps = time.monotonic() - noticed, heard.step
        nodes.kill(node)
        nodes.add()
        told = {
            **run.result().as_dict(),
            "lines": heard.lines,
            "saves": saves,
            "killed_s": seconds,
            "killed_at": steps,
        }
        (folder / "told.json").write_text(json.dumps(told))
        ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
