"""Starts a spare process, and hears what it answers. The trainer never waits for it."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import IO, Protocol

from lockstep.training.integrity.resume_check.request import Answer, Request
from lockstep.training.spare_process import SpareInterpreter


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
            self._process = SpareInterpreter(
                "lockstep.training.integrity.resume_check.process",
                (asked.fileno(), self._answer.fileno()),
                request.context,
            )
            opened.pop_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self) -> bool:
        return self._process.ended()

    def answer(self) -> Answer | str:
        if self._process.succeeded():
            self._answer.seek(0)
            with suppress(
                EOFError, pickle.UnpicklingError
            ):  # written by Lockstep's own code, as is what a fork answers
                answer: Answer = pickle.load(self._answer)
                return answer
        return self._process.how_it_ended()

    def end(self) -> None:
        self._process.end()
        self._answer.close()


Start = Callable[[Request], Spare]


def start_spare(request: Request) -> Spare:
    """A spare process at work."""
    return SpareProcess(request)
