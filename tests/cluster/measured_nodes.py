"""The health of a cluster of two nodes, told in `told.json`.

    python -m tests.cluster.measured_nodes FOLDER

In a process of its own: Ray adds nodes on the main thread alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lockstep.attempts import node_health
from tests.cluster.failing_device import two_nodes
from tests.cluster.test_supervisor import spec


def main(folder: Path) -> None:
    with two_nodes():
        import ray

        from lockstep.spec.loading import load_spec

        node_health.SECONDS = 0.2
        fleet = node_health.fleet_health(load_spec(spec(folder)))
        told = {"nodes": [node["NodeID"] for node in ray.nodes()], "fleet": [one.as_dict() for one in fleet]}
        (folder / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
