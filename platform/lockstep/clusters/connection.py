"""The connection to a Ray cluster: what opens it, and how long it lasts."""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lockstep.clusters.authentication import (
    LOOPBACK_ONLY,
    guard_rays_token,
    host_of,
    is_loopback,
    rays_token,
)
from lockstep.clusters.local_cluster import running_cluster
from lockstep.clusters.ray_settings import RAY_SETTINGS
from lockstep.errors import ClusterError, first_line
from lockstep.training.worker_environment import WORKER_ENVIRONMENT


@contextmanager
def connected(address: str | None, *, verbose: bool, for_workers: bool = False) -> Iterator[bool]:
    """A connection to Ray; gives whether the cluster was started here and ends with the run. `for_workers`: every process that it starts there trains."""
    for name, value in {**RAY_SETTINGS, **WORKER_ENVIRONMENT}.items():
        os.environ.setdefault(name, value)  # a cluster that is started here hands them on to its workers
    if starts_own_cluster(address):
        os.environ.update(LOOPBACK_ONLY)
        guard_rays_token()
    show_token(address or os.environ.get("RAY_ADDRESS"))
    import ray

    threading.Thread(
        target=importlib.import_module, args=("torch",), name="lockstep-import", daemon=True
    ).start()
    if ray.is_initialized():
        yield False
        return
    quiet: dict[str, Any] = {} if verbose else {"log_to_driver": False, "logging_level": logging.ERROR}
    if for_workers and not starts_own_cluster(address):
        quiet["runtime_env"] = {"env_vars": WORKER_ENVIRONMENT}
    try:
        context = ray.init(address=address, include_dashboard=None if address else False, **quiet)
    except Exception as error:  # a node that does not start is told as a bare Exception
        raise ClusterError(
            f"ray: cannot connect to {address or 'a local cluster'}: {first_line(error)}"
        ) from error
    try:
        yield address == "local" or _is_new(context)
    except KeyboardInterrupt:
        raise  # at once: to part from Ray under an attempt that goes on would crash the process
    except BaseException:
        ray.shutdown()
        raise
    else:
        ray.shutdown()


def _is_new(context: Any) -> bool:
    """Whether `ray.init` without an address started a cluster, rather than found one."""
    import ray

    return bool(ray._private.worker._global_node is not None and ray._private.worker._global_node.head)


def starts_own_cluster(address: str | None) -> bool:
    """Whether Ray would start a cluster for this address, as far as that can be told before Ray is imported."""
    known = Path(os.environ.get("RAY_TMPDIR") or "/tmp", "ray", "ray_current_cluster")
    return address == "local" or (address is None and "RAY_ADDRESS" not in os.environ and not known.exists())


def show_token(address: str | None, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what Ray needs to speak to the cluster at `address`, unless the environment says it already.

    Before Ray is imported: it reads this once. The token is that of the cluster that `lockstep cluster up` started, where
    the address is its; else Ray's own file, which Ray by itself would not show to a cluster that it has not started.
    """
    if address is not None and is_loopback(host_of(address)):
        environment.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    if {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & environment.keys():
        return
    cluster = running_cluster()
    if cluster is not None and address is not None and _port(address) in cluster.ports:
        environment.update(cluster.access())
    elif address is not None and rays_token().exists():
        environment["RAY_AUTH_MODE"] = "token"


def _port(address: str) -> int | None:
    return urlsplit(address if "://" in address else f"ray://{address}").port
