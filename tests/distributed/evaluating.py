"""Processes that evaluate beside training, for tests: forked from one that has the slow imports behind it; some come late, die, or cannot evaluate."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

from lockstep.training.evaluation import evaluator_process, serving
from lockstep.training.evaluation.evaluator_messages import Measured
from lockstep.training.evaluation.evaluator_process import Evaluator
from lockstep.training.evaluation.serving import serve
from lockstep.training.spare_process import ProcessContext
from lockstep.training.state import Pending
from tests.forked import Forked

LATE_S = 0.8
"""How long a late process takes more than it has to."""

Serve = Callable[[Connection, int], None]


class ForkedInterpreter:
    """A `SpareInterpreter` that evaluates, forked from a process that has never seen a job."""

    serve: Serve = staticmethod(serve)
    started: int = 0

    def __init__(self, module: str, descriptors: Sequence[int], context: ProcessContext) -> None:
        asked, weights = descriptors
        there = Connection(os.dup(asked))
        path = f"/proc/{os.getpid()}/fd/{weights}"
        self._process = Forked(_main, type(self).serve, there, path, env=context.environment)
        there.close()
        self.pid = self._process.pid
        type(self).started += 1

    def ended(self) -> bool:
        return self._process.poll() is not None

    def how_it_ended(self) -> str:
        return f"ended with {self._process.wait()}"

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def _main(serve: Serve, asked: Connection, weights: str) -> None:
    serve(asked, os.open(weights, os.O_RDONLY))


def late(asked: Connection, weights: int) -> None:
    """Takes its time for each evaluation."""
    evaluated = serving.evaluated

    def slowly(*asked: Any) -> Measured:
        time.sleep(LATE_S)
        return evaluated(*asked)

    with mock.patch.object(serving, "evaluated", slowly):
        serve(asked, weights)


def fails(asked: Connection, weights: int) -> None:
    """Builds the run, and has no memory for a micro-batch, as if."""
    with mock.patch.object(serving, "evaluated", side_effect=MemoryError("no room for a micro-batch")):
        serve(asked, weights)


def cannot(asked: Connection, weights: int) -> None:
    """Its machine has no memory for the model, as if."""
    with mock.patch.object(serving, "prepare", side_effect=MemoryError("no room for the model")):
        serve(asked, weights)


@contextmanager
def forked(serve: Serve = serve) -> Iterator[type[ForkedInterpreter]]:
    """Processes that evaluate are forked, and do so by `serve`."""
    kind = type("Kind", (ForkedInterpreter,), {"serve": staticmethod(serve), "started": 0})
    with mock.patch.object(evaluator_process, "SpareInterpreter", kind):
        yield kind


@contextmanager
def killed(count: int) -> Iterator[None]:
    """The first `count` processes are killed as soon as they have been given something to evaluate."""
    begin, left = Evaluator._hand_out, [count]

    def hand_out(self: Evaluator) -> None:
        begin(self)
        if left[0] and self.pid is not None:
            left[0] -= 1
            os.kill(self.pid, 9)

    with mock.patch.object(Evaluator, "_hand_out", hand_out):
        yield


@contextmanager
def decided_on_arrival() -> Iterator[None]:
    """The negative control: an evaluation decides after the first step at which its metrics have arrived."""
    from lockstep.training.evaluation.evaluation_schedule import Evaluations

    decides = Evaluations._decides

    def arrived(self: Evaluations, pending: Pending, position: Any, due: Sequence[str]) -> bool:
        assert self.evaluator is not None
        self.evaluator._looked_at = 0.0
        self.evaluator.look()
        return self.evaluator._measured is not None or decides(self, pending, position, due)

    with mock.patch.object(Evaluations, "_decides", arrived):
        yield
