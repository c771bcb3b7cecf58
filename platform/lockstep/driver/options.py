"""How a call executes a run: where, and what it shows. Nothing here changes a bit of the run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.driver.progress import Progress, Silent


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options that train, resume and sweep have in common."""

    progress: Progress = field(default_factory=Silent)
    local: bool = False
    """Train in this process without Ray, or as one rank under torchrun."""
    address: str | None = None
    """The Ray cluster, as `cluster_address` reads it."""
    verbose: bool = False
    """Show what Ray itself logs."""
    chaos: str | None = None
    """Parts of the run that are killed on purpose, such as `worker:0.02`."""
    retries: int = 0
    """How often the run is started again if its driver is lost."""
    notify: str | Sequence[str] | None = None
    """A command, a list of words or a text for the shell, that is run at the run's start, failure and end."""
    source: Mapping[str, bytes] | None = None
    """The job's files by their paths below a source root, if they are in no folder: those of a class of `__main__`."""
    began_at: float = field(default_factory=time.time)
    """When the command was given, Unix time in seconds."""
