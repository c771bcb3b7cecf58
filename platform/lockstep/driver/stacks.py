"""The stacks of a process that hangs: it writes those of all its threads on SIGUSR1, even where Python itself no longer runs."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import tempfile
from pathlib import Path

from lockstep.files import own_folder, own_path
from lockstep.process import started

STACKS_S = 3.0
"""How long a process may take to write its stacks; one that is stopped or gone never does."""


def write_stacks_on_signal() -> Path:
    """Have this process write its stacks on SIGUSR1. Returns the file into which it does, which is deleted when the process ends."""
    path = _stacks_file()
    stream = path.open("x", encoding="utf-8")  # open as long as the process lives
    atexit.register(path.unlink, missing_ok=True)
    # A handler of the caller's is called too. The default action would end the process.
    chain = signal.getsignal(signal.SIGUSR1) not in (signal.SIG_DFL, signal.SIG_IGN, None)
    faulthandler.register(signal.SIGUSR1, file=stream, all_threads=True, chain=chain)
    return path


def _stacks_file() -> Path:
    """The file of this process in the user's own temporary folder. Deletes the files of processes that are gone."""
    folder = own_folder(own_path(Path(tempfile.gettempdir())))
    for path in folder.glob("stacks-*.txt"):
        pid = path.stem.removeprefix("stacks-")
        if pid == str(os.getpid()) or (pid.isdigit() and not started(int(pid))):
            path.unlink(missing_ok=True)
    return folder / f"stacks-{os.getpid()}.txt"


def stacks_in(path: Path) -> str:
    """The stacks that a process has written, or why there are none."""
    stacks = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return stacks or "it wrote no stacks: stopped, or deaf to signals"
