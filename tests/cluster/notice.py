"""A run whose only node is preempted, with nowhere to go: it saves twice and trains on; told in `told.json`.

The notice comes from a metadata service that speaks AWS's protocol, through the agent of the node.

    python -m tests.cluster.notice FOLDER

In a process of its own: Ray adds nodes on the main thread alone.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from lockstep.checkpoint.runs.run_checkpoints import steps_of
from tests.chaos.cluster import started
from tests.cluster.elastic import PATIENCE_S, Running
from tests.cluster.test_supervisor import spec
from tests.unit.clusters.test_preemption import ACTION, Imds, Server

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
        (run_id,) = (line.removeprefix("run ") for line in heard.lines if line.startswith("run "))
        before = 0
        (node,) = nodes.nodes
        noticed = time.monotonic()
        with Server(Imds) as cloud:
            agent = subprocess.Popen(
                [
                    sys.executable, "-m", "lockstep", "cluster", "notices", "--cloud", "aws", "--metadata", cloud.url,
                    "--address", nodes.address, "--node", node.node_id,
                ],
            )  # fmt: skip
            ends = datetime.fromtimestamp(time.time() + DEADLINE_S, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            cloud.set(ACTION, json.dumps({"action": "terminate", "time": ends}))
            until = time.monotonic() + PATIENCE_S
            while (
                len(saves := [line for line in heard.lines if line.startswith("saving, and continuing")]) < 2
            ):
                assert time.monotonic() < until, heard.lines
                before = max(steps_of(str(folder / "runs"), run_id), default=0)
                time.sleep(0.1)
            agent.kill()
            agent.wait(60)
            cloud.shutdown()
        # The second save is done, and a step after it.
        while (saved := max(steps_of(str(folder / "runs"), run_id))) <= before or heard.step <= saved:
            assert time.monotonic() < until, (saved, before, heard.step)
            time.sleep(0.1)
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
