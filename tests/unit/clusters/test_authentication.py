"""Who is let in, and what is refused before anything listens."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from lockstep.clusters import local_cluster, problems
from lockstep.clusters.authentication import (
    guard_rays_token,
    is_loopback,
    refuse_open,
    write_token,
)
from lockstep.clusters.connection import show_token
from tests.raised import raises


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_loopback_may_be_open(host: str) -> None:
    assert is_loopback(host)
    refuse_open(host, token=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "no.such.host.invalid"])
def test_anything_else_needs_the_token(host: str) -> None:
    with raises(problems.OPEN):
        refuse_open(host, token=False)
    refuse_open(host, token=True)


def test_a_cluster_that_would_be_open_is_not_started(home: Path) -> None:
    with raises(problems.OPEN):
        local_cluster.up(1, 1, host="0.0.0.0", port=0, token=False)
    assert not (home / "state").exists()


def test_a_token_is_its_owners_alone_even_under_a_loose_umask(home: Path) -> None:
    before = os.umask(0)
    try:
        write_token(home / "a" / "token")
    finally:
        os.umask(before)
    assert stat.S_IMODE((home / "a" / "token").stat().st_mode) == 0o600
    assert stat.S_IMODE((home / "a").stat().st_mode) == 0o700
    first = (home / "a" / "token").read_text()
    write_token(home / "a" / "token")
    assert (home / "a" / "token").read_text() != first


def test_a_token_that_cannot_be_written_is_one_line(home: Path) -> None:
    (home / "file").touch()
    with raises(problems.SECRET_UNWRITABLE, what="token") as caught:
        write_token(home / "file" / "token")
    assert "\n" not in str(caught.value)


def test_rays_own_token_file_is_closed_to_others(home: Path) -> None:
    """Ray leaves it readable to all."""
    file = home / ".ray" / "auth_token"
    guard_rays_token()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    token = file.read_text()
    file.chmod(0o644)
    guard_rays_token()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text() == token


def test_rays_token_is_shown_to_a_cluster_that_is_named_and_nothing_that_is_set_is_changed(
    home: Path,
) -> None:
    guard_rays_token()
    environment: dict[str, str] = {}
    show_token("http://10.1.2.3:8265", environment)
    assert environment == {"RAY_AUTH_MODE": "token"}
    environment = {}
    show_token("local", environment)
    assert environment == {}
    environment = {"RAY_AUTH_MODE": "disabled"}
    show_token("http://10.1.2.3:8265", environment)
    assert environment == {"RAY_AUTH_MODE": "disabled"}


def test_a_state_file_that_is_damaged_is_one_line(home: Path) -> None:
    folder = home / "state" / "lockstep"
    folder.mkdir(parents=True)
    (folder / "cluster.json").write_text('{"pid": 1')
    with raises(problems.STATE_UNREADABLE):
        local_cluster.recorded_cluster()


def test_another_process_with_the_pid_of_the_cluster_is_not_it() -> None:
    """Process ids are used again: the start time tells them apart."""
    started = local_cluster.started_at(os.getpid())
    ours = local_cluster.LocalCluster("m", os.getpid(), started, "", "h:1", "http://h:2", 1, 1, None)
    assert ours.running()
    later = local_cluster.LocalCluster("m", os.getpid(), started + 60, "", "h:1", "http://h:2", 1, 1, None)
    assert not later.running()


def test_a_cluster_still_runs_when_the_clock_of_its_machine_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel counts a process's start from its boot, and the time of that with the clock: `up` would have ended a cluster that runs."""
    started = local_cluster.started_at(os.getpid())
    of_system = Path("/proc/stat").read_text()
    (tmp_path / "stat").write_text(re.sub(r"(?m)^btime .*$", "btime 1000000", of_system))
    (tmp_path / str(os.getpid())).symlink_to(f"/proc/{os.getpid()}")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    assert psutil.Process().create_time() < 1e9  # as after a step of the clock
    assert local_cluster.LocalCluster(
        "m", os.getpid(), started, "", "h:1", "http://h:2", 1, 1, None
    ).running()
