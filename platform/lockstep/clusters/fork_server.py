"""Worker processes that are forked from one that has imported what they need: seconds of work, done once a job.

Ray starts a worker by the `py_executable` of its runtime environment, here this file in an interpreter without site-packages:

* The first whose environment names modules in PRELOAD becomes the server: it imports them, and forks. Ray's worker runs in
  the child.
* Others hand their arguments, environment, working directory and open files over to the server, and end. They wait for it if
  they have PRELOAD, and start as ever if they have not and there is none.
* A driver or `lockstep cluster up` that starts a cluster also starts a process ahead. Beside the start of Ray it imports the modules
  that read none of Ray's variables, and then forks the servers of the cluster's jobs: those whose environment differs from its own only in
  Ray's variables, and only while the files that it imported have not changed.

A server forks for workers of its own environment alone, its job's, for what it has imported was read under that environment. It ends
with the raylet or the driver that started it. Lost, it is replaced by the next worker that asks for it.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

PRELOAD = "LOCKSTEP_PRELOAD"
"""The modules that a worker's process is to have imported, with commas between them."""

SERVER_AHEAD = "LOCKSTEP_SERVER_AHEAD"
"""The name of the process that the driver has import ahead: an abstract socket, without its null byte."""

AHEAD_OF_RAY = ("lockstep.training.loop", "torch._dynamo", "pyarrow.parquet", "pandas")
"""What takes longest of all that workers import, and reads no variable of Ray's."""

_READ_LATER = ("LOCKSTEP_", "__RAY_WORKER_PROCESS_SETUP_HOOK", "RAY_WARN_")
"""How the variables begin that no module reads as it is imported. Not RAY_JOB_ID: Ray keeps what it read first, for good."""

_RAYS = "RAY_"
"""How the variables begin that only Ray reads: as it is imported, and some of them for good."""

_SHELLS = {"PS1", "PWD", "OLDPWD", "SHLVL", "_", "SPT_NOENV"}
"""What only a shell reads or sets, and the title of a process: Ray starts a worker by a shell."""

_RAYLET_S, _ASK_S = 0.5, 10.0
"""How often the server looks whether its raylet lives, and how long whoever asks may take to say what for."""

IDLE_S = 60.0
"""How long a server stays that no worker is left of, for the next attempt."""

_FORK_S, _IMPORT_S = 8.0, 45.0
"""How long a worker waits to be forked, and for a server that still imports: then it starts by itself. Ray gives up a process that has not come after 60 s."""


def py_executable() -> str:
    """What starts this machine's workers, for a runtime environment; nothing where the system cannot hand processes over."""
    if not sys.platform.startswith("linux"):
        return ""  # abstract sockets are Linux's
    return f"{shlex.quote(sys.executable)} -I -S {shlex.quote(__file__)}"


def start_worker(words: list[str]) -> NoReturn:
    """Become the worker `words`, or have the server fork it."""
    raylet = os.getppid()
    name, plain = _address(os.environ, raylet), [sys.executable, *words]
    until = time.monotonic() + _IMPORT_S
    while time.monotonic() < until:
        place = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with suppress(OSError):  # there is none, or it still imports, or has just ended
            place.connect(name)
            if _user(place) != os.getuid():  # somebody else has taken the name
                os.execv(sys.executable, plain)
            _hand_over(place, words)
            place.settimeout(_FORK_S)
            try:
                if place.recv(1):
                    os._exit(0)
            except TimeoutError:  # it hangs
                os.execv(sys.executable, plain)
            place.settimeout(None)
        if not os.environ.get(PRELOAD):
            os.execv(sys.executable, plain)
        with suppress(OSError):  # there is one
            place.bind(name)
            if _taken_over(place, words, until):
                os._exit(0)
            place.set_inheritable(True)
            serving = "from lockstep.clusters.fork_server import serve; serve()"
            os.execv(
                sys.executable, [sys.executable, "-c", serving, str(place.fileno()), str(raylet), *words]
            )
        place.close()
        time.sleep(0.02)
    os.execv(sys.executable, plain)


def _hand_over(place: socket.socket, words: list[str], *more: int) -> None:
    """Send what a worker is made of, and more open files."""
    given = json.dumps([words, dict(os.environ), str(Path.cwd())]).encode()
    socket.send_fds(place, [struct.pack("!Q", len(given)) + given], [0, 1, 2, *more])


