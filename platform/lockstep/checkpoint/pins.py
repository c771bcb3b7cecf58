"""Pins: checkpoints that stay whatever retention says, each for a reason of its own.

A pin is an empty file, `<run_id>/pins/step-000000200.<reason>`. Whoever prunes reads them just before: a checkpoint
that is pinned before it is due to go is kept, and goes with the next save after its last pin was taken away.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from lockstep.checkpoint import layout
from lockstep.checkpoint.errors import LostFileError, TakenError
from lockstep.checkpoint.run_folder import RunFolder

ASKED, ALIAS = "asked", "alias"
"""Reasons: a person asked for it; the model registry has an alias for it."""


def pinned(run: RunFolder) -> frozenset[int]:
    """The steps that are pinned, for whatever reason."""
    return frozenset(step for step, _ in _pins(run))


def pin(run: RunFolder, step: int, reason: str = ASKED) -> None:
    """Keep the checkpoint of a step. It may be pinned already."""
    with suppress(TakenError):
        run.storage.create(_path(run, step, reason), b"")


def unpin(run: RunFolder, step: int, reason: str = ASKED) -> None:
    """Take a pin away; there may be none."""
    with suppress(LostFileError):
        run.storage.delete(_path(run, step, reason))


def pin_exactly(run: RunFolder, steps: Collection[int], reason: str) -> None:
    """Let these be all the steps that are pinned for `reason`."""
    before = {step for step, why in _pins(run) if why == reason}
    for step in set(steps) - before:
        pin(run, step, reason)
    for step in before - set(steps):
        unpin(run, step, reason)


def _pins(run: RunFolder) -> list[tuple[int, str]]:
    parts = (item.name.partition(".") for item in run.storage.list(run.path(layout.PINS)))
    found = ((layout.step_of(name), reason) for name, _, reason in parts)
    return [(step, reason) for step, reason in found if step is not None]


def _path(run: RunFolder, step: int, reason: str) -> str:
    return run.path(layout.PINS, f"{layout.step_folder(step)}.{reason}")
