"""Rank 0's side of the process that evaluates beside training: starts it, hands it weights, and hears what they give.

Invariants:

- It evaluates one state of the weights at a time, whose copy is in one file in memory: what it takes does not grow with the run.
- The trainer waits for it in `answer` alone, and never for ever. Whatever becomes of it, the trainer can evaluate by itself: it has the weights.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any

import torch

from lockstep.data.table_pins import pins_of
from lockstep.record.events.union import Tell, Warned
from lockstep.running_time import running_s
from lockstep.training.evaluation.evaluator_messages import Asked, AtWork, Beginning, Failed, Measured
from lockstep.training.integrity.resume_check.spare_memory import lacking_memory
from lockstep.training.run import Run
from lockstep.training.spare_process import ProcessContext, SpareInterpreter
from lockstep.training.state import Pending

LOOK_S = 0.2
"""How often it is looked at while training goes on, and how long a wait for it lasts before others are looked at."""

MOST_LOST = 3
"""So many processes may be lost in a row; then none is started any more."""


class Evaluator:
    """One process after another that evaluates for a trainer."""

    def __init__(self, run: Run, tell: Tell) -> None:
        self._run, self._tell = run, tell
        # As the resume check's: before the first step.
        run.check_schedule.began_in = self._context = run.check_schedule.began_in or ProcessContext.here()
        self._process: SpareInterpreter | None = None
        self._trainer_end: Connection | None = None
        self._weights: IO[bytes] | None = None
        self._pending: Pending | None = None
        self._measured: Measured | None = None
        self._heard_at, self._looked_at = 0.0, 0.0
        self._built = False
        """Whether the process has built the run."""
        self._lost = 0
        """Processes lost since the last answer."""
        self._off = ""
        """Why no process is started any more; empty where one may be."""

    @property
    def pid(self) -> int | None:
        """The id of the process, where there is one."""
        return None if self._process is None else self._process.pid

    def begin(self, pending: Pending) -> None:
        """Have an evaluation computed; the one before it has been answered."""
        self._pending, self._measured = pending, None
        self._hand_out()

    def look(self) -> None:
        """While training goes on: hear what the process tells, and replace one that is lost."""
        if self._pending is not None and time.monotonic() >= self._looked_at + LOOK_S:
            self._looked_at = time.monotonic()
            if self._process is not None and not self._hear(0.0):
                self._hand_out()

    def answer(self, waiting: Callable[[], None]) -> Measured | None:
        """What the evaluation that was begun gives; None where the process has not come to it. Waits, and calls `waiting` meanwhile."""
        while self._measured is None and self._process is not None and self._hear(LOOK_S):
            waiting()
        measured, self._pending, self._measured = self._measured, None, None
        return measured

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.end()
        for end in (self._trainer_end, self._weights):
            if end is not None:
                end.close()
        self._process = self._trainer_end = self._weights = None

    # --- one process ------------------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        """Give the process what is pending; start one where there is none."""
        assert self._pending is not None
        if self._process is None and not self._off:
            self._start()
        if self._process is None:
            return
        assert self._trainer_end is not None
        assert self._weights is not None
        self._heard_at = running_s()
        weights: Mapping[str, Any] = self._pending.weights or {}
        os.ftruncate(self._weights.fileno(), 0)
        os.lseek(self._weights.fileno(), 0, os.SEEK_SET)
        with os.fdopen(os.dup(self._weights.fileno()), "wb") as file:
            torch.save((weights, self._pending.beside), file)
        try:
            self._trainer_end.send(Asked(self._pending.step, self._pending.labels))
        except OSError:  # it is gone, which the next look finds
            return

    def _start(self) -> None:
        run = self._run
        if lacking := lacking_memory(run.group.device):
            self._leave_out(lacking)
            return
        here, there = Pipe()
        self._trainer_end, self._weights, self._built = here, _file_in_memory(), False
        beginning = Beginning(
            run.spec.document(),
            str(run.group.device),
            run.facts["fields"],
            pins_of(run.facts["fields"]),
        )
        try:
            self._process = SpareInterpreter(
                "lockstep.training.evaluation.evaluator_main",
                (there.fileno(), self._weights.fileno()),
                self._context,
            )
            here.send(beginning)
        except OSError as error:
            self._leave_out(f"the system starts no process: {error}")
        finally:
            there.close()

    def _hear(self, seconds: float) -> bool:
        """Take what the process tells, for so long at most, up to an answer. False where it is lost, or cannot evaluate: then it is ended."""
        assert self._process is not None
        assert self._trainer_end is not None
        faults = self._run.spec.faults
        longest_s = faults.longest_silence_s if self._built else faults.longest_start_s
        try:
            while self._measured is None and self._trainer_end.poll(seconds):
                seconds = 0.0
                told = self._trainer_end.recv()
                self._heard_at = running_s()
                match told:
                    case AtWork():
                        self._built = True
                    case Measured():
                        self._measured, self._lost = told, 0
                    case Failed():
                        self._lose(f"could not evaluate: {told.message}", again=self._built)
                        return False
        except (EOFError, ConnectionResetError):
            self._lose(self._process.how_it_ended(), again=True)
            return False
        if self._measured is None and running_s() > self._heard_at + longest_s:
            self._lose(f"gave no sign of life for {longest_s:.0f} s", again=True)
            return False
        return True

    def _lose(self, how: str, *, again: bool) -> None:
        """Give the process up. One that was lost may be replaced; one that cannot build the run would fail `again`."""
        self.close()
        self._lost += 1
        pending = self._pending
        which = "" if pending is None else f" of step {pending.step}"
        self._tell(
            Warned(
                f"evaluate.beside: the process that evaluates {how}; the evaluation{which} is made again, with the same bits"
            )
        )
        if not again or self._lost >= MOST_LOST:
            self._leave_out("the process that evaluates was lost" if again else how)

    def _leave_out(self, why: str) -> None:
        """Start no more processes, and tell why, once."""
        self.close()
        self._off = why
        self._tell(
            Warned(
                f"evaluate.beside: the workers evaluate by themselves from here on, with the same bits: {why}"
            )
        )


def _file_in_memory() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("lockstep-weights"), "w+b", buffering=0)
    return tempfile.TemporaryFile()
