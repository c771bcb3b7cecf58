"""Worker processes that are forked from one that has imported what they need: seconds of work, done once a job.

Ray starts a worker by the `py_executable` of its runtime environment, here this file in an interpreter without site-packages:

* The first whose environment names modules in PRELOAD becomes the server: it imports them, and forks. Ray's worker runs in
  the child.
* Others hand their arguments, environment, working directory and open files over to the server, and end. They wait for it if
  they have PRELOAD, and start as ever if they have not and there is none.

A server forks for workers of its own environment alone, its job's, for what it has imported was read under that environment. It ends
with the raylet that started it. Lost, it is replaced by the next worker that asks for it.
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
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

PRELOAD = "LOCKSTEP_PRELOAD"
"""The modules that a worker's process is to have imported, with commas between them."""

_READ_LATER = ("LOCKSTEP_", "__RAY_WORKER_PROCESS_SETUP_HOOK", "RAY_WARN_")
"""How the variables begin that no module reads as it is imported. Not RAY_JOB_ID: Ray keeps what it read first, for good."""

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
            given = json.dumps([words, dict(os.environ), str(Path.cwd())]).encode()
            socket.send_fds(place, [struct.pack("!Q", len(given)) + given], [0, 1, 2])
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
            place.set_inheritable(True)
            serving = "from lockstep.clusters.fork_server import serve; serve()"
            os.execv(
                sys.executable, [sys.executable, "-c", serving, str(place.fileno()), str(raylet), *words]
            )
        place.close()
        time.sleep(0.02)
    os.execv(sys.executable, plain)


def _address(environment: Mapping[str, str], raylet: int) -> str:
    """The server's name, which no file system has: the raylet and the environment tell one from another."""
    read = {name: value for name, value in environment.items() if not name.startswith(_READ_LATER)}
    told = json.dumps([os.getuid(), raylet, read], sort_keys=True)
    return f"\0lockstep-workers-{hashlib.sha256(told.encode()).hexdigest()}"


def _user(place: socket.socket) -> int:
    """Whose process the other end is."""
    _, user, _ = struct.unpack(
        "3i", place.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return int(user)


def serve() -> None:
    """Import what the workers need, and fork them until the raylet has ended, or nobody needs it. Returns in a worker, once it has done its work."""
    server, raylet, words = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3:]
    sys.path[0] = str(Path(words[0]).parent)  # as python has it for a script
    for name in os.environ[PRELOAD].split(","):
        with suppress(Exception):  # the worker imports it again, and tells what is wrong with it
            importlib.import_module(name)
    server.listen(128)
    sys.argv = _forked(server, raylet, words)
    runpy.run_path(sys.argv[0], run_name="__main__")


def _forked(server: socket.socket, raylet: int, words: list[str]) -> list[str]:
    """In each child the words of its worker: of the one that this process was started for, then of those that ask."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a worker
    if not (pid := _fork(server)):
        return words
    workers, needed_at = {pid}, time.monotonic()
    while os.getppid() == raylet:
        workers = {pid for pid in workers if Path(f"/proc/{pid}").exists()}
        if workers:
            needed_at = time.monotonic()
        elif time.monotonic() - needed_at > IDLE_S:
            break
        if not select.select([server], [], [], _RAYLET_S)[0]:
            continue
        asked, _ = server.accept()
        with asked, suppress(OSError):  # whoever asked was killed meanwhile
            asked.settimeout(_ASK_S)
            if _user(asked) != os.getuid():
                continue
            found = _asked(server, asked)
            if isinstance(found, list):
                return found
            workers |= {found} if found else set()
    os._exit(0)


def _asked(server: socket.socket, asked: socket.socket) -> list[str] | int | None:
    """Fork the worker that is asked for. In the child its words, here its process id; None where nobody waits for it any more."""
    first, files, _, _ = socket.recv_fds(asked, 1 << 16, 3)
    try:
        (size,) = struct.unpack("!Q", first[:8])
        given = first[8:]
        while len(given) < size and (more := asked.recv(1 << 16)):
            given += more
        words, environment, folder = json.loads(given)
        if _has_left(asked):
            return None
        if pid := _fork(server):
            asked.send(b"1")
            return pid
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        return list(words)
    finally:
        for file in files:
            os.close(file)


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


if __name__ == "__main__":
    start_worker(sys.argv[1:])
