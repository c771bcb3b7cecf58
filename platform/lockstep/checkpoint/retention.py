"""Which checkpoints to keep, and which files a crash has left behind: only decisions, nothing is deleted here.

Invariants: the newest good checkpoint is never deleted, nor a pinned one; a damaged one never counts as
good; where nothing is good, nothing is deleted. A file is a leftover only if no manifest names it and nobody
can still be about to name it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from lockstep.checkpoint.layout import FileName, file_name, manifests


@dataclass(frozen=True, slots=True)
class Keep:
    """The checkpoints to keep: those that any of these asks for."""

    last: int = 2
    """How many of the newest, at least one."""
    metric: str | None = None
    """The best by this metric; on a tie the earliest, and NaN is never best."""
    mode: Literal["min", "max"] = "min"
    every: int | None = None
    """Every step that is a multiple of this, for good."""
    pinned: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.last < 1 or (self.every is not None and self.every < 1):
            raise ValueError(f"last and every are at least 1, got {self.last} and {self.every}")


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a checkpoint. It is `good` unless something is known to be wrong with it."""

    step: int
    good: bool = True
    metrics: Mapping[str, float] | None = None


def surplus(known: Iterable[Known], keep: Keep) -> list[int]:
    """The steps to delete, oldest first.

    A damaged checkpoint goes when a newer one is good; until then it stays as evidence.
    """
    ordered = sorted(known, key=lambda checkpoint: checkpoint.step)
    good = [checkpoint for checkpoint in ordered if checkpoint.good]
    if not good:
        return []
    retained = {checkpoint.step for checkpoint in good[-keep.last :]} | keep.pinned
    retained |= {checkpoint.step for checkpoint in good if keep.every and checkpoint.step % keep.every == 0}
    retained |= _best(good, keep)
    newest = good[-1].step
    return [
        checkpoint.step
        for checkpoint in ordered
        if checkpoint.step not in retained and checkpoint.step <= newest
    ]


def essential(known: Iterable[Known], keep: Keep) -> list[int]:
    """The steps without which a run would lose something: the newest good one, the best one and the pinned ones; newest first."""
    good = sorted(
        (candidate for candidate in known if candidate.good), key=lambda checkpoint: checkpoint.step
    )
    newest = {checkpoint.step for checkpoint in good[-1:]}
    pinned = {checkpoint.step for checkpoint in good if checkpoint.step in keep.pinned}
    return sorted(newest | _best(good, keep) | pinned, reverse=True)


def _best(good: list[Known], keep: Keep) -> set[int]:
    """The step with the best metric, in a set; none where no checkpoint has it."""
    sign = 1.0 if keep.mode == "min" else -1.0
    values = [
        (sign * checkpoint.metrics[keep.metric], checkpoint.step)
        for checkpoint in good
        if keep.metric is not None and checkpoint.metrics and keep.metric in checkpoint.metrics
    ]
    return {step for _, step in sorted(pair for pair in values if not math.isnan(pair[0]))[:1]}


@dataclass(frozen=True, slots=True)
class StepFolder:
    """The files in a step's folder. `listed` has the manifests and the files that they name; None where a manifest cannot be read."""

    step: int
    names: frozenset[str]
    listed: frozenset[str] | None = None
    attempt: int | None = None
    """The newest attempt that published it."""


def leftovers(folders: Iterable[StepFolder], current: int, *, fenced: bool = True) -> dict[int, list[str]]:
    """The files to delete, by step, while attempt `current` is the current one.

    These are files of ended attempts, and those of the current one before the newest step that it has published: ranks
    write their parts in the order of steps. A folder whose manifest cannot be read is left alone, and so is a
    file whose name this store did not make. Where ended attempts are not `fenced` off, the manifest
    that names their files may still be on its way: they stay until the current attempt has published that step or a later one.
    """
    step_folders = list(folders)
    published = max((folder.step for folder in step_folders if folder.attempt == current), default=-1)
    by_step = {folder.step: _leftovers(folder, current, published, fenced=fenced) for folder in step_folders}
    return {step: names for step, names in by_step.items() if names}


def _leftovers(folder: StepFolder, current: int, published: int, *, fenced: bool) -> list[str]:
    if manifests(folder.names) and folder.listed is None:
        return []

    def is_leftover(name: FileName) -> bool:
        ended = name.attempt < current and (fenced or folder.step <= published)
        return ended or (name.attempt == current and folder.step < published)

    unlisted = sorted(folder.names - (folder.listed or frozenset()))
    return [name for name in unlisted if (parts := file_name(name)) and is_leftover(parts)]
