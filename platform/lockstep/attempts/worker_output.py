"""Sends what a worker prints to the record.

Ray redirects a worker's standard output and error to files on its node, which are lost with the node. A thread reads
what is new in them now and then, so a killed worker has sent all but its last seconds.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lockstep.periodic import periodically

EVERY_S = 5.0
"""Seconds between looks at what a worker has printed."""

MOST = 1 << 18
"""The most bytes that are sent at once; of more, the newest."""

_RAYS_OWN = (b":job_id:", b":actor_name:", b":task_name:")
"""Lines by which Ray marks whose output follows; they are left out."""


def keep_private() -> None:
    """Make the files that Ray writes this process's output to readable by its user only."""
    for number in (1, 2):
        with suppress(OSError):  # closed, or another user's
            if stat.S_ISREG(os.fstat(number).st_mode):
                os.fchmod(number, 0o600)


@contextmanager
def output_sent(tell: Callable[[str, str], None], every_s: float = EVERY_S) -> Iterator[None]:
    """Inside the block, call `tell(stream, text)` with what this process prints, from a thread; `stream` is stdout or stderr.

    Output to a terminal or a pipe is not sent, because the reader at the other end has it.
    """
    files = [file for file in map(_opened, ("stdout", "stderr")) if file is not None]

    def look() -> None:
        for file in files:
            text = file.new_text()
            if text:
                tell(file.stream, text)

    try:
        with periodically(lambda: look, every_s, "lockstep-output"):
            yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        look()


class _Output:
    """One stream's file, read from where it ended when this object was made."""

    def __init__(self, stream: str, path: Path) -> None:
        self.stream = stream
        self._path = path
        self._at = path.stat().st_size

    def new_text(self) -> str:
        """What was printed since the last call, in whole lines except the last."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                if size < self._at:
                    self._at = 0  # Ray has started the file again
                left_out = max(0, size - self._at - MOST)
                file.seek(self._at + left_out)
                content = file.read(size - self._at - left_out)
        except OSError:
            return ""  # someone has deleted the log
        self._at = size
        lines = [line for line in content.splitlines(keepends=True) if not line.startswith(_RAYS_OWN)]
        note = f"… {left_out} bytes were left out here\n" if left_out else ""
        return note + b"".join(lines).decode("utf-8", errors="replace")


def _opened(stream: str) -> _Output | None:
    number = {"stdout": 1, "stderr": 2}[stream]
    with suppress(OSError):  # closed, or not Linux
        if stat.S_ISREG(os.fstat(number).st_mode):
            return _Output(stream, Path(f"/proc/self/fd/{number}").readlink())
    return None
