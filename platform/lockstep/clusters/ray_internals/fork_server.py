"""Worker processes that are forked from one that has imported what they need: seconds of work, done once a job.

Ray starts a worker by the `py_executable` of its runtime environment, here this file in an interpreter without site-packages. On a
cluster that Lockstep starts, the nodes run this file in place of Ray's own set-up of a worker too, which imports Ray, for 0.4 s,
in order to read that runtime environment.

* The first whose environment names modules in PRELOAD becomes the server: it imports them, and forks. Ray's worker runs in
  the child.
* Others hand their arguments, environment, working directory and open files over to the server, and end. They wait for it if
  they have PRELOAD, and start as ever if they have not and there is none.
* Where a process has imported ahead for the cluster (`server_ahead`), it forks the server, which then has less to import.

A server forks for workers of its own environment alone, its job's, for what it has imported was read under that environment. It ends
with the raylet or the driver that started it. Lost, it is replaced by the next worker that asks for it.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import importlib.util
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

PRELOAD = "LOCKSTEP_PRELOAD"
"""The modules that a worker's process is to have imported, with commas between them."""

CREDENTIAL_VARIABLE = "LOCKSTEP_CLUSTER_SECRET"
"""Hexadecimal: by it the processes of a cluster that Lockstep has started recognise each other. From it follows the name of the one that imports ahead."""

OUTLIVES_SIGTERM = "LOCKSTEP_OUTLIVES_SIGTERM"
"""With 1 a worker takes no notice of SIGTERM: its cluster is a command's own, which is sent the signal too, and saves before it ends."""

_READ_LATER = ("LOCKSTEP_", "RAY_WARN_")
"""How the variables begin that no module reads as it is imported. Not RAY_JOB_ID: Ray keeps what it read first, for good."""

_RAYLET_S, _SHOW_S, _ASK_S = 0.5, 2.0, 10.0
"""How often the server checks that its raylet is alive, and how long a client may take to show the secret, and to send its request."""

IDLE_S = 60.0
"""How long a server stays that no worker is left of, for the next attempt."""

_FORK_S, _IMPORT_S = 8.0, 45.0
"""How long a worker waits to be forked, and for a server that still imports: then it starts by itself. Ray gives up a process that has not come after 60 s."""

_SET_UP = _CONTEXT, _LANGUAGE = "--serialized-runtime-env-context=", "--language="
"""What Ray adds to the words of a worker for its set-up."""

_PLAIN, _RARE = {"env_vars", "command_prefix", "py_executable"}, {"override_worker_entrypoint", "java_jars"}
"""What there is in a runtime environment as Ray hands it to the set-up."""


def py_executable() -> str:
    """What starts this machine's workers, for a runtime environment; nothing where the system cannot hand processes over."""
    if not sys.platform.startswith("linux"):
        return ""  # abstract sockets are Linux's
    return f"{shlex.quote(sys.executable)} -I -S {shlex.quote(__file__)}"


def preloading(modules: Sequence[str]) -> dict[str, str]:
    """The variable that has a worker's process import `modules`, and before them what leaves Ray's generator of ids unused."""
    return {PRELOAD: ",".join(("lockstep.clusters.ray_internals.forked_ids", *modules))}


def set_up(words: list[str]) -> NoReturn:
    """Give this process the runtime environment that is among the words, and start the worker in it.

    What environment variables, a working directory and a command do not make of it (a container, conda) is left to Ray.
    """
    options = {
        option: word.removeprefix(option) for word in words for option in _SET_UP if word.startswith(option)
    }
    context = json.loads(options.get(_CONTEXT, "null"))
    if options.get(_LANGUAGE) != "PYTHON" or context is None or not _is_plain(context):
        from lockstep.clusters.ray_internals import rays_set_up  # not by each worker that starts

        os.execv(sys.executable, [sys.executable, rays_set_up(), *words])
    os.environ.update(context["env_vars"])
    if context["command_prefix"]:
        os.chdir(*shlex.split(context["command_prefix"][1]))
    worker_words = [word for word in words if not word.startswith(_SET_UP)]
    if context["py_executable"] == py_executable():
        start_worker(worker_words)
    command = shlex.split(context["py_executable"])
    os.execvp(command[0], [*command, *worker_words])


