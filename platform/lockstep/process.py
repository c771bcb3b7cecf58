"""Which process this is, so that others on the same machine can tell whether it still lives. On Linux only."""

from __future__ import annotations

from pathlib import Path


def place() -> str:
    """The boot of the machine and the namespace of process ids: within it a pid and a start time name one process. Empty elsewhere."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def started(pid: int) -> str:
    """When a process started, in ticks since boot; nothing where there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    state, *rest = stat.rpartition(")")[2].split()
    return "" if state in {"Z", "X"} else rest[18]