def _taken_over(place: socket.socket, words: list[str], until: float) -> bool:
    """Whether the process that the driver has import ahead becomes the server, with this place, and forks this worker first."""
    name = os.environ.get(SERVER_AHEAD)
    if not name:
        return False
    ahead = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with ahead, suppress(OSError):  # there is none any more, or it hangs
        ahead.connect(f"\0{name}")
        if _user(ahead) != os.getuid():
            return False
        _hand_over(ahead, words, place.fileno())
        ahead.settimeout(max(0.0, until - time.monotonic()))
        return ahead.recv(1) == b"1"
    return False


def _address(environment: Mapping[str, str], raylet: int) -> str:
    """The server's name, which no file system has: the raylet and the environment tell one from another."""
    told = json.dumps([os.getuid(), raylet, _read_at_import(environment)], sort_keys=True)
    return f"\0lockstep-workers-{hashlib.sha256(told.encode()).hexdigest()}"


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a module may read as it is imported."""
    return {name: value for name, value in environment.items() if not name.startswith(_READ_LATER)}


def _user(place: socket.socket) -> int:
    """Whose process the other end is."""
    _, user, _ = struct.unpack(
        "3i", place.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return int(user)


class _Worker(NamedTuple):
    """What is handed over of a worker."""

    words: list[str]
    environment: dict[str, str]
    folder: str
    files: Sequence[int]
    """Its standard input, output and error, and what else was sent."""

    def close(self) -> None:
        for file in self.files:
            os.close(file)

    def become(self) -> None:
        """Make this process the worker's."""
        for number, file in enumerate(self.files[:3]):
            os.dup2(file, number)
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)


def serve() -> None:
    """Import what the workers need, and fork them until the raylet has ended, or nobody needs it. Returns in a worker, once it has done its work."""
    server, raylet, words = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3:]
    sys.path[0] = str(Path(words[0]).parent)  # as python has it for a script
    _import(os.environ[PRELOAD].split(","))
    server.listen(128)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a worker
    pid = _fork(server)
    _run(_forked(server, raylet, pid) if pid else words)


def _import(modules: Sequence[str]) -> None:
    for name in modules:
        with suppress(Exception):  # the worker imports it again, and tells what is wrong with it
            importlib.import_module(name)
    sys.stdout.flush()  # what a module printed is no worker's, which would have a copy of it


def _run(words: list[str]) -> None:
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def _forked(server: socket.socket, parent: int, first: int) -> list[str]:
    """In each child the words of its worker, of those that ask. The process `first` is the first worker."""
    workers, needed_at = {first}, time.monotonic()
    while os.getppid() == parent:
        workers = {pid for pid in workers if Path(f"/proc/{pid}").exists()}
        if workers:
            needed_at = time.monotonic()
        elif time.monotonic() - needed_at > IDLE_S:
            break
        if (asked := _next(server)) is None:
            continue
        with asked, suppress(OSError):  # whoever asked was killed meanwhile
            found = _asked(server, asked)
            if isinstance(found, list):
                return found
            workers |= {found} if found else set()
    os._exit(0)


def _next(server: socket.socket) -> socket.socket | None:
    """Whoever of this user asks next, if soon."""
    if not select.select([server], [], [], _RAYLET_S)[0]:
        return None
    asked, _ = server.accept()
    if _user(asked) != os.getuid():
        asked.close()
        return None
    asked.settimeout(_ASK_S)
    return asked


def _received(asked: socket.socket) -> _Worker:
    """What whoever asks hands over."""
    first, files, _, _ = socket.recv_fds(asked, 1 << 16, 4)
    try:
        (size,) = struct.unpack("!Q", first[:8])
        given = first[8:]
        while len(given) < size and (more := asked.recv(1 << 16)):
            given += more
        words, environment, folder = json.loads(given)
    except BaseException:
        for file in files:
            os.close(file)
        raise
    return _Worker(words, environment, folder, files)


def _asked(server: socket.socket, asked: socket.socket) -> list[str] | int | None:
    """Fork the worker that is asked for. In the child its words, here its process id; None where nobody waits for it any more."""
    worker = _received(asked)
    try:
        if _has_left(asked):
            return None
        if not (pid := _fork(server)):
            worker.become()
            return worker.words
        asked.send(b"1")
        return pid
    finally:
        worker.close()


