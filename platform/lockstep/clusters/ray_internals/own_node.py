"""The local cluster that a driver starts for itself, with fewer processes and sooner. See `unavailable`."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import psutil  # type: ignore[import-untyped]
from ray._private import services
from ray._private.node import Node
from ray._private.state import GlobalState

from lockstep.clusters.ray_internals.fork_server import OUTLIVES_SIGTERM

_AT_MOST_S, _EVERY_S = 30.0, 0.02
"""How long a node may take to start, as with Ray, and how often it is asked about."""

_Popen = services.ConsolePopen

Begun = Callable[[Sequence[str], int], None]
"""What is told of each process of the cluster as it is started: its command and its id."""


class _OutlivesSigterm(_Popen):  # type: ignore[misc,valid-type]
    """A process of the cluster: in a session of its own, and deaf to SIGTERM, as Ray makes them all to SIGINT. What it starts is told so."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        preexec_fn: Callable[[], object],
        begun: Begun,
        **settings: Any,
    ) -> None:
        def begin() -> None:
            preexec_fn()
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

        environment = {**env, OUTLIVES_SIGTERM: "1"}
        super().__init__(command, env=environment, preexec_fn=begin, start_new_session=True, **settings)
        begun(command, self.pid)

    def terminate(self) -> None:
        """How Ray ends it with the cluster: there is nothing to save, and what a raylet has started would look for it for a second."""
        with suppress(psutil.NoSuchProcess):
            started = psutil.Process(self.pid).children(recursive=True)
            self.kill()
            for process in started:
                with suppress(psutil.NoSuchProcess):
                    process.kill()


@contextmanager
def own_node(*, logs: bool, begun: Begun) -> Iterator[None]:
    """In this block `ray.init` starts a cluster without an autoscaler and a dashboard. With `logs` false also without the process that sends
    the workers' output to the driver.

    `ray.init(include_dashboard=False)` alone starts a process that would serve nothing, and waits until it has an address. It also asks
    but once a second whether the node has started. SIGTERM to the driver's process group, as `timeout` sends it, or to all processes, as Slurm and
    systemd send it, leaves the cluster as it is: the driver ends it after a last checkpoint.
    """
    left_out = {"start_monitor", "start_api_server"} | (set() if logs else {"start_log_monitor"})
    methods, get_node = {name: vars(Node)[name] for name in left_out}, services.get_node
    for name in left_out:
        setattr(Node, name, lambda *_, **__: None)
    services.get_node, services.ConsolePopen = (
        _once_it_is_there(get_node),
        partial(_OutlivesSigterm, begun=begun),
    )
    try:
        yield
    finally:
        services.get_node, services.ConsolePopen = get_node, _Popen
        for name, method in methods.items():
            setattr(Node, name, method)


def _once_it_is_there(get_node: Callable[[str, str], dict[str, Any]]) -> Callable[[str, str], dict[str, Any]]:
    """Ray's function, called once the node is registered or time is up: by itself it sleeps for a whole second if the node is not registered yet."""

    def get_when_registered(gcs_address: str, node_id: str) -> dict[str, Any]:
        state, until = GlobalState(), time.monotonic() + _AT_MOST_S
        state._initialize_global_state(services._get_gcs_client_options(gcs_address))
        while time.monotonic() < until and all(node["NodeID"] != node_id for node in state.node_table()):
            time.sleep(_EVERY_S)
        return get_node(gcs_address, node_id)

    return get_when_registered
