"""The processes of a local cluster that a driver starts for itself. See `unavailable`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ray._private.node import Node


@contextmanager
def fewer_processes(*, logs: bool) -> Iterator[None]:
    """In this block `ray.init` starts a cluster without an autoscaler and a dashboard. With `logs` false also without the process that sends
    the workers' output to the driver.

    `ray.init(include_dashboard=False)` alone starts a process that would serve nothing, and waits until it has an address.
    """
    left_out = {"start_monitor", "start_api_server"} | (set() if logs else {"start_log_monitor"})
    own = {name: vars(Node)[name] for name in left_out}
    for name in left_out:
        setattr(Node, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, method in own.items():
            setattr(Node, name, method)
