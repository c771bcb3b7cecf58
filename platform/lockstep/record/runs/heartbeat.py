"""Whether the process that records a run is still alive, by its beat and, on the same machine, by the process itself.

A killed process leaves its run RUNNING. A later reader can find that out, and marks the run. No clocks are compared:
a reader notes which beat it found, and when on its own clock. If a later look finds the same beat, the process was
silent for that time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path

from lockstep.process import pid_namespace, started

BEAT_S = 20.0
"""Seconds between two beats of a recorder."""
SILENT_S = 150.0
"""How long a reader must have seen a recorder silent before its run is considered abandoned."""

_beats = count(1)
_SAID = ("lockstep.heartbeat", "lockstep.beat", "lockstep.process")
"""The tags that change with every beat."""


def process_tags(now: float) -> dict[str, str]:
    """Tags that identify this process to others: a beat, its time for people, the host, and on Linux the exact process."""
    return {
        "lockstep.heartbeat": f"{now:.0f}",
        "lockstep.beat": str(next(_beats)),
        "lockstep.host": socket.gethostname(),
        "lockstep.process": f"{pid_namespace()} {os.getpid()} {started(os.getpid())}",
    }


def same_beat(earlier: Mapping[str, str], later: Mapping[str, str]) -> bool:
    """Whether a run's recorder was silent between two looks at the run's tags."""
    return all(earlier.get(name) == later.get(name) for name in _SAID)


def vanished(run_id: str, tags: Mapping[str, str]) -> str:
    """Why a run that is RUNNING in its store is in fact gone; empty if it may well be alive."""
    if not re.fullmatch(r"[0-9]{1,12}(\.[0-9]*)?", tags.get("lockstep.heartbeat", "")):
        return ""  # none, or no time
    where, _, process = tags.get("lockstep.process", "").partition(" ")
    pid, _, began = process.partition(" ")
    host = tags.get("lockstep.host", "?")
    if where and where == pid_namespace() and re.fullmatch("[0-9]{1,10}", pid):
        if started(int(pid)) == began:
            return ""
        return f"the process that recorded it is gone (host {host}, pid {pid})"
    silent_s = _silent_s(run_id, [tags.get(name, "") for name in _SAID])
    if silent_s < SILENT_S:
        return ""
    return f"nothing was heard for {silent_s:.0f} s from the process that recorded it (host {host})"


def _silent_s(run_id: str, beat: list[str]) -> float:
    """Seconds for which this user on this machine has found the same beat; 0 if it has changed since the last look, or at the first look."""
    note = _notes_folder() / hashlib.sha256(run_id.encode()).hexdigest()[:32]
    with suppress(OSError, ValueError, KeyError, TypeError):
        noted = json.loads(note.read_text())
        if noted["beat"] == beat and noted["boot"] == pid_namespace():
            return max(0.0, _now() - float(noted["at"]))
    with suppress(OSError):  # the home is not writable: then this reader never marks a run
        note.parent.mkdir(parents=True, exist_ok=True)
        aside = note.with_name(f"{note.name}.{os.getpid()}")
        aside.write_text(json.dumps({"beat": beat, "boot": pid_namespace(), "at": _now()}))
        aside.replace(note)
    return 0.0


def _now() -> float:
    """Seconds since this machine was started, a clock that nobody sets."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _notes_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "lockstep", "beats")
