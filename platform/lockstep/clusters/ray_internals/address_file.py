"""The file in which Ray notes the address of the cluster that was last started on a machine. It is read before Ray is imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def default_folder() -> Path:
    """Where Ray keeps its files unless it was given another folder."""
    linux = os.environ.get("TMPDIR") if sys.platform == "linux" else None
    return Path(os.environ.get("RAY_TMPDIR") or linux or "/tmp", "ray")


def address_file(folder: Path) -> Path:
    """The file of a cluster that keeps its files in this folder."""
    return folder / "ray_current_cluster"
