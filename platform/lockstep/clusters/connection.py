"""The connection to a Ray cluster: what opens it, and how long it lasts."""

from __future__ import annotations

import importlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lockstep.clusters import problems
from lockstep.clusters.authentication import (
    LOOPBACK_ONLY,
    guard_rays_token,
    host_of,
    is_loopback,
    rays_token,
)
from lockstep.clusters.background import disconnect, in_background
from lockstep.clusters.core_watch import CoreWatch
from lockstep.clusters.local_cluster import running_cluster, set_up_workers_quickly
from lockstep.clusters.ray_internals import CONTROLLER_LOGGER, is_public_only, unavailable
from lockstep.clusters.ray_internals.address_file import default_folder
from lockstep.clusters.ray_internals.fork_server import preloading, py_executable
from lockstep.clusters.ray_settings import RAY_SETTINGS, UNSEEN
from lockstep.clusters.reachability import LOCAL, check_answers, cluster_address, host_and_port
from lockstep.clusters.warm_server import server_ahead
from lockstep.driver.signals import Interrupted, StopSignal
from lockstep.errors import ClusterError, LockstepError, first_line
from lockstep.files import own_folder
from lockstep.running_time import running_s
from lockstep.training.worker_environment import WORKER_ENVIRONMENT, sent_environment

if TYPE_CHECKING:
    from lockstep.clusters.ray_internals.own_node import Watch

ASK_S = 1.0
"""How often a cluster that is being joined is asked whether it still answers."""

TOLD_S = 8.0
"""After how long a person is told that the cluster has not let the driver in yet."""

SILENT_S = 4.0
"""How long a cluster may be silent while it is being joined."""

JOIN_S = 60.0
"""How long a cluster that answers may take to let a driver in."""

STARTS = 3
"""How often a cluster is started whose raylet ends before its node is registered."""

