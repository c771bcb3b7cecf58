"""The stacks of a process that hangs: it writes those of all its threads on SIGUSR1, even where Python itself no longer runs."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from lockstep.errors import StorageError
from lockstep.files import own_folder
from lockstep.process import started

STACKS_S = 10.0
"""How long a process may take to write its stacks; one that is stopped or gone never does."""

_SETTLED_S = 0.5
"""What has not grown for so long is whole, unless its process still writes."""

_PREFIX = "stacks-"
"""A file's name is this and the number of its process."""

_streams: list[TextIO] = []
"""The file that this process writes to now."""


def write_stacks_on_signal() -> Path:
    """Have this process write its stacks on SIGUSR1. Returns the file into which it does, which is deleted when the process ends."""
    path, _ = _registered()
    atexit.register(path.unlink, missing_ok=True)
    return path


@contextmanager
def stacks_on_signal() -> Iterator[Path | None]:
    """The same for the length of a block; None where this user has no folder for it."""
    try:
        path, stream = _registered()
    except StorageError:
        yield None
        return
    try:
        yield path
    finally:
        faulthandler.unregister(signal.SIGUSR1)
        stream.close()
        path.unlink(missing_ok=True)


def _registered() -> tuple[Path, TextIO]:
    path = _stacks_file()
    stream = path.open("x", encoding="utf-8")  # open as long as a signal may come
    # A handler of the caller's is called too. The default action would end the process.
    chain = signal.getsignal(signal.SIGUSR1) not in (signal.SIG_DFL, signal.SIG_IGN, None)
    faulthandler.register(signal.SIGUSR1, file=stream, all_threads=True, chain=chain)
    for former in _streams:
        former.close()  # faulthandler has let go of it
    _streams[:] = [stream]
    return path, stream


def _stacks_file() -> Path:
    """The file of this process in the user's own temporary folder. Deletes the files of processes that are gone."""
    folder = own_folder(Path(tempfile.gettempdir()))
    for path in folder.glob(f"{_PREFIX}*.txt"):
        pid = path.stem.removeprefix(_PREFIX)
        if pid == str(os.getpid()) or (pid.isdigit() and not started(int(pid))):
            path.unlink(missing_ok=True)
    return folder / f"{_PREFIX}{os.getpid()}.txt"


def await_stacks(files: Collection[Path]) -> None:
    """Wait until processes that were asked for their stacks have written them, each to its file; on a busy machine that takes seconds."""
    until, before = time.monotonic() + STACKS_S, list[int]()
    while time.monotonic() < until:
        time.sleep(_SETTLED_S)
        sizes = [path.stat().st_size if path.exists() else 0 for path in files]
        if sizes == before and all(sizes) and not any(map(_is_in_handler, files)):
            return
        before = sizes


def _is_in_handler(file: Path) -> bool:
    """Whether the process of a file is about to write its stacks, or writes them: its first thread, which gets the signal, blocks it for so long. On Linux; elsewhere nobody can tell."""
    try:
        status = Path("/proc", file.stem.removeprefix(_PREFIX), "status").read_text()
    except OSError:  # it is gone
        return False
    masks = dict(line.split(":", 1) for line in status.splitlines())
    mask = int(masks["SigBlk"], 16) | int(masks["ShdPnd"], 16)
    return bool(mask >> (signal.SIGUSR1 - 1) & 1)


def stacks_in(path: Path) -> str:
    """The stacks that a process has written, or why there are none."""
    stacks = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return stacks or "it wrote no stacks: stopped, or deaf to signals"
