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

from lockstep import running_time
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


@pytest.mark.parametrize("silent", ["raylet", "gcs_server"])
def test_a_part_of_the_cluster_is_lost_after_its_silence_and_not_after_a_stop(
    silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command is stopped for longer than the limit while it asks: the part answers again, and then no more."""
    monkeypatch.setattr(running_time, "MOST_S", 0.02)
    wall_s, stopped_s, asked = time.monotonic, 0.0, list[str]()
    monkeypatch.setattr(running_time.time, "monotonic", lambda: wall_s() + stopped_s)
    for name, seconds in {"ASK_S": 0.01, "LOOK_S": 0.01, "GCS_SILENT_S": 0.1, "RAYLET_SILENT_S": 0.1}.items():
        monkeypatch.setattr(core_watch, name, seconds)

    def answers(part: str) -> bool:
        nonlocal stopped_s
        if part != silent:
            return True
        asked.append(part)
        if len(asked) == 2:
            stopped_s = 60.0
        return len(asked) in (1, 3)

    def check(address: str, look: Any) -> None:
        if not answers("gcs_server"):
            raise problems.NO_ANSWER(got=address, why="it is silent")

    monkeypatch.setattr(core_watch, "reached", lambda host, port: answers("raylet"))
    monkeypatch.setattr(core_watch, "check_answers", check)
    lost = list[Any]()
    watch = core_watch.CoreWatch(SimpleNamespace(), tmp_path)  # type: ignore[arg-type]
    monkeypatch.setattr(watch, "_lose", lambda error, *_: lost.append(error))
    watch._watch_joined("head:6379", ("head", 7000))
    assert len(asked) > 4
    (error,) = lost
    assert (error.code, error.facts["part"]) == (problems.CORE_SILENT.code, core_watch.PARTS[silent])


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
