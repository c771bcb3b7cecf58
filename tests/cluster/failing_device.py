"""A run on two nodes of which one has a device that fails in every attempt, told in `told.json`.

    python -m tests.cluster.failing_device FOLDER

In a process of its own: Ray adds nodes on the main thread alone.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.clusters.ray_settings import RAY_SETTINGS
from tests.cluster.elastic import Running
from tests.cluster.test_supervisor import spec


@contextmanager
def two_nodes() -> Iterator[None]:
    """A cluster of two nodes of one CPU each, to which this process is connected."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as own:
        # Ray writes a cluster's address below this folder, whatever the folder of the cluster is, and does not make it.
        (Path(own) / "ray").mkdir()
        os.environ |= RAY_SETTINGS | {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": own}
        import ray
        from ray.cluster_utils import Cluster

        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "temp_dir": own, "include_dashboard": False},
        )
        # Before any other node: a driver belongs to whichever node it finds, and ends with it.
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        yield
        ray.shutdown()
        cluster.shutdown()


def main(folder: Path) -> None:
    with two_nodes():
        file = folder / "failing-node"
        job = {"use": "tests.cluster.broken_jobs:FailingDevice", "params": {"width": 4, "file": str(file)}}
        document = spec(folder, job=job, length={"steps": 12}, workers={"min": 1, "max": 2})
        result = Running(document).result().as_dict()
        (folder / "told.json").write_text(json.dumps({**result, "failing": file.read_text()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
