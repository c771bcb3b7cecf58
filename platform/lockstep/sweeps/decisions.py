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
    """The file, and what it has. `began` are the fields of each trial by its number, `ends` how trials ended.

    A disk that is full for a while is waited for with `wait`, which is told to `say`.
    """

    def __init__(
        self,
        folder: Path,
        wait: Callable[[float], None] = time.sleep,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._path, self._wait, self._say = folder / NAME, wait, say
        self._named = False  # for good, in its folder
        self.events: list[dict[str, Any]] = self._read()
        self.began: dict[int, dict[str, Any]] = {
            e["trial"]: e["fields"] for e in self.events if "fields" in e
        }
        self.ends: dict[int, dict[str, Any]] = {e["trial"]: e for e in self.events if "status" in e}
        self._stops: dict[tuple[int, int], str] = {
            (e["trial"], e["stop"]): e["reason"] for e in self.events if "stop" in e
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

    def stop(self, trial: int, step: int, reason: str) -> None:
        """A trial is to end after this step."""
        if (trial, step) not in self._stops:
            self._stops[trial, step] = reason
            self._add({"trial": trial, "stop": step, "reason": reason})

    def stopped(self, trial: int, step: int) -> str | None:
        """Why it was to end there, or None where it was not."""
        return self._stops.get((trial, step))

    def end(self, trial: int, status: str, step: int, metric: float | None, reason: str) -> None:
        """A trial has ended, with the metric of its evaluation after `step`."""
        if trial not in self.ends:
            event = {"trial": trial, "status": status, "step": step, "metric": metric, "reason": reason}
            self.ends[trial] = event
            self._add(event)

    def _add(self, event: Mapping[str, Any]) -> None:
        line = (json.dumps(event) + "\n").encode()
        patiently(lambda: self._append(line), self._wait, self._say)

    def _append(self, line: bytes) -> None:
        """All of the line, or nothing: the next one is written behind it."""
        descriptor = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o666)
        try:
            whole = os.fstat(descriptor).st_size
            try:
                left = line
                while left:
                    left = left[os.write(descriptor, left) :]
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
