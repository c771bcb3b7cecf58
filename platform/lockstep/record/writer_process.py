"""The writer in a process of its own, for a run whose only other process trains: it takes no time from any step.

A thread gathers the events and sends them through a pipe; the writer's answers come back through another pipe. The
process ends with its parent: what it has not written by then is in the journal, or lost like the step that it reports.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from lockstep.exit_codes import STOP_SIGNALS
from lockstep.interpreters import library_environment, library_words, search_path
from lockstep.process import collect_seldom
from lockstep.record import problems
from lockstep.record.events.union import Event
from lockstep.record.mirror.run_store import RunStore
from lockstep.record.mirror.stores import warm_up
from lockstep.record.opening import Fetch, no_fetch
from lockstep.record.recorder_state import RecorderState
from lockstep.record.writer import Aliases, Writer
from lockstep.running_time import running_s, wait_for
from lockstep.spec.fields import Spec

GATHER_S = 0.2
"""Seconds for which events are gathered: each call through the pipe costs the training thread part of a millisecond."""
LOOK_S = 0.1
"""Seconds between the process's checks for news to report, and whether its parent lives."""
BEAT_S = 1.0
"""Seconds between its signs of life."""
SILENT_S = 60.0
"""How long it may be silent before it is killed: a stopped process would keep the run waiting at its end."""
CLOSING_S = 3600.0
"""How long it may take to write what is left at the end, as long as it shows signs of life: figures, and uploads of any size."""
STARTING_S = 300.0
"""How long it may take to start, and to import what its store needs."""


class Report(NamedTuple):
    """What the process reports: how the record stands, whether opening it is over, and whether the process ends now."""

    state: RecorderState
    opened: bool
    closed: bool


class Close(NamedTuple):
    """The last message to the process: how long to wait for a silent store."""

    timeout_s: float


