"""A new interpreter beside a trainer, which works for it and ends with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from lockstep.training.worker_environment import sent_environment

# Not `-m`: what the trainer imports from may be on no path that a new interpreter knows, such as the folder of a run's recorded source.
_PROGRAM = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "importlib.import_module(sys.argv[2]).main(*map(int, sys.argv[3:]))"
)

_MOST_SAID = 2000
"""So much of what a process has printed last may be in a warning."""


@dataclass(frozen=True, slots=True)
class ProcessContext:
    """What a new process of the run is started with: as it was before the first step, for an outage leaves nothing of what a job has changed since."""

    environment: Mapping[str, str]
    path: Sequence[str]
    """Where modules are looked up."""
    folder: str
    """The working directory."""

    @classmethod
    def here(cls) -> ProcessContext:
        return cls(dict(os.environ), list(sys.path), str(Path.cwd()))


class SpareInterpreter:
    """A process that runs `main` of a module. It is no fork: it must have none of the trainer's memory, and CUDA survives no fork."""

    def __init__(self, module: str, descriptors: Sequence[int], context: ProcessContext) -> None:
        """Start it; `main` gets the `descriptors`, which it inherits, and this process's id. OSError where the system refuses."""
        with tempfile.TemporaryFile() as printed:  # not a pipe: nobody reads it before the end
            # python -O, -X and their like are settings of the run.
            flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
            words = [sys.executable, "-P", *flags, "-c", _PROGRAM, json.dumps(context.path), module]
            self._process = subprocess.Popen(
                [*words, *map(str, descriptors), str(os.getpid())],
                cwd=context.folder,
                env={**context.environment, **sent_environment()},
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # no terminal's signals, and it can be ended with all that it started
            )
            self._printed: IO[bytes] = os.fdopen(os.dup(printed.fileno()), "rb")

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self) -> bool:
        """Whether it has ended. It does not wait."""
        return self._process.poll() is not None

    def succeeded(self) -> bool:
        """Wait for its end; whether it ended without an error."""
        return self._process.wait() == 0

    def how_it_ended(self) -> str:
        """Wait for its end: how it came, in a few words, with what was printed last."""
        code = self._process.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self._printed.seek(0, os.SEEK_END)
        self._printed.seek(max(0, self._printed.tell() - _MOST_SAID))
        lines = self._printed.read().decode(errors="replace").strip().splitlines()
        return f"{how}: {lines[-1]}" if lines else how

    def end(self) -> None:
        """End it, and all that it has started."""
        if not self.ended():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._printed.close()


def make_way(parent: int) -> None:
    """In such a process: give up its priority, be the first that ends where memory is short, and end with `parent`."""
    from lockstep.process import end_with_parent

    end_with_parent(parent)
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    # A session of its own may be a group of its own for the scheduler, in which the priority of its one process means nothing.
    for name, value in (("autogroup", "19"), ("oom_score_adj", "1000")):
        with suppress(OSError):  # not on every system
            Path("/proc/self", name).write_text(value)
