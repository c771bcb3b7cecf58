"""Which installed distribution a module comes from, as the folder that it lies in tells: nothing is imported for it, and no metadata parsed."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

_FOLDER = re.compile(r"(.+?)-([^-]+)\.dist-info")


class Distribution(NamedTuple):
    """An installed distribution: its name, normalised as pip compares names, its version, and the folder of its metadata."""

    name: str
    version: str
    metadata: Path


def distribution_of(path: Path) -> Distribution | None:
    """The distribution that has installed a file, or a package's folder. None for what none has, such as a source tree of an editable one."""
    for folder in path.parents:
        distributions = _installed_in(str(folder), _changed(folder))
        if distributions and (distribution := _owner(path, folder, distributions)) is not None:
            return distribution
    return None


def _changed(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=256)
def _installed_in(folder: str, _changed: int) -> tuple[Distribution, ...]:
    """The distributions of a folder, read once for as long as nothing is added to it or taken away."""
    try:
        names = sorted(os.listdir(folder))  # noqa: PTH208 - of a folder with thousands of names
    except OSError:
        return ()
    matches = ((name, _FOLDER.fullmatch(name)) for name in names if name.endswith(".dist-info"))
    return tuple(
        Distribution(normalised(match[1]), match[2], Path(folder, name)) for name, match in matches if match
    )


def _owner(path: Path, folder: Path, distributions: tuple[Distribution, ...]) -> Distribution | None:
    inside = path.relative_to(folder)
    top = inside.parts[0].partition(".")[0]
    likely = [distribution for distribution in distributions if distribution.name == normalised(top)]
    owners = [distribution for distribution in likely if top in _tops(distribution.metadata)]
    owners = owners or [distribution for distribution in distributions if top in _tops(distribution.metadata)]
    if len(owners) > 1:  # a namespace that they share
        line = f"{inside.as_posix()},"
        owners = [
            distribution for distribution in owners if line in _text(distribution.metadata / "RECORD")
        ] or owners
    return owners[0] if owners else None


@lru_cache(maxsize=4096)
def _tops(metadata: Path) -> frozenset[str]:
    """The top-level names that a distribution has installed."""
    lines = _text(metadata / "top_level.txt").split()
    if not lines:
        record = (line.partition(",")[0] for line in _text(metadata / "RECORD").splitlines())
        lines = [line.partition("/")[0].partition(".")[0] for line in record]
    return frozenset(lines)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def normalised(name: str) -> str:
    """A name of a distribution as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()
