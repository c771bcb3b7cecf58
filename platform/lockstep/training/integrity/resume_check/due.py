"""When the next checkpoint is tried: all that a run keeps of its checks from one group of workers to the next."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessContext:
    """What a new process of the run is started with: as it was before the first step, for an outage leaves nothing of what a job has changed since."""

    environment: Mapping[str, str]
    path: Sequence[str]
    """Where modules are looked up."""
    folder: str
    """The working directory."""

    @classmethod
    def here(cls) -> ProcessContext:
        return cls(dict(os.environ), list(sys.path), str(Path.cwd()))


@dataclass(slots=True)
class Due:
    """When a check is due, by the monotonic clock."""

    at: float | None = None
    """None before the process has trained."""
    began_in: ProcessContext | None = None
    told: bool = False
    """Whether the run's owner has been told of a check that came to nothing."""
    off: bool = False
    """Whether this process makes no more checks."""
