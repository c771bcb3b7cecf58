"""Processes as tests look for them: by their command lines, while others begin and end."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import psutil

from lockstep.training.worker_environment import MEMORY, WORKER_ENVIRONMENT


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


def started_for_exact_runs(process: psutil.Process) -> bool:
    """Whether a process was started with the environment of a worker."""
    found = process.environ()
    # glibc cuts a text of tunables into pieces where it reads it, and hands a whole copy on.
    wanted = {
        name: value.partition(":")[0] if name in MEMORY else value
        for name, value in WORKER_ENVIRONMENT.items()
    }
    return all(found.get(name) == value for name, value in wanted.items())
