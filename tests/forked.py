"""Processes for tests, forked from one that has imported what takes seconds (`preloaded`).

Each has a process id, a session, an environment and files of its own, and can be signalled and killed like any other. Where
the start of the interpreter is what a test is about, it starts one with `subprocess`.
"""

from __future__ import annotations

import atexit
import multiprocessing as mp
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.context import ForkServerContext
from multiprocessing.util import Finalize
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

ROOT = Path(__file__).parents[1]


def forking() -> ForkServerContext:
    """The way to start processes that have the slow imports behind them."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    return context


class Forked:
    """`function(*args)` in a process of its own, with as much of `subprocess.Popen` as the tests use."""

    def __init__(
        self, function: Callable[..., Any], *args: Any, cwd: Path = ROOT, env: Mapping[str, str] | None = None
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="forked-")
        self._close = Finalize(self, self._folder.cleanup)
        self._process = forking().Process(
            target=_run,
            args=(function, args, str(cwd), dict(os.environ if env is None else env), self._folder.name),
            daemon=False,  # a daemon may have no loader processes
        )
        self._process.start()
        self.pid: int = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        """As of Popen: negative where a signal ended it."""
        return self._process.exitcode

    poll = returncode.fget  # type: ignore[attr-defined]

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise TimeoutExpired(self._process.name, timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; what it wrote to standard output and to standard error."""
        self.wait(timeout)
        out, err = (Path(self._folder.name, name).read_text() for name in ("out", "err"))
        return out, err

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def lockstep(*words: str, cwd: Path = ROOT, **environment: str) -> Forked:
    """The `lockstep` command, with the hash seed that it would otherwise start over with."""
    paths = os.pathsep.join([str(ROOT / "platform"), str(ROOT)])
    env = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": paths, **environment}
    return Forked(_lockstep, words, cwd=cwd, env=env)


def _lockstep(words: tuple[str, ...]) -> None:
    from lockstep.cli.entry import run
    from tests.without_figures import without_figures

    sys.argv = ["lockstep", *words]
    with without_figures():
        run()


def script(text: str, cwd: Path = ROOT) -> Forked:
    """A program, as `python -c` would run it."""
    return Forked(_script, text, cwd=cwd)


def _script(text: str) -> None:
    exec(text, {"__name__": "__main__"})


def _run(
    function: Callable[..., Any], args: tuple[Any, ...], cwd: str, env: dict[str, str], folder: str
) -> None:
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.dont_write_bytecode = bool(env.get("PYTHONDONTWRITEBYTECODE"))  # as a new interpreter has it
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.path[:0] = [cwd, *env.get("PYTHONPATH", "").split(os.pathsep)]
    try:
        function(*args)
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out
