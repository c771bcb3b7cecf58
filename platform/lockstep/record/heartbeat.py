"""Whether the process that records a run still lives: its heartbeat, and on the same machine the process itself.

A killed process leaves its run RUNNING. Whoever sees such a run later can tell, and marks it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from lockstep.process import place, started

BEAT_S = 20.0
"""How often a recorder says that it lives."""
SILENT_S = 150.0
"""How long a recorder may be silent before its run is taken for abandoned."""


def process_tags(now: float) -> dict[str, str]:
    """Tags by which others find this process: time, host, and where Linux tells it the very process."""
    return {
        "lockstep.heartbeat": f"{now:.0f}",
        "lockstep.host": socket.gethostname(),
        "lockstep.process": f"{place()} {os.getpid()} {started(os.getpid())}",
    }


def vanished(tags: Mapping[str, str], now: float) -> str:
    """Why a run that its store has as RUNNING is not; nothing where it may well be."""
    if "lockstep.heartbeat" not in tags:
        return ""
    where, _, process = tags.get("lockstep.process", "").partition(" ")
    pid, _, began = process.partition(" ")
    if where and where == place() and pid.isdigit():
        if started(int(pid)) == began:
            return ""
        return f"the process that recorded it is gone (host {tags.get('lockstep.host', '?')}, pid {pid})"
    silent_s = now - float(tags["lockstep.heartbeat"])
    if silent_s < SILENT_S:
        return ""
    return f"nothing was heard for {silent_s:.0f} s from the process that recorded it (host {tags.get('lockstep.host', '?')})"
