"""Processes as tests look for them: by their command lines, while others begin and end."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import psutil


def named(*words: str, among: Iterable[psutil.Process] | None = None) -> list[psutil.Process]:
    """Those in whose command line all `words` are, of this process's descendants where no others are given."""
    if among is None:
        among = psutil.Process().children(recursive=True)
    found = []
    for process in among:
        with suppress(psutil.NoSuchProcess):  # it ended while it was looked at
            line = " ".join(process.cmdline())
            if all(word in line for word in words):
                found.append(process)
    return found
