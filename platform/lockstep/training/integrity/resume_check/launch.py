"""Starts a spare process, and hears what it answers. The trainer never waits for it."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import IO, Protocol

from lockstep.training.integrity.resume_check.request import Answer, Request
from lockstep.training.worker_environment import sent_environment

# Not `-m`: what the trainer imports from may be on no path that a new interpreter knows, such as the folder of a run's recorded source.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from lockstep.training.integrity.resume_check.process import main; main(*map(int, sys.argv[2:]))"
)

_MOST_SAID = 2000
"""So much of what a process has printed last may be in a warning."""


class Spare(Protocol):
    """A process that answers one request."""

    def ended(self) -> bool:
        """Whether it has ended. It does not wait."""

    def answer(self) -> Answer | str:
        """After its end: its answer, or how it ended without one."""

    def end(self) -> None:
        """End it, and all that it has started."""


class SpareProcess:
    """A new interpreter that answers a request."""

    def __init__(self, request: Request) -> None:
        """Start it. OSError where the system refuses."""
        # Files without a name, not pipes: neither side ever waits for the other, and nothing is left of them however the two end.
        with tempfile.TemporaryFile() as asked, ExitStack() as opened:
            pickle.dump(request, asked)
            asked.seek(0)
            self._answer: IO[bytes] = opened.enter_context(tempfile.TemporaryFile())
            self._printed: IO[bytes] = opened.enter_context(tempfile.TemporaryFile())
            descriptors = (asked.fileno(), self._answer.fileno())
            # python -O, -X and their like are settings of the run.
            flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
            words = [sys.executable, *flags, "-c", _PROGRAM, json.dumps(request.context.path)]
            self._process = subprocess.Popen(
                [*words, *map(str, descriptors), str(os.getpid())],
                cwd=request.context.folder,
                env={**request.context.environment, **sent_environment()},
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # no terminal's signals, and it can be ended with all that it started
            )
            self._files = opened.pop_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self) -> bool:
        return self._process.poll() is not None

    def answer(self) -> Answer | str:
        code = self._process.wait()
        if code == 0:
            self._answer.seek(0)
            with suppress(
                EOFError, pickle.UnpicklingError
            ):  # written by Lockstep's own code, as is what a fork answers
                answer: Answer = pickle.load(self._answer)
                return answer
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return how + self._said_last()

    def end(self) -> None:
        if not self.ended():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._files.close()

    def _said_last(self) -> str:
        self._printed.seek(0, os.SEEK_END)
        self._printed.seek(max(0, self._printed.tell() - _MOST_SAID))
        lines = self._printed.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""


Start = Callable[[Request], Spare]


def start_spare(request: Request) -> Spare:
    """A spare process at work."""
    return SpareProcess(request)
