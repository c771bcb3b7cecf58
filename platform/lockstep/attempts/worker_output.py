"""What a worker prints, on its way to the record.

Ray has the standard output and error of a worker go to files on its node, which are gone with the node. A thread reads
what is new in them now and then, so that a worker that is killed has told all but its last seconds.
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
"""How often a worker looks for what it has printed."""

MOST = 1 << 18
"""Bytes that are told at once; of more, the newest."""

_RAYS_OWN = (b":job_id:", b":actor_name:", b":task_name:")
"""Lines by which Ray marks whose output follows."""


@contextmanager
def output_told(tell: Callable[[str, str], None], every_s: float = EVERY_S) -> Iterator[None]:
    """While the block runs, call `tell(stream, text)` with what this process prints, from a thread; `stream` is stdout or stderr.

    Nothing is told where the output goes to a terminal or a pipe: whoever is at its end has it.
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
    """One stream's file, from where it ended when this was made."""

    def __init__(self, stream: str, path: Path) -> None:
        self.stream = stream
        self._path = path
        self._at = path.stat().st_size

    def new_text(self) -> str:
        """What came since the last call, in whole lines but for the last."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                if size < self._at:
                    self._at = 0  # Ray has begun the file anew
                left_out = max(0, size - self._at - MOST)
                file.seek(self._at + left_out)
                content = file.read(size - self._at - left_out)
        except OSError:
            return ""  # a log that someone has deleted
        self._at = size
        lines = [line for line in content.splitlines(keepends=True) if not line.startswith(_RAYS_OWN)]
        note = f"… {left_out} bytes were left out here\n" if left_out else ""
        return note + b"".join(lines).decode("utf-8", errors="replace")


def _opened(stream: str) -> _Output | None:
    number = {"stdout": 1, "stderr": 2}[stream]
    with suppress(OSError):  # closed, or no Linux
        if stat.S_ISREG(os.fstat(number).st_mode):
            return _Output(stream, Path(f"/proc/self/fd/{number}").readlink())
    return None
