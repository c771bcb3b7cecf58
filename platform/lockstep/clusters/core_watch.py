"""Watches the two processes of Ray on which a driver depends: the raylet of its node, and the cluster's GCS.

Ray ends a driver without a word: after its raylet at the next call that needs it, and a minute after the GCS. Of a cluster that the
driver starts, the kernel tells at once that one of them has ended, from the moment it was started. Of any other, both are asked now
and then. The guardian hears of both as well: it says why the command ends where Ray was quicker than the driver.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

import psutil  # type: ignore[import-untyped]

from lockstep.clusters import problems
from lockstep.clusters.reachability import check_answers, host_and_port, reached
from lockstep.driver.guardian import RECORD_S, Guardian, ending_line
from lockstep.driver.signals import end_command, ends_commands
from lockstep.errors import ClusterError, LockstepError
from lockstep.running_time import running_s

PARTS: Mapping[str, str] = {
    "raylet": "the raylet, Ray's process on this node,",
    "gcs_server": "the GCS, Ray's central process of the cluster,",
}
"""The processes, by their names in the system, as a person is told of them."""

LOOK_S = 0.5
"""How often it is looked whether the watch is over."""

ASK_S = 5.0
"""How often a cluster that others have started is asked."""

GCS_SILENT_S = 30.0
"""How long the GCS of such a cluster may be silent: Ray ends the driver after a minute, unless its setting says otherwise."""

RAYLET_SILENT_S = 8.0
"""How long the raylet may refuse connections; one that has ended does not come back."""

_RAYS_LIMIT, _BEFORE_RAY_S = "RAY_gcs_rpc_server_reconnect_timeout_s", 15.0

_lost: ClusterError | None = None


class Part(NamedTuple):
    """A process of the cluster that this driver has started."""

    name: str
    pid: int
    logs: str
    """The folder of its logs; empty if it is not known."""

    @property
    def details(self) -> str:
        """Which process it was, for error.txt."""
        logs = f"; its logs are in {self.logs!r}" if self.logs else ""
        return f"{self.name}, process {self.pid}{logs}"


def lost_core() -> ClusterError | None:
    """Why this driver's cluster is gone, once it is: from then on no call of Ray is answered."""
    return _lost


