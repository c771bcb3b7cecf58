"""Whole checkpoints, written and looked for by one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lockstep.checkpoint.manifest import Facts
from lockstep.checkpoint.reader import Checkpoint, load_newest, verify
from lockstep.checkpoint.runs.run_folder import Attempt, RunFolder
from lockstep.checkpoint.snapshot import Block, snapshot
from lockstep.checkpoint.tree import Tree
from lockstep.checkpoint.writer import commit, share, write_part


def write_checkpoint(
    attempt: Attempt,
    step: int,
    sections: Mapping[str, Tree | Block],
    facts: Facts | None = None,
    shared: Mapping[str, bytes] | None = None,
) -> Checkpoint:
    """Write and publish a whole checkpoint from one process; `shared` has the files that it shares, by name."""
    copied = snapshot(sections)
    part = write_part(attempt, step, copied)
    entries = [share(attempt, name, content) for name, content in (shared or {}).items()]
    return commit(attempt, step, [part], facts or Facts(), entries)


def newest_good(run: RunFolder, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that is whole, down to the files that it shares; None where there is none."""
    loaded = load_newest(run, warn)
    if loaded is None:
        return None
    verify(loaded.checkpoint)
    return loaded.checkpoint
