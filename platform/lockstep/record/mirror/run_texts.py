"""The texts of a run: its log, and what its workers print. What the disk refuses is kept, and written with the next text."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from lockstep.files import append, append_bounded
from lockstep.printing import printable, streamed
from lockstep.record.redaction import redacted

LOG = "log.txt"
LOGS = "logs"
"""The folder of the workers' output."""

_MOST_UNPRINTED = 1 << 20
_LONGEST_LINE = 1 << 12
"""At most so many characters of an unfinished line are held back, so that no secret is cut in two."""


class Texts:
    """The log, to which any thread may add, and a file for each worker, which one thread writes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._logging = threading.Lock()
        self._unlogged = ""
        self._unprinted: dict[str, str] = {}

    def log(self, text: str) -> None:
        """Add a line to the log, with its time."""
        with self._logging:
            self._unlogged += f"{time.strftime('%Y-%m-%d %H:%M:%S')} {printable(text)}\n"
            try:
                append(self._folder / LOG, self._unlogged)
            except OSError:
                return
            self._unlogged = ""

    def output(self, name: str, text: str) -> None:
        """Add what a worker has printed, up to its last whole line."""
        text = self._unprinted.pop(name, "") + text
        end = max(text.rfind("\n"), text.rfind("\r"), len(text) - _LONGEST_LINE - 1) + 1
        try:
            self._print(name, text[:end])
        except OSError:
            self._unprinted[name] = text[-_MOST_UNPRINTED:]
        else:
            if text[end:]:
                self._unprinted[name] = text[end:]

    def end(self) -> list[Path]:
        """Write what was held back. Returns the files of the workers' output. Raises OSError."""
        for name, text in self._unprinted.items():
            self._print(name, text)
        self._unprinted.clear()
        return sorted((self._folder / LOGS).glob("*.txt"))

    def _print(self, name: str, text: str) -> None:
        if text:
            append_bounded(self._folder / LOGS / f"{name}.txt", redacted(streamed(text)))
