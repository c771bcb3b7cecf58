"""Whether the process that records a run still lives: its heartbeat, and on the same machine the process itself.

A killed process leaves its run RUNNING. Whoever sees such a run later can tell, and marks it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

BEAT_S = 20.0
"""How often a recorder says that it lives."""
SILENT_S = 150.0
"""How long a recorder may be silent before its run is taken for abandoned."""


def process_tags(now: float) -> dict[str, str]:
    """Tags by which others find this process: time, host, and where Linux tells it the very process."""
    return {
        "lockstep.heartbeat": f"{now:.0f}",
        "lockstep.host": socket.gethostname(),
        "lockstep.process": f"{_place()} {os.getpid()} {_started(os.getpid())}",
    }


def vanished(tags: Mapping[str, str], now: float) -> str:
    """Why a run that its store has as RUNNING is not; nothing where it may well be."""
    if "lockstep.heartbeat" not in tags:
        return ""
    place, _, process = tags.get("lockstep.process", "").partition(" ")
    pid, _, started = process.partition(" ")
    if place and place == _place() and pid.isdigit():
        if _started(int(pid)) == started:
            return ""
        return f"the process that recorded it is gone (host {tags.get('lockstep.host', '?')}, pid {pid})"
    silent_s = now - float(tags["lockstep.heartbeat"])
    if silent_s < SILENT_S:
        return ""
    return f"nothing was heard for {silent_s:.0f} s from the process that recorded it (host {tags.get('lockstep.host', '?')})"


def _place() -> str:
    """The boot of the machine and the namespace of process ids: within it a pid and a start time name one process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""  # no Linux: the heartbeat alone has to tell


def _started(pid: int) -> str:
    """When a process started, in ticks since boot; nothing where there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    state, *rest = stat.rpartition(")")[2].split()
    return "" if state in {"Z", "X"} else rest[18]