LONGEST_FOLDER = 107 - len("/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
"""The most bytes of the path in which Ray keeps its sessions: the path of a socket has at most 107."""

_SETTINGS = {**RAY_SETTINGS, **WORKER_ENVIRONMENT}


def _unsaid(_text: str) -> None: ...


def importing_ahead(address: str | None) -> AbstractContextManager[None]:
    """Where a cluster is started within, its workers' imports begin now, beside what the driver does until then."""
    loaded = sys.modules.get("ray")
    connects = loaded is None or not loaded.is_initialized()
    if connects and cluster_address(address) == LOCAL and not is_public_only():  # without forks it is no use
        return server_ahead({**_SETTINGS, **os.environ, **LOOPBACK_ONLY})
    return nullcontext()


@contextmanager
def connected(
    address: str | None,
    *,
    verbose: bool,
    for_workers: bool = False,
    preload: Sequence[str] = (),
    stop: StopSignal | None = None,
    say: Callable[[str], None] = _unsaid,
    core: CoreWatch | None = None,
) -> Iterator[bool]:
    """A connection to Ray; gives whether the cluster was started here and ends with the run.

    `for_workers`: every process that it starts there trains. A cluster whose nodes are all on this machine has its workers
    forked from a process that has imported the modules in `preload`. With `stop` a signal ends the wait for the cluster:
    Interrupted. `core` watches the cluster's own processes. ClusterError within seconds where the cluster does not answer, SpecError where this process is connected to another one.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)  # a cluster that is started here hands them on to its workers
    loaded = sys.modules.get("ray")
    if loaded is not None and loaded.is_initialized():
        _refuse_another(address)
        with core or nullcontext():
            if core is not None:
                core.joined()
            yield False
        return
    address = cluster_address(address)
    if address == LOCAL:
        os.environ.update(LOOPBACK_ONLY | UNSEEN)
        guard_rays_token()
    else:
        check_answers(address, (stop or StopSignal()).check)
    show_token(address)  # before Ray is imported: it reads the environment once
    if not verbose:
        # In a notebook, that a package is missing for widgets that nobody sees.
        logging.getLogger("ray.widgets").setLevel(logging.WARNING)
        # The traceback of a worker that is lost as it is started: the attempt's end says so in one line.
        logging.getLogger(CONTROLLER_LOGGER).setLevel(logging.CRITICAL)

    in_background(importlib.import_module, "torch", name="lockstep-import")
    settings: dict[str, Any] = {} if verbose else {"log_to_driver": False, "logging_level": logging.ERROR}
    with ExitStack() as watched:
        if core is not None:
            watched.enter_context(core)
        if address == LOCAL:
            _start(settings, preload, core, say)
        else:
            variables = sent_environment() if for_workers else {}
            # Nobody reaches a loopback address from another machine: all nodes of such a cluster are here.
            shared = on_this_machine(preload) if is_loopback(host_of(address)) else {}
            if variables or shared:
                settings["runtime_env"] = {
                    **shared,
                    "env_vars": {**variables, **shared.get("env_vars", {})},
                }
            _Joining(address, settings).wait(stop, say)
            if core is not None:
                core.joined()
        if stop is not None:
            stop.listen()  # Ray takes SIGTERM for itself when it connects
        try:
            with (
                watched.pop_all()
            ):  # the cluster's processes end with the connection: they are not watched then
                yield address == LOCAL
        except KeyboardInterrupt:
            raise  # at once: to part from Ray under an attempt that goes on would crash the process
        except BaseException:
            disconnect()
            raise
        else:
            disconnect()


def _refuse_another(named: str | None) -> None:
    """SpecError where a cluster is named that is not the one which this process has joined."""
    import ray

    if named in (None, "auto", LOCAL) or "://" in named:
        return
    joined = ray.get_runtime_context().gcs_address
    (host, port), (own_host, own_port) = host_and_port(named), host_and_port(joined)
    if port != own_port or not _may_be_one(host, own_host):
        raise problems.OTHER_CLUSTER(got=named, joined=joined)


def _may_be_one(host: str, other_host: str) -> bool:
    """Whether two names may be those of one machine: they have an address in common, or one of them is a loopback or not known here."""
    if is_loopback(host) or is_loopback(other_host):
        return True
    try:
        first, second = (
            {entry[4][0] for entry in socket.getaddrinfo(name, None)} for name in (host, other_host)
        )
    except OSError:
        return True
    return bool(first & second)


def _start(
    settings: dict[str, Any], preload: Sequence[str], core: CoreWatch | None, say: Callable[[str], None]
) -> None:
    """A new local cluster. In this thread: its processes end with the thread that started them."""
    import ray

    set_up_workers_quickly()

    def start() -> None:
        ray.init(
            address=LOCAL,
            include_dashboard=False,
            runtime_env=on_this_machine(preload),
            _temp_dir=str(session_base()),
            **settings,
        )

    try:
        if unavailable("own node"):
            start()
        else:
            _start_own_node(start, core or _Unwatched(), say, logs=settings.get("log_to_driver", True))
    except ClusterError:
        raise
    except Exception as error:  # a node that does not start is told as a bare Exception
        raise _refused("a new local cluster", error) from error
    if core is not None:
        core.started()


def _start_own_node(
    start: Callable[[], None], watch: Watch, say: Callable[[str], None], *, logs: bool
) -> None:
    from lockstep.clusters.ray_internals.own_node import RayletEndedError, own_node

    for left in reversed(range(STARTS)):
        try:
            with own_node(logs=logs, watch=watch):
                start()
        except RayletEndedError as error:
            if not left:
                raise problems.RAYLET_ENDED(times=STARTS, got=error.exit_code) from error
            say("Ray's raylet ended while the cluster was being started; starting it again")
        else:
            return


def session_base() -> Path:
    """Where Ray may keep the folder of a new local cluster. Ray opens it to all users; it lies in a folder that only this user may enter.

    In Ray's usual place, unless that makes the paths of sockets too long; else in /tmp.
    """
    bases = [default_folder().parent, Path("/tmp")]
    folders = [own_folder(base) / "ray" for base in bases if base.is_dir()]
    return next((folder for folder in folders if len(os.fsencode(folder)) <= LONGEST_FOLDER), folders[-1])


class _Unwatched:
    """Nobody watches the cluster's processes."""

    def begun(self, command: Sequence[str], pid: int) -> None: ...

    def forget(self) -> None: ...


def on_this_machine(preload: Sequence[str] = ()) -> dict[str, Any]:
    """The runtime environment of a cluster whose nodes are all on this machine; `preload` is what every process of it imports."""
    command = py_executable()
    if not command or unavailable("forked workers"):
        return {}
    return {"py_executable": command} | ({"env_vars": preloading(preload)} if preload else {})


def _refused(address: str, error: BaseException) -> ClusterError:
    return problems.NOT_CONNECTED(address=address, got=first_line(error))


class _Joining:
    """`ray.init` in a thread: it waits in C++, deaf to signals, for minutes where a cluster dies under it."""

    def __init__(self, address: str, settings: dict[str, Any]) -> None:
        self._address, self._settings = address, settings
        self._over = threading.Event()
        self._given_up = False
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def wait(self, stop: StopSignal | None, say: Callable[[str], None]) -> None:
        """Until the cluster is joined. ClusterError where it refuses or falls silent; Interrupted on a signal."""
        stop = stop or StopSignal()
        threading.Thread(target=self._join, name="lockstep-connect", daemon=True).start()
        began = heard = running_s()
        announced = False
        while not self._over.wait(0.2):
            now = running_s()
            try:
                stop.check()
                if now - heard > ASK_S:
                    check_answers(self._address, stop.check)
                    heard = running_s()
            except Interrupted as error:
                self._give_up(error)
            except ClusterError as error:
                if running_s() - heard > SILENT_S:
                    self._give_up(error)
            if now - began > TOLD_S and not announced:
                announced = True
                say(f"the cluster at {self._address} answers, but has not yet let this driver in; waiting")
            if now - began > JOIN_S:
                self._give_up(problems.NOT_LET_IN(address=self._address, seconds=f"{JOIN_S:.0f}"))
        if self._error is not None:
            raise _refused(self._address, self._error) from self._error

    def _join(self) -> None:
        import ray

        try:
            ray.init(address=self._address, **self._settings)
        except (ConnectionError, RuntimeError, ValueError) as error:
            self._error = error
        with self._lock:
            self._over.set()
            late = self._given_up and self._error is None
        if late:
            disconnect()  # nobody waits for it any more

    def _give_up(self, error: LockstepError | Interrupted) -> None:
        """Raise `error`, unless the cluster has just been joined."""
        with self._lock:
            if self._over.is_set():
                return
            self._given_up = True
        raise error


def show_token(address: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what Ray needs to speak to the cluster at `address`, unless the environment says it already.

    The token is that of the cluster that `lockstep cluster up` started, where the address is its; else Ray's own file,
    which Ray by itself would not show to a cluster that it has not started. Call it before Ray is imported, which reads the environment once.
    """
    if address == LOCAL:
        return
    if is_loopback(host_of(address)):
        environment.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    if {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & environment.keys():
        return
    cluster = running_cluster()
    if cluster is not None and _port(address) in cluster.ports:
        environment.update(cluster.access())
    elif rays_token().exists():
        environment["RAY_AUTH_MODE"] = "token"


def _port(address: str) -> int | None:
    return urlsplit(address if "://" in address else f"ray://{address}").port
