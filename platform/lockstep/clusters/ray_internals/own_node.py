"""The local cluster that a driver starts for itself, with fewer processes and sooner. See `unavailable`."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import psutil  # type: ignore[import-untyped]
from ray._private import services
from ray._private.node import Node
from ray._private.state import GlobalState
from ray._raylet import (  # type: ignore[attr-defined]
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    persist_port,
)

from lockstep.clusters.ray_internals.fork_server import OUTLIVES_SIGTERM

_AT_MOST_S, _EVERY_S = 120.0, 0.02
"""How long it is seen at once that a raylet has ended, and how often the node is asked about: as long as RAY_raylet_start_wait_time_s lets Ray wait."""

_Popen = services.ConsolePopen

_AGENT = "--dashboard_agent_command="
_WAITS = "import os, time\nwhile os.getppid() == int(os.environ['RAY_RAYLET_PID']): time.sleep(1)"
"""What stands where Ray has the agent of its dashboard. A raylet, which gives its agents its number, ends if that ends, and nothing is to outlive a raylet."""


def _is_raylet(command: Sequence[str]) -> bool:
    return Path(command[0]).name == "raylet"


def _without_agent(command: Sequence[str]) -> Sequence[str]:
    """A raylet's command without the agent of the dashboard, which serves what nobody asks of a command's own cluster.

    The raylet is told what Ray's own agent tells it where it has no services: -1 in place of its ports. It would wait for them for 15 s
    and abort, and the agent imports for two seconds of a processor, which a busy machine does not have for half a minute.
    """
    agent = next((word for word in command if word.startswith(_AGENT)), None)
    if agent is None:
        return command
    words = dict(word.partition("=")[::2] for word in shlex.split(agent.removeprefix(_AGENT)))
    for name in (METRICS_AGENT_PORT_NAME, METRICS_EXPORT_PORT_NAME, DASHBOARD_AGENT_LISTEN_PORT_NAME):
        persist_port(words["--session-dir"], words["--node-id"], name, -1)
    waits = _AGENT + shlex.join([sys.executable, "-I", "-S", "-c", _WAITS])
    return [waits if word == agent else word for word in command]


class Watch(Protocol):
    """What is told of the cluster's processes."""

    def begun(self, command: Sequence[str], pid: int) -> None:
        """From now on the cluster depends on this process: the raylet once its node is registered, any other when it is started."""

    def forget(self) -> None:
        """The cluster is given up before anything depends on it: its processes are about to be ended."""


class RayletEndedError(Exception):
    """The raylet has ended before its node was registered; all that was started for this cluster has been ended too."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class _OutlivesSigterm(_Popen):  # type: ignore[misc,valid-type]
    """A process of the cluster: in a session of its own, and deaf to SIGTERM, as Ray makes them all to SIGINT. What it starts is told so."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        preexec_fn: Callable[[], object],
        started: list[_OutlivesSigterm],
        watch: Watch,
        **settings: Any,
    ) -> None:
        if _is_raylet(command):
            command = _without_agent(command)

        def begin() -> None:
            preexec_fn()
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

        environment = {**env, OUTLIVES_SIGTERM: "1"}
        super().__init__(command, env=environment, preexec_fn=begin, start_new_session=True, **settings)
        self.command = command
        started.append(self)
        if not _is_raylet(command):
            watch.begun(command, self.pid)

    def ended(self) -> int | None:
        """The exit code of a process that has ended, negative if a signal ended it; its number stays taken, and with it its session's."""
        state = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if state is None:
            return None
        return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status

    def end_session(self) -> None:
        """End it and what it has started, also what has outlived it."""
        for pid in psutil.pids():
            with suppress(ProcessLookupError):
                if os.getsid(pid) == self.pid:
                    os.kill(pid, signal.SIGKILL)
        self.wait()

    def terminate(self) -> None:
        """How Ray ends it with the cluster: there is nothing to save, and what a raylet has started would look for it for a second."""
        with suppress(psutil.NoSuchProcess):
            started = psutil.Process(self.pid).children(recursive=True)
            self.kill()
            for process in started:
                with suppress(psutil.NoSuchProcess):
                    process.kill()


@contextmanager
def own_node(*, logs: bool, watch: Watch) -> Iterator[None]:
    """In this block `ray.init` starts a cluster without an autoscaler, a dashboard and its agent. With `logs` false also without the process that sends
    the workers' output to the driver.

    `ray.init(include_dashboard=False)` alone starts a process that would serve nothing, and waits until it has an address. It also asks
    but once a second whether the node has started. SIGTERM to the driver's process group, as `timeout` sends it, or to all processes, as Slurm and
    systemd send it, leaves the cluster as it is: the driver ends it after a last checkpoint.

    RayletEndedError where the raylet ends before its node is registered, as it does by itself after 15 s of a busy machine on which its agent for
    runtime environments has not begun; Ray's own function then waits for two minutes, and ends the process.
    """
    left_out = {"start_monitor", "start_api_server"} | (set() if logs else {"start_log_monitor"})
    methods, get_node = {name: vars(Node)[name] for name in left_out}, services.get_node
    for name in left_out:
        setattr(Node, name, lambda *_, **__: None)
    started: list[_OutlivesSigterm] = []
    services.get_node = _once_it_is_there(get_node, started, watch)
    services.ConsolePopen = partial(_OutlivesSigterm, started=started, watch=watch)
    try:
        yield
    except RayletEndedError:
        watch.forget()
        for process in started:
            process.end_session()
        raise
    finally:
        services.get_node, services.ConsolePopen = get_node, _Popen
        for name, method in methods.items():
            setattr(Node, name, method)


def _once_it_is_there(
    get_node: Callable[[str, str], dict[str, Any]], started: Sequence[_OutlivesSigterm], watch: Watch
) -> Callable[[str, str], dict[str, Any]]:
    """Ray's function, called once the node is registered or time is up: by itself it sleeps for a whole second if the node is not registered yet."""

    def get_when_registered(gcs_address: str, node_id: str) -> dict[str, Any]:
        state, until = GlobalState(), time.monotonic() + _AT_MOST_S
        state._initialize_global_state(services._get_gcs_client_options(gcs_address))
        raylets = [process for process in started if _is_raylet(process.command)]
        while time.monotonic() < until and all(node["NodeID"] != node_id for node in state.node_table()):
            for raylet in raylets:
                if (code := raylet.ended()) is not None:
                    raise RayletEndedError(code)
            time.sleep(_EVERY_S)
        for raylet in raylets:
            watch.begun(raylet.command, raylet.pid)
        return get_node(gcs_address, node_id)

    return get_when_registered
