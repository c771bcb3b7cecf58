"""Pins: checkpoints that stay whatever retention says, each for its own reason.

A pin is an empty file, `<run_id>/pins/step-000000200.<reason>`. Pruning reads the pins just before it deletes: a checkpoint
that is pinned in time is kept, and goes with the next save after its last pin was removed.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from lockstep.checkpoint import layout
from lockstep.checkpoint.errors import LostFileError, TakenError
from lockstep.checkpoint.runs.run_folder import RunFolder

ASKED, ALIAS = "asked", "alias"
"""Reasons: a person asked for it; the model registry has an alias for it."""


def pinned(run: RunFolder) -> frozenset[int]:
    """The steps that are pinned, for whatever reason."""
    return frozenset(step for step, _ in _pins(run))


def pin(run: RunFolder, step: int, reason: str = ASKED) -> None:
    """Pin the checkpoint of a step; it may be pinned already."""
    with suppress(TakenError):
        run.storage.create(_path(run, step, reason), b"")


def unpin(run: RunFolder, step: int, reason: str = ASKED) -> None:
    """Remove a pin; there may be none."""
    with suppress(LostFileError):
        run.storage.delete(_path(run, step, reason))


def pin_exactly(run: RunFolder, steps: Collection[int], reason: str) -> None:
    """Make these the only steps that are pinned for `reason`."""
    previous = {step for step, why in _pins(run) if why == reason}
    for step in set(steps) - previous:
        pin(run, step, reason)
    for step in previous - set(steps):
        unpin(run, step, reason)


def _pins(run: RunFolder) -> list[tuple[int, str]]:
    parts = (item.name.partition(".") for item in run.storage.list(run.path(layout.PINS)))
    pins = ((layout.step_of(name), reason) for name, _, reason in parts)
    return [(step, reason) for step, reason in pins if step is not None]


def _path(run: RunFolder, step: int, reason: str) -> str:
    return run.path(layout.PINS, f"{layout.step_folder(step)}.{reason}")
