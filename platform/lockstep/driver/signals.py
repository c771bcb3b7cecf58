"""SIGTERM, SIGINT and SIGHUP while a run goes on: the first asks it to stop after the next step, a second one ends it at once.

At the end of a job's time Slurm sends SIGTERM to a program under srun twice, within hundredths of a second: that is one request. So is a SIGHUP that
follows: a terminal that is closed, its shell and the login's manager send several, and a SIGTERM among them.
Python runs a handler only between two of its own instructions. So that a second signal also ends a command whose main
thread waits in C++, a thread of its own counts them by the byte that the interpreter's C handler writes.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn, TypeVar

from lockstep.errors import LockstepError
from lockstep.exit_codes import SIGNALLED, STOP_SIGNALS, code_of_signal

ErrorT = TypeVar("ErrorT", bound=LockstepError)

GRACE_S = 8.0
"""How long a command may take to end by itself after a second signal."""

SAME_S = 3.0
"""A SIGTERM so soon after the first one, or after a SIGHUP, is the same request, sent again."""


class FirstSignal:
    """The first signal that came, and which later ones ask for more than it did."""

    def __init__(self) -> None:
        self.number: int | None = None
        """Its number; None where none has come."""
        self._at = 0.0

    def take(self, number: int) -> bool:
        """Note a signal. Whether it is another request than the first."""
        if self.number is None:
            self.number, self._at = number, time.monotonic()
            return False
        ends_session = number == signal.SIGTERM and self.number != signal.SIGINT
        repeated = ends_session and time.monotonic() - self._at < SAME_S
        return number != signal.SIGHUP and not repeated


_end_command: Callable[[LockstepError], NoReturn] | None = None


def commands_end_by(end: Callable[[LockstepError], NoReturn]) -> None:
    """From now on `end_command` ends this process by `end`. For commands."""
    global _end_command
    _end_command = end


def ends_commands() -> bool:
    """Whether `end_command` ends this process, which then runs nothing more."""
    return _end_command is not None


def end_command(error: LockstepError) -> None:
    """End the command with this error from a thread that is not the main one, which cannot go on. Returns where this process is no command."""
    if _end_command is not None:
        _end_command(error)


def end_on_second_signal() -> None:
    """From now on this process ends at the latest GRACE_S after a second request to stop. For commands: call it once, in the main thread."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a child's signals are its own
    threading.Thread(target=_end_after_two, args=(read,), name="lockstep-signals", daemon=True).start()


def _end_after_two(read: int) -> None:
    first, another = FirstSignal(), False
    while not another:
        (number,) = os.read(read, 1)
        another = number in STOP_SIGNALS and first.take(number)
    time.sleep(GRACE_S)
    os.write(2, b"lockstep: ended at once by a second signal\n")
    os._exit(code_of_signal(number))


def was_signalled(error: BaseException) -> bool:
    """Whether a signal ended the run: at once, or where it would have gone on after this error (`StopSignal.ended`)."""
    return isinstance(error, KeyboardInterrupt) or (
        isinstance(error, LockstepError) and error.exit_code in SIGNALLED
    )


class Interrupted(KeyboardInterrupt):
    """A signal ends the command at once."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class StopSignal:
    """A context in which these signals are noted, but for a SIGHUP that the caller ignores, as `nohup` does."""

    def __init__(self) -> None:
        self._first = FirstSignal()
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def number(self) -> int | None:
        """The signal that came, or None."""
        return self._first.number

    @property
    def asked(self) -> bool:
        """Whether a signal came."""
        return self.number is not None

    def ask(self) -> None:
        """Stop as a first SIGTERM would have it."""
        if not self.asked:
            self._first.take(signal.SIGTERM)

    def ended(self, error: ErrorT) -> ErrorT:
        """The error of a run that would go on but for the signal that came: it gets the signal's exit code."""
        assert self.number is not None
        error.exit_code = code_of_signal(self.number)
        return error

    def check(self) -> None:
        """Raise Interrupted where a signal came: for a wait before which there is nothing to save."""
        if self.number is not None:
            raise Interrupted(self.number)

    def wait(self, seconds: float) -> bool:
        """Sleep, but no longer than until a signal comes. Returns whether one has come."""
        until = time.monotonic() + seconds
        while not self.asked and (remaining := until - time.monotonic()) > 0:
            time.sleep(min(remaining, 0.2))
        return self.asked

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # python allows handlers nowhere else
            handlers = {kind: signal.getsignal(kind) for kind in STOP_SIGNALS}
            if handlers[signal.SIGHUP] is signal.SIG_IGN:
                del handlers[signal.SIGHUP]
            self._previous = handlers
            self.listen()
        return self

    def listen(self) -> None:
        """Take the signals over, again where a library took them meanwhile."""
        for kind in self._previous:
            signal.signal(kind, self._note)

    def __exit__(self, *_: object) -> None:
        for kind, handler in self._previous.items():
            signal.signal(kind, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self._first.take(number):
            raise Interrupted(number)
