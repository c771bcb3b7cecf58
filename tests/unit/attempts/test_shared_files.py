"""Which folders of a run have to be the same on every node."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.attempts.shared_files import local_folders
from lockstep.spec.loading import load_spec


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_storage_is_looked_for_on_every_node_however_it_is_named(tmp_path: Path, scheme: str) -> None:
    """By its URI it had not been: each node's workers would have written checkpoints to a disk of their own."""
    storage, record = str(tmp_path / "shared"), str(tmp_path / "record")
    spec = load_spec(
        {
            "job": {"use": "any:Job"},
            "checkpoint": {"storage": f"{scheme}{storage}"},
            "record": {"uri": "off", "folder": record},
        }
    )
    assert local_folders(spec) == {"record.folder": record, "checkpoint.storage": storage}
