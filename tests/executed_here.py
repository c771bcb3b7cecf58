"""A run's code executed in a thread of the tests' own process, by the same protocol: what a test has planted there is seen by it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

import pytest

from lockstep.calls.executor import serve
from lockstep.proof import execution
from lockstep.proof.execution import ProcessSettings


class Thread:
    """Serves requests until nobody asks any more. It is confined by nothing."""

    def __init__(self, place: ProcessSettings) -> None:
        asked, to_ask = os.pipe()
        to_answer, answers = os.pipe()
        self.asked: BinaryIO = os.fdopen(to_ask, "wb")
        self.answers: BinaryIO = os.fdopen(to_answer, "rb", 0)
        self._thread = threading.Thread(target=self._serve, args=(asked, answers))
        self._thread.start()

    def _serve(self, asked: int, answers: int) -> None:
        with os.fdopen(asked, "rb") as requests:
            pipe = os.fdopen(answers, "wb")
            try:
                serve(requests, pipe)
            finally:
                with suppress(OSError):  # nobody reads any more
                    pipe.close()

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else 0

    def end(self, *, at_once: bool) -> None:
        with suppress(OSError):
            self.asked.close()
        self.answers.close()
        self._thread.join()


@contextmanager
def executed_here() -> Iterator[None]:
    """Have the code of runs executed in this process."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(execution, "START", Thread)
        yield
