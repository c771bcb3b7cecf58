"""The guardian of a run or a sweep: a small process beside the one that drives it, which has its end recorded if that one cannot.

A driver may be killed, crash, or be ended by Ray, which exits where its cluster dies; a process that trains alone may hang.
None of them can then record how the run ended. The guardian hears what it needs for that while the run goes on, through a pipe
that ends with the driver. It imports next to nothing until it has to record, ignores the signals that end the command, and
takes a run that hangs by the same rule as on Ray (`driver.hang_limit`).

Where a process of Ray's that the driver depends on ends, the guardian says so, whatever becomes of the driver: nothing in the driver
is certain to run once more.

What the process that trains alone does is counted by the bytes of a second pipe. Time counts for its silence only while it
may run: not while it is stopped, or a debugger holds it.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from lockstep.driver import problems
from lockstep.driver.hang_limit import Patience
from lockstep.driver.stacks import await_stacks, stacks_in
from lockstep.errors import SilentError
from lockstep.exit_codes import STOP_SIGNALS
from lockstep.interpreters import library_environment, library_words, search_path
from lockstep.process import pid_namespace, started
from lockstep.running_time import wait_for

LOOK_S = 0.2
"""How often the guardian looks whether its driver lives, and makes progress."""

RECORD_S = 50.0
"""How long a driver waits for its guardian to record an end. A store that is away is waited for; the journal has the end sooner."""

LOST_S = 8.0
"""How long a driver that can run may take to tell the end of a run whose cluster is gone, before it is ended: it waits in Ray for ever."""

ASK_S = 2.0
"""How long a process of a cluster that others have started may take to accept a connection."""

QUIET_S = 15.0
"""How long the end of a run whose cluster is gone is recorded before a word is said."""

OBEY_S = 5.0
"""How long a process that hangs may take to say that it ends itself. It cannot where C code holds Python's lock."""

_GONE = (
    "the driver of the run (process {pid} on this host) ended without a word: it was killed, or it crashed"
)
_DEBUGGERS = ("/pdb.py", "/bdb.py", "pydevd", "debugpy", "/ipdb/", "/pudb/", "IPython/core/debugger")


