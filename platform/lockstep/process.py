"""Tells of this process whether it is one of several of torchrun, and (on Linux) which one, so that others can tell whether it lives; and has it look for garbage seldom."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def launched_by_torchrun() -> bool:
    """Whether this process was started by `torchrun`, alone or as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def under_torchrun() -> bool:
    """Whether this process was started by `torchrun` as one of several."""
    return launched_by_torchrun() and int(os.environ.get("WORLD_SIZE", "1")) > 1


def collect_seldom() -> None:
    """Look for garbage that refers to itself a seventieth as often as Python does: it takes a fifth of the time of imports, and finds next to nothing there.

    Not for a process that trains, where such garbage may hold tensors.
    """
    gc.set_threshold(50_000, 20)


def end_with_parent(parent: int) -> None:
    """Have this process, just started by process `parent`, killed as soon as the thread that started it ends, however that is. On Linux alone."""
    if sys.platform != "linux":
        return
    _libc.prctl(
        ctypes.c_int(_PR_SET_PDEATHSIG),
        ctypes.c_ulong(signal.SIGKILL),
        ctypes.c_ulong(0),
        ctypes.c_ulong(0),
        ctypes.c_ulong(0),
    )
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


_libc = ctypes.CDLL(None)  # here and not in a child, in which the loader of libraries may be locked


def pid_namespace() -> str:
    """The machine's boot and the namespace of process ids: within it a pid and a start time identify a process. Empty if not on Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def network() -> str:
    """The machine's boot and its network namespace: processes with the same one reach each other without leaving the machine."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/net').readlink()}"
    except OSError:
        return socket.gethostname()


def started(pid: int) -> str:
    """When a process started, in ticks since boot; empty if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    state, *fields = stat.rpartition(")")[2].split()
    return "" if state in {"Z", "X"} else fields[18]
