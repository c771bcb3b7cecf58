"""How fast each rank is by itself, and which of them keep the others waiting.

A rank times its own fetching and forward passes, which wait for no other rank. Its time travels in the step's exchange,
and no computed value depends on it.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Sequence
from types import TracebackType

import torch

from lockstep.communication.group import Group

WINDOW = 50
"""Steps that are judged together."""

TIMES = 1.5
"""A rank that takes so many times the others' time keeps them waiting."""

SHARE = 0.8
"""The share of steps in which it must be the slowest: what happens now and then is noise."""


class Stopwatch:
    """Times what a rank does alone with one micro-batch, as a context manager. On CUDA it is the device's own time, known a step later."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._began = self._seconds = 0.0
        self._count = 0
        self._running: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._done: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> None:
        if self._cuda:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            first.record()
            self._running.append((first, last))
        self._began = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._seconds += time.perf_counter() - self._began
        self._count += 1
        if self._cuda:
            self._running[-1][1].record()

    def take(self) -> float:
        """Seconds per micro-batch in this step; on CUDA in the step before, whose time is known without waiting. 0 for none."""
        seconds, count = self._seconds, self._count
        self._seconds, self._count = 0.0, 0
        if self._cuda:
            done, self._done, self._running = self._done, self._running, []
            done = [pair for pair in done if pair[1].query()]  # type: ignore[no-untyped-call]
            seconds, count = sum(first.elapsed_time(last) for first, last in done) / 1000, len(done)
        return seconds / count if count else 0.0


class Pace:
    """Judges the ranks of a group by windows of steps."""

    def __init__(self, group: Group) -> None:
        self._hosts = group.gather(socket.gethostname())
        self._steps: list[Sequence[float]] = []

    def add(self, step: int, seconds: Sequence[float]) -> list[str]:
        """Add each rank's seconds for a micro-batch of `step`, by rank. At the end of a window, returns a line for each straggler."""
        if len(seconds) < 2 or not all(seconds):  # alone, or a ragged step that leaves a rank without work
            return []
        self._steps.append(seconds)
        if len(self._steps) < WINDOW:
            return []
        window, self._steps = self._steps, []
        return [
            f"rank {rank} of {len(seconds)} on {self._hosts[rank]} takes {ratio:.1f} times as long as the others for a micro-batch, in steps {step - WINDOW + 1} to {step}"
            for rank, ratio in stragglers(window)
        ]


def stragglers(steps: Sequence[Sequence[float]]) -> list[tuple[int, float]]:
    """The ranks that are slower than the others step after step, each with its ratio to them. `steps`: seconds by rank, of each step."""
    medians = [statistics.median(column) for column in zip(*steps, strict=True)]
    slow = []
    for rank, median in enumerate(medians):
        others = statistics.median(medians[:rank] + medians[rank + 1 :])
        slowest = sum(seconds[rank] == max(seconds) for seconds in steps)
        if median > TIMES * others and slowest >= SHARE * len(steps):
            slow.append((rank, median / others))
    return slow
