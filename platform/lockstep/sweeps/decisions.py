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

from lockstep.attempts.storage_retries import patiently
from lockstep.files import flush, replacing
from lockstep.parsing import json_value
from lockstep.sweeps import problems

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
        """The decisions that are there. What a killed process or a loss of power has left of lines that were not safe is cut off."""
        if not self._path.exists():
            return []
        content = self._path.read_bytes()
        lines = content.split(b"\n")[:-1]  # a killed process may leave half a line
        events = [_event(line) for line in lines]
        count = next((i for i, event in enumerate(events) if event is None), len(events))
        torn = b"\0" in b"".join(lines[count : count + 1])  # a loss of power leaves zeros
        if count < len(events) and not (torn and all(map(_is_unsafe, events[count:]))):
            raise problems.DECISION_DAMAGED(line=count + 1, file=self._path)
        intact = b"".join(line + b"\n" for line in lines[:count])
        if intact != content:
            patiently(lambda: self._write(intact), self._wait, self._say)
        return [event for event in events[:count] if event is not None]

    def _write(self, content: bytes) -> None:
        with replacing(self._path) as file:
            file.write(content)

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
            size = os.fstat(descriptor).st_size
            try:
                remaining = line
                while remaining:
                    remaining = remaining[os.write(descriptor, remaining) :]
                if safe:
                    flush(self._path)
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)
        if not self._named:
            flush(self._path.parent)
            self._named = True


def _event(line: bytes) -> dict[str, Any] | None:
    """The decision of a line; None for a damaged one."""
    try:
        event = json_value(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and type(event.get("trial")) is int else None


def _is_unsafe(event: dict[str, Any] | None) -> bool:
    """Whether a line may be lost: a result that nothing was decided by, or what is left of one."""
    return event is None or ("heard" in event and "stop" not in event)


class WithoutState:
    """What Tune need not keep with the state of an experiment: a sweep is taken up from its decisions."""

    def __getstate__(self) -> dict[str, Any]:
        return {}