def _has_left(asked: socket.socket) -> bool:
    """Whether whoever asked waits no more: it has started by itself."""
    return bool(select.select([asked], [], [], 0.0)[0]) and not asked.recv(1)


def _fork(server: socket.socket) -> int:
    """The child's process id, and 0 in the child. Ray ends a worker's process group, which is therefore its own."""
    if pid := os.fork():
        return pid
    server.close()
    os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return 0


# --- ahead of the cluster -------------------------------------------------------------------------------------


@contextmanager
def server_ahead(environment: Mapping[str, str], modules: Sequence[str] = AHEAD_OF_RAY) -> Iterator[None]:
    """Have a process of this environment import `modules`, and fork the servers of the cluster that is started within.

    It ends with the block, or with this process.
    """
    import subprocess  # not by each worker that starts

    if not py_executable():
        yield
        return
    name = f"lockstep-ahead-{os.urandom(16).hex()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as place:
        place.bind(f"\0{name}")
        place.listen(8)
        serving = "import sys; sys.path.pop(0); from lockstep.clusters.fork_server import serve_ahead; serve_ahead()"
        server = subprocess.Popen(
            [sys.executable, "-c", serving, str(place.fileno()), str(os.getpid()), *modules],
            env=dict(environment),
            pass_fds=[place.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in this terminal is not for the workers
        )
    os.environ[SERVER_AHEAD] = name
    try:
        yield
    finally:
        os.environ.pop(SERVER_AHEAD, None)
        server.kill()
        server.wait()


def serve_ahead() -> None:
    """In the process that `server_ahead` starts. Returns in a worker, once it has done its work."""
    ahead, driver, environment = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), dict(os.environ)
    began = time.time_ns()
    _import(sys.argv[3:])
    imported = _imported_files()
    if any(written >= began for _, written in imported.values()):
        os._exit(0)  # nobody knows in which state it was read
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a server
    this, worker = os.getpid(), None
    while worker is None and os.getppid() == driver:
        if (asked := _next(ahead)) is not None:
            with asked, suppress(OSError):  # whoever asked was killed meanwhile
                worker = _fitting(asked, ahead, environment, imported)
    if worker is None:
        os._exit(0)
    ahead.close()
    _run(_first_of(worker, this))


def _fitting(
    asked: socket.socket, ahead: socket.socket, environment: Mapping[str, str], imported: Mapping[str, Any]
) -> _Worker | None:
    """In a child, the worker that asks, for which what was `imported` in this environment is; None here."""
    worker = _received(asked)
    with ExitStack() as stack:
        stack.callback(worker.close)  # or its place would stay taken
        if _has_left(asked) or _imported_under(worker.environment) != _imported_under(environment):
            return None
        if _imported_files() != imported:  # a package was edited, or installed anew: once more from the start
            worker.close()
            ahead.set_inheritable(True)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.execve(sys.executable, sys.orig_argv, environment)
        if not os.fork():
            stack.pop_all()
            return worker
        asked.send(b"1")
        return None


def _imported_files() -> dict[str, tuple[int, int]]:
    """Which file each module was read from, as far as they are there: its inode, and when it was last changed, in nanoseconds of Unix time."""
    found = {}
    for module in list(sys.modules.values()):
        if file := getattr(module, "__file__", None):
            with suppress(OSError):
                seen = Path(file).stat()
                found[file] = seen.st_ino, seen.st_ctime_ns
    return found


def _imported_under(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that what is imported ahead may read."""
    read = _read_at_import(environment).items()
    return {name: value for name, value in read if not name.startswith(_RAYS) and name not in _SHELLS}


def _first_of(worker: _Worker, parent: int) -> list[str]:
    """Go on as the server that this worker would have become, and fork it first: in each child the words of its worker."""
    server = socket.socket(fileno=os.dup(worker.files[3]))
    os.environ.clear()
    os.environ.update(worker.environment)
    sys.path.insert(0, str(Path(worker.words[0]).parent))
    _import(os.environ[PRELOAD].split(","))
    server.listen(128)
    if not (pid := _fork(server)):
        worker.become()
    worker.close()
    return _forked(server, parent, pid) if pid else worker.words


if __name__ == "__main__":
    start_worker(sys.argv[1:])
