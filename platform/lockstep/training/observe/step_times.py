"""Where a worker's time goes within its steps. Each part ends with a mark: a reading of the clock or, on a CUDA device, an event.

Nothing waits for the device. On CUDA the times are the device's own, of the newest steps that are finished when they are asked for.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from itertools import pairwise
from typing import Literal

import torch

Part = Literal["forward", "backward", "reduction", "optimizer"]
"""`forward` includes fetching the micro-batch; `reduction` is what is added up and waited for between the other parts."""

NEWEST = 16
"""How many steps' events are kept on a CUDA device."""


class StepTimes:
    """The marks of one worker. `mark` names the part that the time since the previous mark belongs to."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._at = 0.0
        self._seconds: defaultdict[Part, float] = defaultdict(float)
        self._steps = 0
        self._events: deque[list[tuple[Part | None, torch.cuda.Event]]] = deque(maxlen=NEWEST)

    def begin(self) -> None:
        """Begin a step."""
        self._steps += 1
        if self._cuda:
            self._events.append([(None, _recorded())])
        else:
            self._at = time.perf_counter()

    def mark(self, part: Part) -> None:
        """End a part."""
        if self._cuda:
            self._events[-1].append((part, _recorded()))
            return
        now = time.perf_counter()
        self._seconds[part] += now - self._at
        self._at = now

    def take(self) -> dict[Part, float]:
        """Mean seconds per step of each part since the last call; empty where none are known."""
        seconds, steps = self._seconds, self._steps
        self._seconds, self._steps = defaultdict(float), 0
        if self._cuda:
            done = [marks for marks in self._events if marks[-1][1].query()]  # type: ignore[no-untyped-call]
            self._events.clear()
            steps = len(done)
            for marks in done:
                for (_, before), (part, after) in pairwise(marks):
                    assert part is not None
                    seconds[part] += before.elapsed_time(after) / 1000
        return {part: value / steps for part, value in seconds.items()} if steps else {}


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
