"""How Ray packs the working directory of a job. See `unavailable`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path


def upload_limit() -> int:
    """The most bytes that Ray's dashboard accepts in one request."""
    from ray._private.ray_constants import DASHBOARD_CLIENT_MAX_SIZE
    from ray._private.runtime_env.packaging import GCS_STORAGE_MAX_SIZE

    return int(min(DASHBOARD_CLIENT_MAX_SIZE, GCS_STORAGE_MAX_SIZE))


def write_package(folder: Path, target: Path, excludes: Sequence[str]) -> None:
    """Pack a directory as Ray would, honouring .gitignore and .rayignore."""
    from ray._private.runtime_env.packaging import create_package

    create_package(
        str(folder), target, include_gitignore=True, include_parent_dir=False, excludes=list(excludes)
    )


def walk(folder: Path, excludes: Sequence[str], take: Callable[[Path], None]) -> None:
    """Call `take` for each path that Ray would pack."""
    from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

    _dir_travel(folder, [_get_excludes(folder, list(excludes))], take, include_gitignore=True)
