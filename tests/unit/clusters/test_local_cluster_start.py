"""`cluster up` that is ended while the nodes start: nothing is left that `cluster down` does not know."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.clusters import problems
from lockstep.clusters.local_cluster import LocalCluster, down, marked, recorded_cluster, running_cluster, up
from tests.raised import raises

UP = """
import sys
from lockstep.cli.entry import run
from lockstep.clusters import local_cluster  # a signal in the middle of an import ends the command at once
sys.executable = sys.argv[1]
sys.argv = ["lockstep", "cluster", "up", "--nodes", "1", "--cpus", "1", "--port", "0"]
run()
"""


@pytest.fixture
def starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """`lockstep cluster up` in a process of its own. The holder, here a shell, never has its nodes ready."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    holder = tmp_path / "holder"
    holder.write_text("#!/bin/sh\nsleep 3600 & wait\n")
    holder.chmod(0o700)
    paths = os.pathsep.join(filter(None, sys.path))
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-c", UP, str(holder)],
            env={**os.environ, "PYTHONPATH": paths, "TMPDIR": str(tmp_path)},
            stderr=said,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        down()


def remembered(process: subprocess.Popen[bytes]) -> LocalCluster:
    """The cluster that a process is starting, once its holder has a child."""
    until = time.monotonic() + 120
    while (found := recorded_cluster()) is None or len(marked(found.mark)) < 2:
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    return found


def assert_gone(cluster: LocalCluster, folder: Path) -> None:
    assert marked(cluster.mark) == []
    assert recorded_cluster() is None
    assert list((folder / "state" / "lockstep").iterdir()) == []
    assert list(folder.glob("lockstep-*")) == []


@pytest.mark.every(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_nodes_start_leaves_nothing(
    starting: subprocess.Popen[bytes], number: signal.Signals, tmp_path: Path
) -> None:
    cluster = remembered(starting)
    starting.send_signal(number)
    assert starting.wait(120) == 128 + number
    assert (tmp_path / "said").read_text() == "lockstep: ended at once by a signal\n"
    assert_gone(cluster, tmp_path)


def test_what_a_killed_start_leaves_is_known_and_taken_down(
    starting: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """Until then it is no cluster to submit to, and no second one is started beside it."""
    cluster = remembered(starting)
    starting.kill()
    starting.wait()
    assert cluster.running()
    assert running_cluster() is None
    with raises(problems.CLUSTER_RUNS, got="is already being started"):
        up(1, 1, host="127.0.0.1", port=0, token=True)
    assert down() == cluster
    assert_gone(cluster, tmp_path)
