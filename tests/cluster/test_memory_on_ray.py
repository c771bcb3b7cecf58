"""Workers on Ray whose memory runs out: what they held is in the record, and the error names it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.training.worker_environment import WORKER_ENVIRONMENT
from tests.memory_jobs import control_group, enter

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.scenario


@pytest.fixture
def short() -> Iterator[str]:
    """A folder for Ray, whose paths of sockets must stay short."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        yield folder


def trained(tmp_path: Path, short: str, group: Path | None, **environment: str) -> tuple[str, Path]:
    """The last line of a command with a cluster of its own, whose worker keeps 100 MB more in each step, and the run's folder."""
    spec = {
        "job": {"use": "tests.memory_jobs:Growing", "params": {"after": 3, "kept_mb": 100, "pause_s": 0.3}},
        "batch": {"global": 64, "micro": 16},
        "length": {"steps": 1000},
        "workers": {"max": 1},
        "faults": {"max_worker_failures": 0},
        "record": {"uri": "off"},
        "checkpoint": {"storage": f"{tmp_path}/runs"},
    }
    (tmp_path / "spec.yaml").write_text(json.dumps(spec))
    kept = {
        name: value for name, value in os.environ.items() if name not in {*WORKER_ENVIRONMENT, "RAY_ADDRESS"}
    }
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "train", f"{tmp_path}/spec.yaml", "--address", "local"],
        cwd=ROOT, env={**kept, "PYTHONPATH": f"{ROOT / 'platform'}:{ROOT}", "RAY_TMPDIR": short, **environment},
        preexec_fn=(lambda: enter(group)) if group is not None else None, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    (folder,) = (path.parent for path in tmp_path.glob("runs/*/spec.yaml"))
    return done.stderr.splitlines()[-1], folder


def check(line: str, folder: Path) -> None:
    assert "memory-attempt-1-rank-0.txt has the rest" in line, line
    snapshot = json.loads((folder / "memory-attempt-1-rank-0.json").read_text())
    assert snapshot["tensors"][0]["name"] == "the list '_kept' of an object of class 'Growing'"
    assert "rank 0 held" in (folder / "error.txt").read_text()


def test_a_worker_that_its_control_group_kills_has_told_what_it_held(tmp_path: Path, short: str) -> None:
    """The kernel kills the largest process, which is the worker. Ray knows only that it is gone."""
    with control_group(4 << 30) as group:
        line, folder = trained(tmp_path, short, group, RAY_memory_monitor_refresh_ms="0")
    assert "was lost" in line
    check(line, folder)


@pytest.mark.exact  # a minute and more
def test_a_worker_that_rays_memory_monitor_kills_has_told_what_it_held(tmp_path: Path, short: str) -> None:
    """The monitor's bound is set a little above what this machine uses now: it is near at once where the worker begins to grow."""
    import psutil

    memory = psutil.virtual_memory()
    share = (memory.total - memory.available + (6 << 30)) / memory.total
    line, folder = trained(tmp_path, short, None, RAY_memory_usage_threshold=f"{share:.3f}")
    assert "ran out of memory" in line
    check(line, folder)
