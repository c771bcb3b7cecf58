"""SIGINT, SIGTERM and SIGHUP where nothing else has taken them over, as a run does (`StopSignal`): one line, the JSON object, the signal's exit code.

An exception in the middle of an import leaves half a module behind, or is swallowed there. So a command that imports, or
has not begun, ends in the handler; any other is interrupted, and clears away what it has begun.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from lockstep.driver.signals import Interrupted
from lockstep.errors import LockstepError
from lockstep.exit_codes import STOP_SIGNALS, code_of_signal


class _Reader:
    """Who hears how the command has ended."""

    def __init__(self) -> None:
        self.json_to: int | None = None
        self.answered = False


_reader = _Reader()


def take_signals(*, as_json: bool) -> None:
    """From now on these signals are this command's, except one that its caller has it ignore. For the main thread."""
    _reader.json_to = 1 if as_json else None
    kinds = [kind for kind in STOP_SIGNALS if signal.getsignal(kind) is not signal.SIG_IGN]
    handlers = {kind: signal.signal(kind, _interrupt) for kind in kinds}

    def forget() -> None:
        for kind, handler in handlers.items():
            if signal.getsignal(kind) is _interrupt:
                signal.signal(kind, handler)

    os.register_at_fork(after_in_child=forget)  # a child's signals are its own
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@contextmanager
def answering(json_to: int | None) -> Iterator[None]:
    """In this context an interruption is answered, with an object to `json_to` where there is one; after it none is written."""
    _reader.json_to, _reader.answered = json_to, True
    try:
        yield
    finally:
        _reader.json_to, _reader.answered = None, False


def end(number: int) -> NoReturn:
    """End the process; whatever still runs here is not waited for."""
    _end("KILLED", "ended at once by a signal", code_of_signal(number))


def fail(error: LockstepError) -> NoReturn:
    """End the process with this error, from any thread: the main one waits for what will not come."""
    _end("FAILED", str(error), error.exit_code, error.code)


def failure(status: str, message: str, exit_code: int, code: str = "") -> dict[str, Any]:
    """What a command that has failed answers as an object; `code` names the problem, where it is one."""
    return {
        "status": status, "error": message, "exit_code": exit_code, **({"code": code} if code else {})
    }  # fmt: skip


def _end(status: str, message: str, exit_code: int, code: str = "") -> NoReturn:
    with suppress(OSError):  # there is nobody to tell
        os.write(2, f"lockstep: {message}\n".encode())
        if _reader.json_to is not None:
            answer = json.dumps(failure(status, message, exit_code, code))
            os.write(_reader.json_to, f"{answer}\n".encode())
    os._exit(exit_code)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if not _reader.answered or _imports(frame):
        end(number)
    raise Interrupted(number)


def _imports(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib."):
            return True
        frame = frame.f_back
    return False
