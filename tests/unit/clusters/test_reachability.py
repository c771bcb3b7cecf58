"""Which cluster a command joins: one that is named, and nothing else that runs on the machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.calls.train import train
from lockstep.clusters import local_cluster, problems
from lockstep.clusters.connection import _may_be_one
from lockstep.clusters.reachability import check_answers, cluster_address, host_and_port
from tests.raised import raises


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which a stranger's cluster runs, as `ray start` notes it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:7777\n")
    return tmp_path


def test_a_strangers_cluster_is_joined_only_where_it_is_asked_for(machine: Path) -> None:
    assert cluster_address(None) == "local"
    assert cluster_address("auto") == "127.0.0.1:7777"
    assert cluster_address("10.0.0.5:6379") == "10.0.0.5:6379"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere Ray does not read TMPDIR")
def test_auto_finds_what_ray_start_noted_below_tmpdir(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_TMPDIR")
    monkeypatch.setenv("TMPDIR", str(machine))
    assert cluster_address("auto") == "127.0.0.1:7777"


def test_the_environment_names_a_cluster_as_ray_does_in_a_job(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.6:6379")
    assert cluster_address(None) == "10.0.0.6:6379"
    assert cluster_address("auto") == "10.0.0.6:6379"
    assert cluster_address("local") == "local"
    monkeypatch.setenv("RAY_ADDRESS", "")
    assert cluster_address(None) == "local"


def test_ones_own_cluster_is_joined_while_it_runs(machine: Path) -> None:
    started = local_cluster.started_at(os.getpid())
    own = local_cluster.LocalCluster("m", os.getpid(), started, "", "127.0.0.1:6", "http://h:2", 1, 1, None)
    local_cluster.state_folder().mkdir(parents=True)
    local_cluster._remember(own)
    assert cluster_address(None) == "127.0.0.1:6"
    assert cluster_address("auto") == "127.0.0.1:6"
    ended = local_cluster.LocalCluster("m", os.getpid(), 1.0, "", "127.0.0.1:6", "http://h:2", 1, 1, None)
    local_cluster._remember(ended)
    assert cluster_address(None) == "local"


def test_auto_without_a_cluster_is_a_mistake(machine: Path) -> None:
    (machine / "ray" / "ray_current_cluster").unlink()
    with raises(problems.NO_CLUSTER_HERE):
        cluster_address("auto")


@pytest.mark.parametrize("address", ["somewhere", "host:", "host:port", "host:99999", ":6379"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with raises(problems.ADDRESS):
        check_answers(address)


def test_hosts_and_ports() -> None:
    assert host_and_port("10.0.0.5:6379") == ("10.0.0.5", 6379)
    assert host_and_port("ray://head:10001") == ("head", 10001)
    assert host_and_port("[::1]:6379") == ("::1", 6379)


def test_a_name_that_is_not_known_is_one_line() -> None:
    with raises(problems.NO_ANSWER, got="no-such-host.invalid:6379"):
        check_answers("no-such-host.invalid:6379")


STUCK = """
import ctypes, sys
from lockstep.driver import signals
from lockstep.driver.signals import StopSignal, end_on_second_signal
signals.GRACE_S = 0.5
if len(sys.argv) > 1: end_on_second_signal()
with StopSignal():
    mutex = ctypes.create_string_buffer(64)
    library = ctypes.CDLL(None)
    library.pthread_mutex_lock(mutex)
    print("stuck", flush=True)
    library.pthread_mutex_lock(mutex)
"""


@pytest.mark.every(2)
@pytest.mark.parametrize("watched", [True, False])
def test_a_second_signal_ends_a_command_whose_main_thread_is_stuck_outside_python(watched: bool) -> None:
    """Without the thread that counts signals the process would stay for ever: the negative control."""
    words = ["watched"] if watched else []
    process = subprocess.Popen([sys.executable, "-c", STUCK, *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "stuck\n"
    for number in (signal.SIGINT, signal.SIGTERM):
        assert process.poll() is None
        process.send_signal(number)
        time.sleep(0.3)
    if watched:
        assert process.wait(10) == 128 + signal.SIGTERM
    else:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3)
        process.kill()
        process.wait()
    process.stdout.close()


def test_a_rank_of_torchrun_is_told_to_train_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank would begin a run of its own, whose workers wait for ever for the store of torchrun's agent."""
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with raises(problems.UNDER_TORCHRUN, rank=1, ranks=2):
        train("jobs/digits/train.yaml", ["record.uri=off"])


def test_one_machine_may_have_several_names() -> None:
    """A cluster that was joined by its address may be named by its host's name."""
    assert _may_be_one("localhost", "127.0.0.1")
    assert _may_be_one("head.invalid", "192.0.2.7")  # not known here, so nothing is said of it
    assert not _may_be_one("192.0.2.7", "192.0.2.8")
