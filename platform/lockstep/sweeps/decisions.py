"""What a sweep has decided so far, in the order in which it did: a line each, in a file beside the sweep's record.

A sweep that is taken up again has its search and its scheduler live through this once more before anything new.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.attempts.patience import patiently
from lockstep.files import flush, write_text

NAME = "decisions.jsonl"


class Decisions:
    """The file, and what it has. `began` are the fields of each trial by its number, `ends` how trials ended, `heard` the last step
    that a scheduler has heard of each.

    A disk that is full for a while is waited for with `wait`, which is told to `say`.
    """

    def __init__(
        self,
        folder: Path,
        wait: Callable[[float], object] = time.sleep,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._path, self._wait, self._say = folder / NAME, wait, say
        self._named = False  # for good, in its folder
        self.events: list[dict[str, Any]] = self._read()
        self.began: dict[int, dict[str, Any]] = {
            e["trial"]: e["fields"] for e in self.events if "fields" in e
        }
        self.ends: dict[int, dict[str, Any]] = {e["trial"]: e for e in self.events if "status" in e}
        self.heard: dict[int, int] = {e["trial"]: e["heard"] for e in self.events if "heard" in e}
        self._stops: dict[tuple[int, int], str] = {
            (e["trial"], e["stop"]): e["reason"] for e in self.events if "stop" in e
        }
        self._explored: dict[tuple[int, int], dict[str, Any]] = {
            (e["trial"], e["explored"]): e["values"] for e in self.events if "explored" in e
        }

    def _read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        whole = self._path.read_text(encoding="utf-8").rpartition("\n")[
            0
        ]  # a killed process may leave half a line
        write_text(self._path, whole + "\n" if whole else "")
        return [json.loads(line) for line in whole.splitlines()]

    def begin(self, trial: int, fields: Mapping[str, Any]) -> None:
        """A trial was made."""
        if trial not in self.began:
            self.began[trial] = dict(fields)
            self._add({"trial": trial, "fields": dict(fields)})

    def hear(self, trial: int, step: int, metric: float, stop: str | None = None) -> None:
        """A trial has evaluated after `step`, and is to end there for this reason, or goes on.

        The line of one that goes on is safe with the next one that is not: if it is lost before, nothing that it led to is recorded.
        """
        event: dict[str, Any] = {"trial": trial, "heard": step, "metric": metric}
        if stop is not None:
            event |= {"stop": step, "reason": stop}
            self._stops[trial, step] = stop
        self.heard[trial] = step
        self._add(event, safe=stop is not None)

    def stopped(self, trial: int, step: int) -> str | None:
        """Why it was to end there, or None where it was not."""
        return self._stops.get((trial, step))

    def explore(self, trial: int, step: int, values: Mapping[str, Any]) -> None:
        """A member of a population has taken over another one's state of this step, and goes on with these fields."""
        self._explored[trial, step] = dict(values)
        self._add({"trial": trial, "explored": step, "values": dict(values)})

    def explored(self, trial: int, step: int) -> dict[str, Any] | None:
        """The fields with which it went on from there, or None where it has not."""
        return self._explored.get((trial, step))

    def end(self, trial: int, status: str, step: int, metric: float | None, reason: str) -> None:
        """A trial has ended, with the metric of its evaluation after `step`."""
        if trial not in self.ends:
            event = {"trial": trial, "status": status, "step": step, "metric": metric, "reason": reason}
            self.ends[trial] = event
            self._add(event)

    def _add(self, event: dict[str, Any], *, safe: bool = True) -> None:
        line = (json.dumps(event) + "\n").encode()
        patiently(lambda: self._append(line, safe=safe), self._wait, self._say)
        self.events.append(event)

    def _append(self, line: bytes, *, safe: bool) -> None:
        """All of the line, or nothing: the next one is written behind it."""
        descriptor = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o666)
        try:
            whole = os.fstat(descriptor).st_size
            try:
                left = line
                while left:
                    left = left[os.write(descriptor, left) :]
                if safe:
                    flush(self._path)
            except OSError:
                os.ftruncate(descriptor, whole)
                raise
        finally:
            os.close(descriptor)
        if not self._named:
            flush(self._path.parent)
            self._named = True


class WithoutState:
    """What Tune need not keep with the state of an experiment: a sweep is taken up from its decisions."""

    def __getstate__(self) -> dict[str, Any]:
        return {}
