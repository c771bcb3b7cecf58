"""What the nodes that this process starts run to set up a worker. See `unavailable`."""

from __future__ import annotations

from ray._private import ray_constants


def set_up_workers_by(script: str) -> None:
    """Have the nodes that are started from now on run this file, by an absolute path, for each worker."""
    ray_constants.SETUP_WORKER_FILENAME = script  # Ray joins it to a folder of its own