class Guardian:
    """The driver's side, for the length of a block. At its end the guardian leaves, unless the run's end is not `recorded`."""

    def __init__(
        self,
        spec: Mapping[str, Any],
        folder: Path,
        *,
        watched: tuple[float, float] | None = None,
        sweep: Mapping[str, Any] | None = None,
        recorded_by: str = "lockstep.record.runs.abandoned_run",
        notify: str | Sequence[str] | None = None,
        webhook: str | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """`folder` is that of the runs. `watched`: the run is this process's, and may be silent so many seconds, or until its first step.

        A run that is not watched so has another watchdog. With `sweep`, its document, it is a sweep, and `spec` that of its trials. `recorded_by` is the
        module whose `main` records the end, in a process of its own. `notify` is the command of a notification, run where the driver cannot run it, and `webhook` its address.
        `say` shows a person a line.
        """
        self.kind = "run" if sweep is None else "sweep"
        self.run_id: str | None = None
        """As far as it was told."""
        self._facts = {
            "spec": dict(spec),
            "sweep": None if sweep is None else dict(sweep),
            "recorded_by": recorded_by,
            "notify": notify,
            "webhook": webhook,
            "folder": str(folder),
            "path": search_path(),
            "watched": watched,
            "new": watched is not None,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._writing = threading.Lock()
        self._signs = -1
        self._signs_noted = 0
        self._answers: list[Mapping[str, Any]] = []
        self._answered = threading.Condition()
        self._recorders: list[str] = []
        self.warnings: list[str] = []
        """What its driver has to know of it: that it has ended before its time."""
        self._say, self._released = say, False
        self.on_hung: Callable[[SilentError, str], None] | None = None
        """Called in a thread with the error and the stacks, where the guardian finds that this process hangs."""

    def __enter__(self) -> Self:
        read, self._signs = os.pipe()
        os.set_blocking(self._signs, False)  # a guardian that is stopped must not stop the run
        try:
            self._process = subprocess.Popen(
                library_words(__name__, str(read), str(os.getpid())),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[read],
                env=library_environment(),
                start_new_session=True,  # Ctrl-C in this terminal is not for it
            )
        finally:
            os.close(read)
        threading.Thread(target=self._hear, name="lockstep-guardian", daemon=True).start()
        self.tell(**self._facts)
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        assert self._process is not None and self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        os.close(self._signs)
        self._signs = -1
        self._process.wait()

    def tell(self, **facts: Any) -> None:
        """Have the guardian know this, for the case that it has to record the run's end."""
        assert self._process is not None and self._process.stdin is not None
        self.run_id = facts.get("run_id") or self.run_id
        with self._writing, suppress(OSError, ValueError):  # it is gone: the run goes on without it
            self._process.stdin.write(json.dumps(facts, default=str).encode() + b"\n")
            self._process.stdin.flush()

    def recorded_by(self, pid: int | None) -> None:
        """Note a process of this machine that records the run."""
        process = "" if pid is None else f"{pid_namespace()} {pid} {started(pid)}"
        if pid is not None and process not in self._recorders:
            self._recorders.append(process)
            self.tell(recorders=self._recorders)

    def alive(self, signs: int) -> None:
        """Note how many signs of life the run has given so far."""
        new, self._signs_noted = signs - self._signs_noted, max(signs, self._signs_noted)
        if new > 0:
            with suppress(OSError):  # the pipe is full: it is alive enough
                os.write(self._signs, b"." * new)

    def release(self, *, notifies: bool = False) -> None:
        """The run's end is recorded, or there is nothing to record: the guardian has no more to do, but for a notification that this process does not live to send."""
        self._released = True
        self.tell(over=True, notifies=notifies)

    def record(self, message: str, details: str, status: str = "FAILED") -> tuple[str | None, str]:
        """Have the guardian record the run's end. Returns the run's id, if it is known, and why it may not be recorded."""
        self.tell(end={"message": message, "details": details, "status": status})
        with self._answered:
            recorded = partial(
                self._answered.wait_for, lambda: any("run_id" in answer for answer in self._answers)
            )
            wait_for(recorded, RECORD_S)
            for answer in self._answers:
                if "run_id" in answer:
                    return answer["run_id"], answer["problem"]
        return None, f"record: its end was not recorded within {RECORD_S:.0f} s"

    def _hear(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        with self._process.stdout as pipe:
            for line in pipe:
                answer = json.loads(line)
                if "hung" in answer and self.on_hung is not None:
                    self.tell(obeys=True)
                    self.on_hung(_hung(**answer["hung"]), answer["stacks"])
                with self._answered:
                    self._answers.append(answer)
                    self._answered.notify_all()
        if not self._answers and not self._released:
            self._warn()
        with self._answered:
            self._answers.append({"run_id": None, "problem": "record: its guardian is gone"})
            self._answered.notify_all()

    def _warn(self) -> None:
        assert self._process is not None
        code = self._process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        text = f"the process that guards this {self.kind} {how}: if this one is killed or hangs, nobody records that it ended"
        self.warnings.append(text)
        if self._say is not None:
            self._say(f"warning: {text}")


def _hung(begun: bool, bound_s: float) -> SilentError:
    """The error of a process that made no progress for `bound_s`, after its first step or before it."""
    problem = problems.NO_PROGRESS if begun else problems.NO_FIRST_STEP
    return problem(seconds=f"{bound_s:.0f}")


# --- the process ------------------------------------------------------------------------------------------------


def main() -> None:
    """Guard the run of the parent until that says that all is recorded, or is gone."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    out = os.dup(1)
    os.dup2(2, 1)
    _Guard(int(sys.argv[1]), int(sys.argv[2]), out).run()


class _Guard:
    """The guardian's side: `signs` is the pipe with the signs of life, `driver` the process that it guards."""

    def __init__(self, signs: int, driver: int, out: int) -> None:
        self._signs, self._driver, self._out = signs, driver, out
        self._facts: dict[str, Any] = {}
        self._unread = b""
        self._alive = 0
        self._clock = 0.0
        """Seconds for which the driver could run."""
        self._said = ""
        """What was said of the end, before it is recorded."""
        self._lives = True
        self._parts: dict[int, int] = {}
        """Descriptors that tell of the ends of the driver and of Ray's processes on which it depends, by process id."""
        self._ended: set[int] = set()
        """Those that have ended, before the driver did."""
        self._pipes = selectors.DefaultSelector()
        for pipe in (0, signs):
            os.set_blocking(pipe, False)
            self._pipes.register(pipe, selectors.EVENT_READ)
        self._watch_process(driver)

    def run(self) -> None:
        """Until there is nothing more to guard."""
        patience = None
        while not self._facts.get("over"):
            lives = self._look()
            facts = self._facts
            if facts.get("over") or not facts.get("spec"):
                if not lives:
                    return
                continue
            if "end" in facts:
                self._record_for_driver(facts["end"])
                return
            if (lost := self._lost_part()) is not None:
                self._end_lost(*lost)
                return
            if not lives:
                self._record_alone()
                return
            if facts.get("watched") is None:
                patience = None
                continue
            patience = patience or Patience(*facts["watched"])
            if patience.is_over(self._alive, self._clock):
                stacks = self._stacks()
                if any(name in stacks for name in _DEBUGGERS):
                    self._clock, patience = 0.0, None  # a person looks at it
                else:
                    self._end_hung(patience, stacks)
                    return

    def _look(self) -> bool:
        """Take in what the pipes have. Whether the driver lives: a process that it forked may hold the pipes open."""
        began = time.monotonic()
        for key, _ in self._pipes.select(LOOK_S):  # in the order in which the kernel had them
            if key.data is not None:  # what follows from it is judged once the pipes are read
                self._forget(key.data)
                if key.data == self._driver:
                    self._lives = False
                elif self._lives:  # what the driver has started ends with it, which says nothing
                    self._ended.add(key.data)
                continue
            data = os.read(key.fd, 1 << 16)
            if not data:
                self._pipes.unregister(key.fd)
                self._lives = False
            elif key.fd == self._signs:
                self._alive += len(data)
            else:
                *lines, self._unread = (self._unread + data).split(b"\n")
                for line in lines:
                    self._facts.update(json.loads(line))
        self._watch_parts()
        if not self._is_held():
            self._clock += min(
                time.monotonic() - began, 1.0
            )  # if this process itself was stopped, so was the run
        self._lives = self._lives and os.getppid() == self._driver
        return self._lives

    def _watch_parts(self) -> None:
        """Have the kernel tell of the end of those processes that the driver names now, and of no others."""
        named = {pid for pid, *_ in self._facts.get("parts", [])}
        for pid in self._parts.keys() - named - {self._driver}:
            self._forget(pid)
        if self._lives:
            gone = (pid for pid in named - self._parts.keys() if not self._watch_process(pid))
            self._ended |= {*gone}

    def _watch_process(self, pid: int) -> bool:
        """Have the kernel tell of the end of a process. False if it has ended."""
        try:
            self._parts[pid] = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        self._pipes.register(self._parts[pid], selectors.EVENT_READ, pid)
        return True

    def _forget(self, pid: int) -> None:
        file = self._parts.pop(pid)
        self._pipes.unregister(file)
        os.close(file)

    def _lost_part(self) -> tuple[str, str] | None:
        """Which process of Ray's has ended, as a message and its details, if one has."""
        parts = self._facts.get("parts", [])
        return next(((why, details) for pid, why, details in parts if pid in self._ended), None)

    def _is_held(self) -> bool:
        """Whether the driver is stopped, or traced by a debugger."""
        with suppress(OSError):
            status = Path(f"/proc/{self._driver}/status").read_text()
            return "\nState:\tT" in status or "\nState:\tt" in status or "\nTracerPid:\t0\n" not in status
        return False

    def _stacks(self) -> str:
        file = self._facts.get("stacks")
        if file is None:
            return ""
        with suppress(ProcessLookupError):
            os.kill(self._driver, signal.SIGUSR1)
        await_stacks([Path(file)])
        return stacks_in(Path(file))

    def _end_hung(self, patience: Patience, stacks: str) -> None:
        """End a process that makes no progress: by itself where it can, so that it tells its caller why."""
        hung: dict[str, Any] = {"begun": patience.begun, "bound_s": patience.bound_s}
        self._answer({"hung": hung, "stacks": stacks})
        end = {"message": str(_hung(**hung)), "details": stacks, "status": "FAILED"}
        if self._waits_for("obeys", OBEY_S) and self._waits_for("over", RECORD_S):
            if self._facts["notifies"]:
                self._notify(end, {"run_id": None})
            return
        with suppress(ProcessLookupError):
            os.kill(self._driver, signal.SIGKILL)
        while os.getppid() == self._driver:
            time.sleep(0.01)
        self._facts["documents"] = {**self._facts.get("documents", {}), "stacks.txt": stacks}
        self._show(end, self._recorded(end, new=True))

    def _waits_for(self, fact: str, limit_s: float) -> bool:
        until = time.monotonic() + limit_s
        while not self._facts.get(fact) and time.monotonic() < until:
            if not self._look():
                break
        return bool(self._facts.get(fact))

    def _end_lost(self, why: str, details: str) -> None:
        """A process of Ray's has ended. The driver tells how, and ends itself, unless Ray ends it first or it waits in Ray."""
        until = self._clock + LOST_S
        while self._lives and self._clock < until and not {"end", "over"} & self._facts.keys():
            self._look()
        if self._facts.get("over"):
            return
        if (
            "end" not in self._facts and self._lives
        ):  # Ray holds Python's lock where it waits for a GCS while it connects
            self._say(why)
            with suppress(ProcessLookupError):
                os.kill(self._driver, signal.SIGKILL)
        self._record_for_driver(
            self._facts.get("end", {"message": why, "details": details, "status": "FAILED"})
        )

    def _record_for_driver(self, end: Mapping[str, str]) -> None:
        """The driver has told why the run ends, and waits. If Ray ends it meanwhile, its last line is told here."""
        answer = self._recorded(end, new=self._facts.get("new", False), say=end["message"])
        self._answer(answer)
        if not self._waits_for("over", RECORD_S):
            self._show(end, answer)
        elif self._facts["notifies"]:
            self._notify(end, answer)

    def _record_alone(self) -> None:
        number = self._facts.get("signal")
        message = _GONE.format(pid=self._driver) if number is None else "ended at once by a signal"
        if number is None and "memory" in self._facts:
            message += f"; its memory had come near a limit, where {self._facts['memory']}"
        end = {"message": message, "details": "", "status": "FAILED" if number is None else "KILLED"}
        for host, port, why in self._facts.get("asked", []):
            if not _answers(host, port):
                end |= {"message": why, "status": "FAILED"}
                self._record_for_driver(end)
                return
        answer = self._recorded(end, new=False)
        if answer["run_id"] is not None:
            self._show(end, answer)

    def _recorded(self, end: Mapping[str, str], *, new: bool, say: str = "") -> dict[str, Any]:
        """Have a process of its own record the end, which needs all that a recorder imports.

        `say` is said meanwhile, as soon as the driver cannot say it any more, or it takes long.
        """
        unknown: dict[str, Any] = {"run_id": None, "recorders": [], "documents": {}}
        facts = {**unknown, "driver": self._driver, **self._facts, **end, "new": new}
        began = time.monotonic()
        with subprocess.Popen(
            library_words(facts["recorded_by"]),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        ) as recorder:  # fmt: skip
            assert recorder.stdin is not None and recorder.stdout is not None
            with suppress(BrokenPipeError), recorder.stdin as pipe:  # its exit code tells
                pipe.write(json.dumps(facts).encode())
            while recorder.poll() is None:
                lives = self._look()
                if say and not self._said and not (lives and time.monotonic() - began < QUIET_S):
                    self._say(say)
            answered = recorder.stdout.read()
        try:
            answer: dict[str, Any] = json.loads(answered)
        except ValueError:
            return {
                "run_id": None,
                "problem": f"record: its end was not recorded (exit code {recorder.returncode})",
            }
        return answer

    def _answer(self, answer: Mapping[str, Any]) -> None:
        with suppress(OSError):  # the driver is gone
            os.write(self._out, json.dumps(answer).encode() + b"\n")

    def _say(self, why: str) -> None:
        """Say at once why the run ends: the command may be over before that is recorded."""
        self._said = why
        facts = self._facts
        recorded = facts.get("new") or facts.get("run_id") or facts.get("recorders")
        _write(f"{why}; the end is being recorded" if recorded else why)

    def _show(self, end: Mapping[str, str], answer: Mapping[str, Any]) -> None:
        message = end["message"]
        if message != self._said or answer["run_id"] is not None or answer["problem"]:  # something to add
            kind = "run" if self._facts.get("sweep") is None else "sweep"
            folder = Path(self._facts["folder"])
            _write(ending_line(message, answer["run_id"], folder, answer["problem"], kind))
        self._notify(end, answer)

    def _notify(self, end: Mapping[str, str], answer: Mapping[str, Any]) -> None:
        """Run the user's command for an end after which the driver does not live to run it."""
        from lockstep.driver.notification import Notifications
        from lockstep.record.ledger.journal import newest_step

        folder, run_id = Path(self._facts["folder"]), answer["run_id"] or self._facts.get("run_id")
        newest = newest_step(folder / run_id) if run_id else None
        notifications = Notifications(
            self._facts["notify"], folder, _write, run_id, webhook=self._facts["webhook"]
        )
        notifications.lost(end["message"], end["status"], newest.step if newest else 0)


def _write(line: str) -> None:
    with suppress(OSError):  # there is nobody to tell
        os.write(2, f"lockstep: {line}\n".encode())


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), ASK_S).close()
    except OSError:
        return False
    return True


def ending_line(message: str, run_id: str | None, folder: Path, problem: str, kind: str = "run") -> str:
    """The line that says why a run or a sweep ended, which it is, and what of that is not recorded."""
    where = "" if run_id is None else f"; {kind} {run_id}, whose error.txt is in {str(folder / run_id)!r}"
    return f"{message}{where}" + (f" ({problem})" if problem else "")
