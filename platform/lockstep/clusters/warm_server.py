"""A process that imports what the workers of a cluster need beside the start of Ray, and then forks the servers of the cluster's jobs.

A driver or `lockstep cluster up` that starts a cluster starts one too. It forks the servers (`fork_server`) whose environment differs
from its own only in Ray's variables and in those that what it imported has set, and only while the files that it imported have not changed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from lockstep.clusters.ray_internals.fork_server import (
    CREDENTIAL_VARIABLE,
    PRELOAD,
    HandedOver,
    address_ahead,
    credentials,
    fork,
    has_left,
    import_modules,
    may_fork,
    next_asking,
    py_executable,
    read_at_import,
    received,
    run_script,
    serve_forks,
)

_THAT_RAY_IMPORTS = (
    "google.protobuf.json_format", "requests", "jsonschema", "fsspec.implementations.local", "rich.layout", "rich.progress",
    "click", "filelock", "pydantic.dataclasses",
)  # fmt: skip
"""Packages of others, which take nearly half of the time that Ray takes to be imported."""

AHEAD_OF_RAY = (
    "lockstep.training.loop",
    "torch._dynamo",
    "pyarrow.parquet",
    "pandas",
    *_THAT_RAY_IMPORTS,
)
"""What takes longest of all that workers import, and reads no variable of Ray's."""

_RAYS = "RAY_"
"""How the variables begin that only Ray reads: as it is imported, and some of them for good."""

_SHELLS = {"PS1", "PWD", "OLDPWD", "SHLVL", "_", "SPT_NOENV"}
"""What only a shell reads or sets, and the title of a process: Ray starts a worker by a shell."""


@contextmanager
def server_ahead(environment: Mapping[str, str], modules: Sequence[str] = AHEAD_OF_RAY) -> Iterator[None]:
    """Have a process of this environment import `modules`, and fork the servers of the cluster that is started within.

    It ends with the block, or with this process.
    """
    if not py_executable():
        yield
        return
    secret = os.urandom(32).hex()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address_ahead(secret))
        listener.listen(8)
        serving = "import sys; sys.path.pop(0); from lockstep.clusters.warm_server import serve_ahead; serve_ahead()"
        server = subprocess.Popen(
            [sys.executable, "-c", serving, str(listener.fileno()), str(os.getpid()), *modules],
            env={**environment, CREDENTIAL_VARIABLE: secret},
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in this terminal is not for the workers
        )
    os.environ[CREDENTIAL_VARIABLE] = secret
    try:
        yield
    finally:
        os.environ.pop(CREDENTIAL_VARIABLE, None)
        server.kill()
        server.wait()


def serve_ahead() -> None:
    """In the process that `server_ahead` starts. Returns in a worker, once it has done its work."""
    ahead, driver, environment = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), dict(os.environ)
    began = time.time_ns()
    import_modules(sys.argv[3:])
    credentials()  # before it is noted what was imported
    imported = _imported_files()
    if any(written >= began for _, written in imported.values()):
        os._exit(0)  # nobody knows in which state it was read
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a server
    this, accepted = os.getpid(), None
    while accepted is None and os.getppid() == driver:
        if (connection := next_asking(ahead)) is not None:
            with connection, suppress(OSError):  # the client was killed meanwhile
                accepted = _accept(connection, ahead, environment, imported)
    if accepted is None:
        os._exit(0)
    ahead.close()
    run_script(_first_of(*accepted, this))


def _accept(
    asked: socket.socket, ahead: socket.socket, environment: Mapping[str, str], imported: Mapping[str, Any]
) -> tuple[HandedOver, socket.socket] | None:
    """Fork for the worker that asks, if this process has imported what it needs. In the child: the worker, and where to answer. Here: None.

    `imported` are the files that were imported, in this `environment`. A variable that an import has set does not count as a difference.
    """
    worker = received(asked)
    with ExitStack() as stack:
        stack.callback(worker.close)  # or its place would stay taken
        set_since = {name: value for name, value in os.environ.items() if name not in environment}
        this, theirs = (
            _imported_under({**set_since, **variables}) for variables in (environment, worker.environment)
        )
        if has_left(asked) or theirs != this:
            return None
        if _imported_files() != imported:  # a package was edited, or installed anew: once more from the start
            worker.close()
            ahead.set_inheritable(True)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.execve(sys.executable, sys.orig_argv, environment)
        if not os.fork():
            stack.pop_all()
            return worker, asked.dup()
        return None


def _imported_files() -> dict[str, tuple[int, int]]:
    """Which file each module was read from, as far as they are there: its inode, and when it was last changed, in nanoseconds of Unix time."""
    files = {}
    for module in list(sys.modules.values()):
        if file := getattr(module, "__file__", None):
            with suppress(OSError):
                file_status = Path(file).stat()
                files[file] = file_status.st_ino, file_status.st_ctime_ns
    return files


def _imported_under(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that what is imported ahead may read."""
    read = read_at_import(environment).items()
    return {name: value for name, value in read if not name.startswith(_RAYS) and name not in _SHELLS}


def _first_of(worker: HandedOver, asked: socket.socket, parent: int) -> list[str]:
    """Go on as the server that this worker would have become, fork it first, and tell `asked` so: in each child the words of its worker."""
    server = socket.socket(fileno=os.dup(worker.files[3]))
    os.environ.clear()
    os.environ.update(worker.environment)
    sys.path.insert(0, str(Path(worker.words[0]).parent))
    import_modules(os.environ[PRELOAD].split(","))
    if has_left(asked) or not may_fork():  # who asked becomes the server itself
        os._exit(0)
    server.listen(128)
    with asked:
        if not (pid := fork(server)):
            worker.become()
        else:
            with suppress(OSError):  # it was killed meanwhile
                asked.send(b"1")
    worker.close()
    return serve_forks(server, parent, pid) if pid else worker.words
