"""A call in a process of its own, for an interpreter in which no run can be exact: a notebook's, or one that was not started with PYTHONHASHSEED=0.

The process has the environment that `determinism: strict` needs, and ends with its parent: where that is gone, it stops as
after a signal, and can be resumed. Its progress and its outcome come through a pipe; what the job prints goes to
standard error. Of two signals the first asks the run to stop, and the second ends it, as in a terminal.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, BinaryIO, NoReturn, assert_never

from lockstep.calls import problems
from lockstep.driver.notebook import in_notebook
from lockstep.driver.options import RunOptions
from lockstep.driver.progress import ProgressLine, Silent
from lockstep.driver.result import Result
from lockstep.driver.signals import GRACE_S, Interrupted, StopSignal, commands_end_by, end_on_second_signal
from lockstep.errors import LockstepError, first_line
from lockstep.exit_codes import STOP_SIGNALS, code_of_signal
from lockstep.interpreters import job_words
from lockstep.job.job_folder import refuse_hidden_modules
from lockstep.process import under_torchrun
from lockstep.training.worker_environment import hashes_otherwise, sent_environment

LOOK_S = 0.1
"""How often a signal is looked for."""


@dataclass(frozen=True, slots=True)
class LineSaid:
    """The progress prints a line."""

    text: str


@dataclass(frozen=True, slots=True)
class LineShown:
    """The progress shows how far the run is."""

    line: ProgressLine


@dataclass(frozen=True, slots=True)
class TrialsShown:
    """The progress shows how a sweep stands."""

    headline: str
    trials: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Begun:
    """The run exists."""

    run_id: str


@dataclass(frozen=True, slots=True)
class Over:
    """The call has returned, or raised."""

    outcome: Result | LockstepError


Message = LineSaid | LineShown | TrialsShown | Begun | Over
"""What the process writes into its pipe."""


def unfit() -> bool:
    """Whether a run in this process would not be exact, or is in the way of one that is: it needs a process of its own."""
    return not under_torchrun() and (hashes_otherwise() or in_notebook())


def apart(
    call: Callable[..., Result], options: RunOptions, on_run_id: Callable[[str], None] | None = None
) -> Result:
    """What `call(options=…)` returns in a process of its own, or raises there. `call` survives pickling."""
    refuse_hidden_modules()
    messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
    process = subprocess.Popen(
        job_words(__name__),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_environment(),
        start_new_session=True,  # signals of a terminal or a notebook come through this process, once
    )
    assert process.stdin is not None and process.stdout is not None
    hearing = threading.Thread(
        target=_hear, args=(process.stdout, messages), name="lockstep-hear", daemon=True
    )
    hearing.start()
    with StopSignal() as stop:
        try:
            request = (call, replace(options, progress=Silent()), on_run_id is not None)
            with suppress(BrokenPipeError):  # that it has ended is heard below
                pickle.dump(request, process.stdin)
                process.stdin.flush()
            outcome = _outcome(process, messages, stop, options, on_run_id)
        except BaseException:
            _end(process)
            raise
        finally:
            with suppress(BrokenPipeError):
                process.stdin.close()
            process.wait()
            hearing.join()  # a pipe must not be closed while it is read
            process.stdout.close()
    if isinstance(outcome, LockstepError):
        raise outcome
    return outcome


def _outcome(
    process: subprocess.Popen[bytes],
    messages: queue.SimpleQueue[Message | None],
    stop: StopSignal,
    options: RunOptions,
    on_run_id: Callable[[str], None] | None,
) -> Result | LockstepError:
    """Pass on the messages of the process, and signals to it, until the call is over."""
    signal_sent = False
    while True:
        if stop.number is not None and not signal_sent:
            process.send_signal(stop.number)
            signal_sent = True
        try:
            message = messages.get(timeout=LOOK_S)
        except queue.Empty:
            continue
        match message:
            case LineSaid(text):
                options.progress.say(text)
            case LineShown(line):
                options.progress.show(line)
            case TrialsShown(headline, trials):
                options.progress.table(headline, trials)
            case Begun(run_id):
                if on_run_id is not None:
                    on_run_id(run_id)
            case Over(outcome):
                return outcome
            case None:  # the pipe has ended
                return _lost(process.wait())
            case _:
                assert_never(message)


def _lost(code: int) -> LockstepError:
    for number in STOP_SIGNALS:
        if code in (code_of_signal(number), -number):
            raise Interrupted(number)
    by = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return problems.PROCESS_LOST(got=by)


def _hear(pipe: BinaryIO, messages: queue.SimpleQueue[Message | None]) -> None:
    try:
        while True:
            messages.put(pickle.load(pipe))
    except (EOFError, pickle.UnpicklingError):
        messages.put(None)


def _end(process: subprocess.Popen[bytes]) -> None:
    """A second signal, or a fault here: the process ends as after its own second signal."""
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(GRACE_S + 2.0)
    except subprocess.TimeoutExpired:
        process.kill()


def _environment() -> dict[str, str]:
    """That of this process, with what has to stand in it before an exact run starts."""
    environment = {**os.environ, **sent_environment()}
    if environment.get("MPLBACKEND", "").startswith("module://"):
        del environment["MPLBACKEND"]  # the notebook's, which draws into a cell
    return environment


# --- the process ------------------------------------------------------------------------------------------------


class PipeProgress:
    """The progress of a run, which the parent shows."""

    def __init__(self, pipe: BinaryIO) -> None:
        self._pipe, self._lock = pipe, threading.Lock()

    def send(self, message: Message) -> None:
        with self._lock:
            pickle.dump(message, self._pipe)
            self._pipe.flush()

    def say(self, text: str) -> None:
        self.send(LineSaid(text))

    def show(self, line: ProgressLine) -> None:
        self.send(LineShown(line))

    def table(self, headline: str, trials: Sequence[Mapping[str, Any]]) -> None:
        self.send(TrialsShown(headline, trials))


def main() -> None:
    """Make the call that the parent sends, and send its outcome."""
    incoming, pipe = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the job prints is no message
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    progress, over = PipeProgress(pipe), threading.Event()
    end_on_second_signal()

    def fail(error: LockstepError) -> NoReturn:
        progress.send(Over(error))
        os._exit(error.exit_code)

    commands_end_by(fail)
    try:
        call, options, named = pickle.load(incoming)
        threading.Thread(
            target=_stop_with_parent, args=(incoming, over), name="lockstep-parent", daemon=True
        ).start()
        if named:
            call = partial(call, on_run_id=lambda run_id: progress.send(Begun(run_id)))
        result = call(options=replace(options, progress=progress))
        over.set()
        progress.send(Over(result))
    except LockstepError as error:
        progress.send(Over(error))
    except KeyboardInterrupt as error:  # whatever still runs here is not waited for
        os._exit(code_of_signal(error.number if isinstance(error, Interrupted) else signal.SIGINT))
    except Exception as error:  # noqa: BLE001 - the parent raises it
        traceback.print_exc()
        progress.send(Over(problems.RUN_BROKE(got=first_line(error))))


def _stop_with_parent(asked: BinaryIO, over: threading.Event) -> None:
    """The parent writes nothing more: the pipe ends when it does."""
    while os.read(asked.fileno(), 1024):  # no lock is held that the interpreter would want at its end
        pass
    if not over.is_set():
        os.kill(os.getpid(), signal.SIGTERM)