class WriterProcess:
    """A Writer in another process. It takes the arguments of Writer, which must survive pickling."""

    def __init__(
        self,
        spec: Spec,
        make_store: Callable[[Spec], RunStore],
        run_id: str | None,
        patience_s: float,
        on_aliases: Aliases,
        source: Path | None = None,
        replay: bool = False,
        fetch: Fetch = no_fetch,
    ) -> None:
        self.spec = spec
        self.opened = threading.Event()
        self._arguments = (spec, make_store, run_id, patience_s, on_aliases, source, replay, fetch)
        self.state = RecorderState()
        """How the record stands, as the process last reported it."""
        self._closed_well = False
        """Whether the process ended as it was asked to."""
        self._closed = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._inbox: queue.SimpleQueue[Sequence[Event] | Close] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._started = threading.Event()
        self._heard = 0
        """How many reports the process has sent."""
        self._hung = ""
        """Why the process was killed; empty if it was not."""

    @property
    def lost(self) -> bool:
        """Whether the process has ended, or was killed, before it was asked to."""
        return self._closed.is_set() and not self._closed_well

    def start(self) -> None:
        """Let the process open the store and create the run."""
        self._started.set()
        if self._process is None:
            self.warm_up()

    def warm_up(self) -> None:
        """Start the process, which imports what its store needs and waits for `start`."""
        self._process = _taken_up(self.spec.record.uri) or _process(self.spec.record.uri)
        for work in (self._send, self._hear, self._watch):
            threading.Thread(target=work, name="lockstep-record", daemon=True).start()

    def tell(self, events: Sequence[Event]) -> None:
        """Record events, after everything told before. Returns at once."""
        self._inbox.put(events)

    def close(self, timeout_s: float) -> None:
        """Write what is left and end the process, like `Writer.close`."""
        if self._process is None:
            return
        if not self._started.is_set():  # there is nothing to write
            self._closed_well = True
            self._process.kill()
            self._process.wait()
            self._closed.wait()
            self._started.set()
            return
        self._inbox.put(Close(timeout_s))
        self._wake.set()
        if not wait_for(self._closed.wait, CLOSING_S):
            self._hung = f"did not write what is left within {CLOSING_S:.0f} s"
            self._process.kill()
            self._closed.wait()
        self._process.wait()

    # --- threads ------------------------------------------------------------------------------------------

    def _send(self) -> None:
        assert self._process is not None and self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as pipe:  # the other thread notices its end
            # The job may have set some since the process was started.
            pickle.dump((library_environment(), search_path()), pipe)
            pickle.dump(self._arguments, pipe)
            pipe.flush()
            self._started.wait()
            if not self._closed.is_set():
                pickle.dump([], pipe)
                pipe.flush()
            while not self._closed.is_set():
                self._wake.wait(GATHER_S)
                events, close = self._gathered()
                if events:
                    pickle.dump(events, pipe)
                if close is not None:
                    pickle.dump(close, pipe)
                pipe.flush()
                if close is not None:
                    self._closed.wait()

    def _gathered(self) -> tuple[list[Event], Close | None]:
        """The events since the last call, and the `Close` if it has come."""
        events: list[Event] = []
        with suppress(queue.Empty):
            while True:
                message = self._inbox.get_nowait()
                if isinstance(message, Close):
                    return events, message
                events.extend(message)
        return events, None

    def _hear(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        with self._process.stdout as pipe, suppress(EOFError, pickle.UnpicklingError):
            while True:
                report: Report = pickle.load(pipe)
                self.state = report.state
                self._heard += 1
                if report.opened:
                    self.opened.set()
                self._closed_well |= report.closed
        if not self._closed_well:
            why = f"has ended (exit code {self._process.wait()})"
            why = self._hung or why
            run = self.state.run_id
            died = (
                problems.PROCESS_LOST_EARLY(got=why)
                if run is None
                else problems.PROCESS_LOST(got=why, run=run)
            )
            self.state = self.state._replace(failure=died)
        self.opened.set()
        self._closed.set()

    def _watch(self) -> None:
        """Kill a process that has become silent: what it had not written is lost, like the step that it reports."""
        assert self._process is not None
        last_heard, heard_at = 0, running_s()
        while not self._closed.wait(BEAT_S):
            if self._heard > last_heard:
                last_heard, heard_at = self._heard, running_s()
            limit_s = SILENT_S if last_heard else STARTING_S
            if running_s() - heard_at > limit_s:
                self._hung = f"did nothing for {limit_s:.0f} s"
                self._process.kill()
                return


class _Ahead(NamedTuple):
    """A process that was started before its writer is known, with these variables and for the store at this URI."""

    process: subprocess.Popen[bytes]
    variables: dict[str, str]
    uri: str | None


_ahead: list[_Ahead] = []


@contextmanager
def writer_ahead(uri: str | None) -> Iterator[None]:
    """The process of the next writer of the store at `uri` starts now, and imports what that needs beside what this process does until then.

    One that no writer has taken up ends with the block.
    """
    ahead = _Ahead(_process(uri), dict(os.environ), uri)
    _ahead.append(ahead)
    try:
        yield
    finally:
        if ahead in _ahead:
            _ahead.remove(ahead)
            _end(ahead.process)


def _taken_up(uri: str | None) -> subprocess.Popen[bytes] | None:
    """The process that was started ahead; None without one, or where it has imported MLflow with other variables of MLflow's than there are now."""
    if not _ahead:
        return None
    process, variables, started_for = _ahead.pop()
    if (
        started_for == uri
        and _mlflow_variables(variables) == _mlflow_variables(os.environ)
        and process.poll() is None
    ):
        return process
    _end(process)
    return None


def _mlflow_variables(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name.startswith("MLFLOW_")}


def _process(uri: str | None) -> subprocess.Popen[bytes]:
    # The process begins with what this thread blocks.
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        process = subprocess.Popen(
            library_words(__name__),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=library_environment(),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # the first message is short: nobody has to read it yet
        pickle.dump(uri, process.stdin)  # not among its arguments, which all can see: it may hold a password
        process.stdin.flush()
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()
    process.wait()


# --- the process ------------------------------------------------------------------------------------------


def main() -> None:
    """Write a record as the parent tells, until it closes it or ends. The run is created at the parent's first message."""
    collect_seldom()
    for (
        number
    ) in STOP_SIGNALS:  # a terminal or a job sends them to all its processes: the parent handles them
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    messages, reports = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not mix with the reports
    parent, taken_up = os.getppid(), threading.Event()
    threading.Thread(target=_end_with, args=(parent, taken_up), daemon=True).start()
    try:
        uri = pickle.load(messages)
        with suppress(Exception):  # any problem is reported when the store is opened
            warm_up(uri)
        variables, path = pickle.load(messages)
        os.environ.clear()
        os.environ.update(variables)
        sys.path[:] = (
            path  # the job's source is looked up as by the parent; what the process itself needs is imported
        )
        writer = Writer(*pickle.load(messages))
    except EOFError:
        os._exit(1)  # the parent has ended, or has no use for a writer
    taken_up.set()
    over = threading.Event()
    watch = threading.Thread(target=_watch, args=(writer, reports, parent, over), daemon=True)
    watch.start()
    started = False
    while True:
        try:
            message: list[Event] | Close = pickle.load(messages)
        except (EOFError, pickle.UnpicklingError):
            os._exit(1)  # the parent has ended without a message, and so has the run
        if isinstance(message, Close):
            writer.close(message.timeout_s)
            over.set()
            watch.join()
            _send(reports, Report(writer.state, opened=True, closed=True))
            return
        if not started:
            started = True
            writer.start()
        writer.tell(message)


def _end_with(parent: int, taken_up: threading.Event) -> None:
    """End with a parent that ends before it has told of a writer. The pipe alone does not show its end, as below."""
    while not taken_up.wait(LOOK_S):
        if os.getppid() != parent:
            os._exit(1)


def _watch(writer: Writer, reports: BinaryIO, parent: int, over: threading.Event) -> None:
    """Report news and signs of life, and end with the parent. The pipe alone does not show its end: a process that it forked may hold it open."""
    previous: Report | None = None
    sent_at = 0.0
    while not over.wait(LOOK_S):
        if os.getppid() != parent:
            os._exit(1)
        opened = writer.opened.is_set()  # read first: the state is then that of an opened record
        report = Report(writer.state, opened, closed=False)
        if report != previous or time.monotonic() - sent_at > BEAT_S:
            _send(reports, report)
            sent_at = time.monotonic()
        previous = report


def _send(reports: BinaryIO, report: Report) -> None:
    pickle.dump(report, reports)
    reports.flush()
