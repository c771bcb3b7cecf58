"""What a job takes along to the cluster: the working directory without what is ignored, and Lockstep itself.

Ray packs the directory, and refuses a large package with an HTTP 413 that names no file. So Ray's own packing functions are run
beforehand, and the large files can be named.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lockstep.clusters import problems
from lockstep.clusters.ray_internals import packages, unavailable
from lockstep.errors import SpecError

MIB = 1024 * 1024
NOTED = 10 * MIB
"""Bytes of a package that is worth a message."""

HOPELESS = 4096 * MIB
"""Bytes of files that are not even packed to find out their packed size."""

EXCLUDES = (".git", ".venv", "venv", "__pycache__")


class Package(NamedTuple):
    """A directory as Ray would send it."""

    files: int
    size: int
    """Bytes of the packed files."""
    largest: tuple[tuple[str, int], ...]
    """The largest files with their sizes before packing."""

    def described(self) -> str:
        """Its size and its largest files, in words."""
        parts = ", ".join(f"{name} {size / MIB:.1f} MiB" for name, size in self.largest if size > MIB // 10)
        return f"{self.files} files, {self.size / MIB:.1f} MiB packed" + (
            f"; largest: {parts}" if parts else ""
        )


def pack(folder: Path, *, limit: int | None = None, excludes: Sequence[str] = EXCLUDES) -> Package | None:
    """Find out how large a directory is when packed, honouring .gitignore and .rayignore. SpecError if too large; None if Ray cannot be asked."""
    if unavailable("packages"):
        return None
    limit = packages.upload_limit() if limit is None else limit
    sizes = _files(folder, excludes)
    largest = tuple(sorted(sizes.items(), key=lambda item: (-item[1], item[0]))[:5])
    if sum(sizes.values()) > HOPELESS:
        raise _too_large(folder, Package(len(sizes), sum(sizes.values()), largest), limit)
    with tempfile.TemporaryDirectory(prefix="lockstep-package-") as aside:
        target = Path(aside, "package.zip")
        packages.write_package(folder, target, excludes)
        package = Package(len(sizes), target.stat().st_size, largest)
    if package.size >= limit:
        raise _too_large(folder, package, limit)
    return package


def _files(folder: Path, excludes: Sequence[str]) -> dict[str, int]:
    """The size of each file that Ray would pack, by name."""
    sizes: dict[str, int] = {}

    def take(path: Path) -> None:
        if path.is_file():
            sizes[str(path.relative_to(folder))] = path.stat().st_size

    packages.walk(folder, excludes, take)
    return sizes


def _too_large(folder: Path, package: Package, limit: int) -> SpecError:
    return problems.TOO_LARGE(folder=folder, wanted=f"{limit / MIB:.0f}", got=package.described())
