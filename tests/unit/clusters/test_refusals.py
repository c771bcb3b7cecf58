"""What is wrong with a cluster, and the way to it, is told as the problem that it is."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.clusters import connection, core_watch, local_cluster, node_departure, problems, reachability
from lockstep.clusters.core_watch import Part
from tests.raised import raises


def test_a_program_that_is_no_head_node_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "HEALTH_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with raises(problems.NO_HEAD_NODE, got=address):
            reachability.check_answers(address)


def test_a_cluster_that_refuses_or_lets_nobody_in_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray.init` has its own words for a refusal; where it only waits, the wait has a limit."""
    monkeypatch.setattr(connection, "JOIN_S", 0.3)
    monkeypatch.setattr(connection._Joining, "_join", lambda self: None)
    with raises(problems.NOT_LET_IN, address="head:6379"):
        connection._Joining("head:6379", {}).wait(None, lambda line: None)

    def refused(self: Any) -> None:
        self._error = RuntimeError("Version mismatch\nmore")
        self._over.set()

    monkeypatch.setattr(connection._Joining, "_join", refused)
    with raises(problems.NOT_CONNECTED, address="head:6379", got="RuntimeError: Version mismatch"):
        connection._Joining("head:6379", {}).wait(None, lambda line: None)


def test_how_a_process_of_the_cluster_has_ended_is_told() -> None:
    """A signal, an exit code, or silence."""
    for words, how in (
        ("import os; os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
        ("raise SystemExit(3)", "has ended (exit code 3)"),
    ):
        process = subprocess.Popen([sys.executable, "-c", words])
        while core_watch._how(process.pid) == "has ended":
            time.sleep(0.01)
        error, _ = core_watch._ended(Part("raylet", process.pid, "/logs"))
        process.wait()
        assert (error.code, error.facts["got"].partition(";")[0]) == (problems.CORE_GONE.code, how)
    silent = core_watch._silent("gcs_server", "head:6379", "does not answer")
    assert (silent.code, silent.facts["address"]) == (problems.CORE_SILENT.code, "head:6379")


def test_nodes_that_do_not_start_are_told_with_their_last_line(tmp_path: Path) -> None:
    (tmp_path / "holder.log").write_text("first\nno such port\n")
    ended = SimpleNamespace(poll=lambda: 1)
    cluster = local_cluster.LocalCluster("m", 1, 1.0, str(tmp_path), "", "", 1, 1, None)
    with raises(problems.NOT_STARTED, got="no such port"):
        local_cluster._when_ready(ended, cluster)  # type: ignore[arg-type]


def test_a_ray_that_cannot_drain_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_departure, "unavailable", lambda part: "no drain_node")
    with raises(problems.CANNOT_DRAIN, got="no drain_node"):
        node_departure.leave(None, None, "it goes", None, lambda line: None, wait=False)
