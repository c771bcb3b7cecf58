"""Where a worker's time goes within its steps: marks between the phases, a clock's reading each, or on a CUDA device an event.

Nothing is waited for. On a CUDA device the times are the device's own, of the newest steps whose work is done when they are asked for.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from itertools import pairwise
from typing import Literal

import torch

Phase = Literal["forward", "backward", "reduction", "optimizer"]
"""`forward` is with the fetching of the micro-batch before it, `reduction` what is added up and waited for between the others."""

NEWEST = 16
"""Steps whose events are kept on a CUDA device."""


class Phases:
    """The marks of one worker. `mark` says to which phase the time since the mark before it belongs."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._at = 0.0
        self._seconds: defaultdict[Phase, float] = defaultdict(float)
        self._steps = 0
        self._events: deque[list[tuple[Phase | None, torch.cuda.Event]]] = deque(maxlen=NEWEST)

    def begin(self) -> None:
        """A step begins."""
        self._steps += 1
        if self._cuda:
            self._events.append([(None, _recorded())])
        else:
            self._at = time.perf_counter()

    def mark(self, phase: Phase) -> None:
        """A phase ends."""
        if self._cuda:
            self._events[-1].append((phase, _recorded()))
            return
        now = time.perf_counter()
        self._seconds[phase] += now - self._at
        self._at = now

    def take(self) -> dict[Phase, float]:
        """Mean seconds a step of each phase since the last call; empty where none is known."""
        seconds, steps = self._seconds, self._steps
        self._seconds, self._steps = defaultdict(float), 0
        if self._cuda:
            done = [marks for marks in self._events if marks[-1][1].query()]  # type: ignore[no-untyped-call]
            self._events.clear()
            steps = len(done)
            for marks in done:
                for (_, before), (phase, after) in pairwise(marks):
                    assert phase is not None
                    seconds[phase] += before.elapsed_time(after) / 1000
        return {phase: value / steps for phase, value in seconds.items()} if steps else {}


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