class CoreWatch:
    """The watch of one command, from before its cluster is started or joined until the connection is about to end.

    Where one of the two processes is lost, the guardian records the end of the run or sweep, whose folder is below `folder`, and the
    command ends with one line. In a process that is no command, the block raises the error.
    """

    def __init__(self, guardian: Guardian, folder: Path) -> None:
        self._guardian, self._folder = guardian, folder
        self._parts: dict[int, Part] = {}
        """By the descriptor that tells of the process's end."""
        self._ends = select.epoll()
        self._deciding = threading.Lock()
        self._over, self._reported = threading.Event(), threading.Event()
        self._error: LockstepError | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        global _lost
        _lost = None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        for file, _ in self._ends.poll(
            0.0
        ):  # what failed is a consequence, which came before the cause was seen
            self._lose(*_ended(self._parts[file]), list(self._parts.values()))
        with self._deciding:
            self._over.set()
        self._guardian.tell(parts=[], asked=[])
        if self._error is None:
            if self._thread is not None:
                self._thread.join()
            for file in self._parts:
                os.close(file)
            self._ends.close()
        elif not isinstance(error, KeyboardInterrupt):
            self._reported.wait(RECORD_S + LOOK_S)
            raise self._error from error

    def begun(self, command: Sequence[str], pid: int) -> None:
        """Watch a process that this one has just started, if it is one of the two."""
        name = Path(command[0]).name if command else ""
        if name not in PARTS or pid in {part.pid for part in self._parts.values()}:
            return
        words = [word.partition("=") for word in command]
        part = Part(name, pid, next((value for name, _, value in words if name.lstrip("-") == "log_dir"), ""))
        try:
            file = os.pidfd_open(pid)
        except ProcessLookupError:
            self._lose(*_ended(part), [part])
            return
        self._parts[file] = part
        self._guardian.tell(
            parts=[[part.pid, str(_gone(part, "has ended")), part.details] for part in self._parts.values()]
        )
        self._ends.register(file, select.EPOLLIN)
        if self._thread is None:
            self._watch(self._watch_own)

    def forget(self) -> None:
        """The cluster that was being started is given up before anything depends on it: its processes may end."""
        with self._deciding:
            # The files stay open: the thread may have the number of one, which must not become another process's.
            for file in self._parts:
                self._ends.unregister(file)
            self._parts.clear()
        self._guardian.tell(parts=[])

    def started(self) -> None:
        """The cluster that this process has started is there: watch those of its processes that are not watched yet."""
        for process in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                if process.name() in PARTS:
                    self.begun([process.name(), *process.cmdline()[1:]], process.pid)

    def joined(self) -> None:
        """Note that this process has joined a cluster that others have started: its two processes are asked now and then."""
        import ray

        address, node_id = ray.get_runtime_context().gcs_address, ray.get_runtime_context().get_node_id()
        node = next(node for node in ray.nodes() if node["NodeID"] == node_id)
        raylet = node["NodeManagerAddress"], node["NodeManagerPort"]
        asked = {"raylet": raylet, "gcs_server": host_and_port(address)}
        gone = {name: _silent(name, address, "does not answer") for name in asked}
        self._guardian.tell(asked=[[*endpoint, str(gone[name])] for name, endpoint in asked.items()])
        self._watch(lambda: self._watch_joined(address, raylet))

    def _watch(self, watch: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=watch, name="lockstep-core", daemon=True)
        self._thread.start()

    def _watch_own(self) -> None:
        while not self._over.is_set():
            for file, _ in self._ends.poll(LOOK_S):
                if (part := self._parts.get(file)) is not None:
                    self._lose(*_ended(part), list(self._parts.values()))
                    return

    def _watch_joined(self, address: str, raylet: tuple[str, int]) -> None:
        def gcs_answers() -> bool:
            try:
                check_answers(address, look=running_s)
            except ClusterError:
                return False
            return True

        limit_s = GCS_SILENT_S
        with suppress(KeyError, ValueError):
            limit_s = max(GCS_SILENT_S, float(os.environ[_RAYS_LIMIT]) - _BEFORE_RAY_S)
        asked: dict[str, tuple[Callable[[], bool], float]] = {
            "raylet": (lambda: reached(*raylet), RAYLET_SILENT_S),
            "gcs_server": (gcs_answers, limit_s),
        }
        silent_since: dict[str, float] = {}
        while not self._over.wait(LOOK_S if silent_since else ASK_S):
            for name, (ask, limit) in asked.items():
                asked_at = running_s()
                if ask():
                    silent_since.pop(name, None)
                    continue
                silent_s = running_s() - silent_since.setdefault(name, asked_at)
                if silent_s > limit:
                    self._lose(_silent(name, address, f"has not answered for {silent_s:.0f} s"), "", [])
                    return

    def _lose(self, error: ClusterError, details: str, parts: Sequence[Part]) -> None:
        """The main thread may wait in Ray for ever, and Ray may end this process at any moment: the guardian goes on by itself."""
        global _lost
        with self._deciding:
            if self._over.is_set() or self._error is not None:
                return
            self._error = _lost = error
        _end_workers(parts)
        run_id, problem = self._guardian.record(str(error), details)
        self._guardian.release(notifies=ends_commands())
        if run_id is None and not problem and self._guardian.run_id is not None:
            line = (
                f"{error}; {self._guardian.kind} {self._guardian.run_id} had ended before, as its record says"
            )
        else:
            line = ending_line(str(error), run_id, self._folder, problem, self._guardian.kind)
        self._error = error.with_message(line)
        end_command(self._error)
        self._reported.set()


def _end_workers(parts: Sequence[Part]) -> None:
    """End what the raylet has started: workers that go on would save what belongs to no run any more."""
    for part in parts:
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(part.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.kill()


def _ended(part: Part) -> tuple[ClusterError, str]:
    return _gone(part, _how(part.pid)), part.details


def _gone(part: Part, how: str) -> ClusterError:
    return problems.CORE_GONE(part=PARTS[part.name], got=how)


def _silent(name: str, address: str, how: str) -> ClusterError:
    return problems.CORE_SILENT(part=PARTS[name], address=address, got=how)


def _how(pid: int) -> str:
    """How a child of this process has ended. It is not reaped: Ray does that."""
    with suppress(ChildProcessError):
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is not None and status.si_code == os.CLD_EXITED:
            return f"has ended (exit code {status.si_status})"
        if status is not None:
            name = signal.Signals(status.si_status).name
            more = (
                "; where the kernel's out-of-memory killer did it, dmesg says so" if name == "SIGKILL" else ""
            )
            return f"was ended by {name}{more}"
    return "has ended"