def _is_plain(context: Mapping[str, Any]) -> bool:
    """Whether `set_up` knows what to do with all that Ray says of a runtime environment."""
    prefix = context.get("command_prefix")
    return (
        context.keys() == _PLAIN | _RARE
        and not any(context[name] for name in _RARE)
        and not any("$" in value for value in context["env_vars"].values())  # Ray puts in other variables
        and (not prefix or (len(prefix) == 3 and (prefix[0], prefix[2]) == ("cd", "&&")))
    )


def start_worker(words: list[str]) -> NoReturn:
    """Become the worker `words`, or have the server fork it."""
    raylet = os.getppid()
    name = _address(os.environ, raylet)
    until = time.monotonic() + _IMPORT_S
    while time.monotonic() < until:
        forked = _forked_by(name, words)
        if forked:
            os._exit(0)
        if forked is None or not os.environ.get(PRELOAD):
            _start_alone(words)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, suppress(OSError):  # there is one
            listener.bind(name)
            if _taken_over(listener, words, until):
                os._exit(0)
            listener.set_inheritable(True)
            serving = "from lockstep.clusters.ray_internals.fork_server import serve; serve()"
            os.execv(
                sys.executable, [sys.executable, "-c", serving, str(listener.fileno()), str(raylet), *words]
            )
        time.sleep(0.02)
    _start_alone(words)


def _start_alone(words: list[str]) -> NoReturn:
    """Become the worker in an interpreter of its own."""
    if OUTLIVES_SIGTERM not in os.environ:
        os.execv(sys.executable, [sys.executable, *words])
    starting = "import sys; from lockstep.clusters.ray_internals.fork_server import run_script; sys.path[0] = sys.argv[1]; run_script(sys.argv[2:])"
    os.execv(sys.executable, [sys.executable, "-c", starting, str(Path(words[0]).parent), *words])


def _forked_by(name: str, words: list[str]) -> bool | None:
    """Whether the server of this name has forked the worker: False where there is none, None where it is of no use."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        try:
            server.connect(name)
            server.settimeout(_FORK_S)
            if not _recognised(server):  # somebody else has taken the name
                return None
            _hand_over(server, words)
            return server.recv(1) == b"1"
        except TimeoutError:  # it hangs
            return None
        except OSError:  # there is none, or it still imports, or has just ended
            return False


def _hand_over(connection: socket.socket, words: list[str], *more: int) -> None:
    """Send what a worker is made of, and more open files."""
    payload = json.dumps([words, dict(os.environ), str(Path.cwd())]).encode()
    socket.send_fds(connection, [struct.pack("!Q", len(payload)) + payload], [0, 1, 2, *more])


def _taken_over(listener: socket.socket, words: list[str], until: float) -> bool:
    """Whether the process that the driver has import ahead becomes the server, with this listener, and forks this worker first."""
    secret = os.environ.get(CREDENTIAL_VARIABLE)
    if not secret:
        return False
    ahead = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with ahead, suppress(OSError):  # there is none any more, or it hangs
        ahead.settimeout(max(0.001, until - time.monotonic()))
        ahead.connect(address_ahead(secret))
        if not _recognised(ahead):
            return False
        _hand_over(ahead, words, listener.fileno())
        return ahead.recv(1) == b"1"
    return False


def address_ahead(secret: str) -> str:
    """The name of the process that imports ahead for the cluster of this secret, which no file system has."""
    return f"\0lockstep-ahead-{hashlib.sha256(secret.encode()).hexdigest()}"


def _address(environment: Mapping[str, str], raylet: int) -> str:
    """The server's name, which no file system has: the raylet and the environment tell one from another."""
    identity = json.dumps([os.getuid(), raylet, read_at_import(environment)], sort_keys=True)
    return f"\0lockstep-workers-{hashlib.sha256(identity.encode()).hexdigest()}"


