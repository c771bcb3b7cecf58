"""Processes of this machine that do one thing together: started at once, listened to, and ended however that ends."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, Protocol

from lockstep.exit_codes import STOP_SIGNALS

GRACE_S = 10.0
"""How long the others have to end by themselves where one has failed: one that waits for it in a collective hears of it at once."""

LOST = 4
"""The exit code of a process that has failed only because another one has."""


class Process(Protocol):
    """As much of `subprocess.Popen` as is used."""

    def communicate(self) -> tuple[str, str]: ...

    def wait(self) -> int: ...

    def kill(self) -> None: ...


class Ended(NamedTuple):
    """How a process ended: its exit code, and the last line that it wrote to standard error."""

    code: int
    said: str


def run_together(starts: Sequence[Callable[[], Process]]) -> list[Ended]:
    """Start processes and wait for all of them. Where one fails, those that do not end by themselves are killed."""
    with ThreadPoolExecutor(len(starts)) as readers, ExitStack() as running:
        # One after the other would block a process that writes more than a pipe holds.
        reading: dict[Future[Ended], Process] = {}
        for start in starts:
            process = start()
            running.callback(_end, process)
            reading[readers.submit(_ended, process)] = process
        for future in _still_running(set(reading)):
            reading[future].kill()
        return [future.result() for future in reading]


def first_failure(ended: Sequence[Ended]) -> Ended | None:
    """The first that failed by itself; one that lost another, or was killed, where there is no such. None where all went well."""
    failed = [process for process in ended if process.code]
    return min(failed, key=lambda process: process.code < 0 or process.code == LOST, default=None)


def _still_running(pending: set[Future[Ended]]) -> set[Future[Ended]]:
    """Wait for processes to end. Returns those that still run GRACE_S after the first failure."""
    until: float | None = None
    while pending:
        patience = None if until is None else max(0.0, until - time.monotonic())
        done, pending = wait(pending, patience, FIRST_COMPLETED)
        if not done:
            break
        if until is None and any(future.result().code for future in done):
            until = time.monotonic() + GRACE_S
    return pending


def _ended(process: Process) -> Ended:
    lines = process.communicate()[1].strip().splitlines()
    return Ended(process.wait(), lines[-1] if lines else "")


def _end(process: Process) -> None:
    process.kill()
    process.wait()


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, wherever it is: what it has put somewhere is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {kind: signal.getsignal(kind) for kind in STOP_SIGNALS}
    for kind, handler in handlers.items():
        if handler is not signal.SIG_IGN:
            signal.signal(kind, signal.default_int_handler)
    try:
        yield
    finally:
        for kind, handler in handlers.items():
            signal.signal(kind, handler)
