"""A Ray cluster of this test session's own: four CPUs in name, loopback, its own folder."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator

import pytest

from lockstep.attempts.preloaded_modules import AHEAD
from lockstep.clusters.connection import on_this_machine
from lockstep.clusters.local_cluster import set_up_workers_quickly
from lockstep.clusters.ray_settings import RAY_SETTINGS
from lockstep.training.worker_environment import WORKER_ENVIRONMENT


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Started the way `lockstep train` starts one, so that workers find the environment that strict needs."""
    import ray

    os.environ.update({**RAY_SETTINGS, **WORKER_ENVIRONMENT})
    set_up_workers_quickly()
    # Not under pytest's own folder: the paths of Ray's sockets must stay short.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=folder,
            runtime_env=on_this_machine(AHEAD),
        )
        yield
        ray.shutdown()