def read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a module may read as it is imported."""
    return {name: value for name, value in environment.items() if not name.startswith(_READ_LATER)}


def _recognised(connection: socket.socket, *, client: bool = False) -> bool:
    """Whether the other end, a server or a client, is this user's process, and if this one's cluster has a secret knows it too.

    In a container with this machine's network another user may have the same number. OSError where the other end leaves, or takes too long.
    """
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    secret = os.environ.get(CREDENTIAL_VARIABLE)
    if user != os.getuid() or not secret:
        return bool(user == os.getuid())
    module = credentials()
    shown = module.is_client if client else module.is_server
    return bool(shown(connection, module.Secret(bytes.fromhex(secret))))


@cache
def credentials() -> Any:
    """The module `lockstep.communication.credentials`, by its file: the interpreter of a worker that starts finds no packages."""
    path = Path(__file__).parents[2] / "communication" / "credentials.py"
    spec = importlib.util.spec_from_file_location("lockstep_credentials", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class HandedOver(NamedTuple):
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
    import_modules(os.environ[PRELOAD].split(","))
    if not may_fork():
        server.close()
        _start_alone(words)
    server.listen(128)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a worker
    pid = fork(server)
    run_script(serve_forks(server, raylet, pid) if pid else words)


def import_modules(modules: Sequence[str]) -> None:
    gc.disable()  # a fifth of the time, for next to nothing
    for name in modules:
        with suppress(Exception):  # the worker imports it again, and tells what is wrong with it
            importlib.import_module(name)
    sys.stdout.flush()  # what a module printed is no worker's, which would have a copy of it
    gc.freeze()  # a collection in a worker would write to all of these pages, and so copy them
    gc.enable()


def may_fork() -> bool:
    """Whether forked workers would differ as workers that start by themselves do."""
    if "ray" not in sys.modules:
        return True
    from lockstep.clusters.ray_internals.forked_ids import would_repeat

    return not would_repeat()


def run_script(words: list[str]) -> None:
    sys.argv = words
    if OUTLIVES_SIGTERM in os.environ:
        from ray._private import utils

        utils.set_sigterm_handler = _outlive_sigterm
    runpy.run_path(words[0], run_name="__main__")


def _outlive_sigterm(_rays_handler: object) -> None:
    """In place of Ray's handler, which would end this worker, one that does nothing. What the worker starts hears the signal.

    Python forgets in a child what came just after the fork, and this signal ends it: it waits until the child has no handler any more.
    """
    number = {signal.SIGTERM}

    def hear() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, number)

    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, number)
    os.register_at_fork(
        before=partial(signal.pthread_sigmask, signal.SIG_BLOCK, number),
        after_in_parent=partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, number),
        after_in_child=hear,
    )


def serve_forks(server: socket.socket, parent: int, first: int) -> list[str]:
    """In each child the words of its worker, of those that ask. The process `first` is the first worker."""
    workers, needed_at = {first}, time.monotonic()
    while os.getppid() == parent:
        workers = {pid for pid in workers if Path(f"/proc/{pid}").exists()}
        if workers:
            needed_at = time.monotonic()
        elif time.monotonic() - needed_at > IDLE_S:
            break
        if (connection := next_asking(server)) is None:
            continue
        with connection, suppress(OSError):  # the client was killed meanwhile
            forked = _asked(server, connection)
            if isinstance(forked, list):
                return forked
            workers |= {forked} if forked else set()
    os._exit(0)


def next_asking(server: socket.socket) -> socket.socket | None:
    """The next connection of this cluster's, or None if there is none soon."""
    if not select.select([server], [], [], _RAYLET_S)[0]:
        return None
    connection, _ = server.accept()
    connection.settimeout(_SHOW_S)
    with suppress(OSError):
        if _recognised(connection, client=True):
            connection.settimeout(_ASK_S)
            return connection
    connection.close()
    return None


def received(asked: socket.socket) -> HandedOver:
    """The request that a client sends: words, environment, folder and open files."""
    first, files, _, _ = socket.recv_fds(asked, 1 << 16, 4)
    try:
        (size,) = struct.unpack("!Q", first[:8])
        payload = first[8:]
        while len(payload) < size and (more := asked.recv(1 << 16)):
            payload += more
        words, environment, folder = json.loads(payload)
    except BaseException:
        for file in files:
            os.close(file)
        raise
    return HandedOver(words, environment, folder, files)


def _asked(server: socket.socket, asked: socket.socket) -> list[str] | int | None:
    """Fork the worker that is asked for. In the child its words, here its process id; None where nobody waits for it any more."""
    worker = received(asked)
    try:
        if has_left(asked):
            return None
        if not (pid := fork(server)):
            worker.become()
            return worker.words
        asked.send(b"1")
        return pid
    finally:
        worker.close()


def has_left(asked: socket.socket) -> bool:
    """Whether the client has stopped waiting: it has started by itself."""
    return bool(select.select([asked], [], [], 0.0)[0]) and not asked.recv(1)


def fork(server: socket.socket) -> int:
    """The child's process id, and 0 in the child. Ray ends a worker's process group, which is therefore its own."""
    if pid := os.fork():
        return pid
    server.close()
    os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return 0


if __name__ == "__main__":
    (set_up if any(word.startswith(_SET_UP) for word in sys.argv) else start_worker)(sys.argv[1:])
