"""G5: whatever call to the operating system is a process's last, the store is whole and the run goes on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def trials(tmp_path_factory: pytest.TempPathFactory, *names: str) -> dict[str, Any]:
    """What came of those trials, in one process. In memory where the system has a place for it: a kill loses nothing that an fsync would save."""
    memory = Path("/dev/shm")
    folder = tempfile.mkdtemp(dir=memory if memory.is_dir() else tmp_path_factory.mktemp("killed"))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.unit.checkpoint.killed_at_every_call", folder, *names],
            cwd=ROOT,
            env={"PYTHONPATH": f"{ROOT}/platform:{ROOT}", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
    finally:
        shutil.rmtree(folder)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def later_save(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The save of an attempt that finds checkpoints."""
    return dict(trials(tmp_path_factory, "next-sound")["next-sound"])


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return trials(tmp_path_factory, "first-sound", "next-in_place", "next-files_first", "next-manifest_first")


def whole(told: dict[str, Any]) -> bool:
    """Every checkpoint that could be seen was whole and held its state, and the next attempt left nothing behind."""
    assert len(told["calls"]) > 50
    return told["wrong"] == {}


def test_a_kill_at_any_call_leaves_a_whole_store(later_save: dict[str, Any]) -> None:
    assert whole(later_save)


@pytest.mark.scenario
def test_the_kills_find_a_store_that_is_broken(others: dict[str, Any]) -> None:
    """Negative control: the manifest is there before the files are."""
    assert not whole(others["next-manifest_first"])


@pytest.mark.scenario
def test_a_kill_at_any_call_of_the_first_save_leaves_a_whole_store(others: dict[str, Any]) -> None:
    assert whole(others["first-sound"])


@pytest.mark.scenario
@pytest.mark.parametrize("variant", ["in_place", "files_first"])
def test_each_rule_of_the_store_is_needed(others: dict[str, Any], variant: str) -> None:
    """Negative control."""
    assert not whole(others[f"next-{variant}"])


def test_nothing_is_published_before_it_is_on_the_disk(later_save: dict[str, Any]) -> None:
    """What a kill cannot show, as the system keeps what the process wrote: an order that also stands a loss of power."""
    calls = later_save["calls"]
    assert set(Counter(name for name, _, _ in calls)) >= {
        "open",
        "write",
        "fsync",
        "replace",
        "unlink",
        "mkdir",
        "rmdir",
    }
    unflushed: set[str] = set()  # files written to, and folders with new names, since they were last flushed
    for name, path, target in calls:
        if name == "write":
            unflushed.add(path)
        elif name == "fsync":
            unflushed.discard(path)
        elif name in ("replace", "link"):
            assert path not in unflushed, f"{path} gets its name before its content is on the disk"
            if target.endswith("manifest.json"):
                assert not unflushed, f"{target} is published before {unflushed}"
            unflushed.add(str(Path(target).parent))
        elif name == "mkdir":
            unflushed.add(str(Path(path).parent))
    published = [
        target for name, _, target in calls if name == "replace" and target.endswith("manifest.json")
    ]
    assert [Path(target).parent.name for target in published] == ["step-000000300"]
