from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from lockstep.record.git_state import git_state


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet")
    (folder / "job.py").write_text("width = 64\n")
    git(folder, "add", ".")
    git(folder, "-c", "user.name=n", "-c", "user.email=e@x", "commit", "--quiet", "-m", "first")
    return folder


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_a_clean_repository_has_a_commit_and_no_diff(repository: Path) -> None:
    assert git_state(repository) == {"commit": git(repository, "rev-parse", "HEAD"), "dirty": False}


def test_a_dirty_repository_has_its_diff_and_the_names_of_what_is_new(repository: Path) -> None:
    (repository / "job.py").write_text("width = 128\n")
    (repository / "new file.py").write_text("")
    state = git_state(repository)
    assert state["dirty"] is True
    assert "-width = 64\n+width = 128\n" in state["diff"]
    assert state["untracked"] == ["new file.py"]


def test_no_repository_no_git_and_no_commit_are_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(tmp_path) == {}
    assert git_state(tmp_path / "nowhere") == {}
    git(tmp_path, "init", "--quiet")
    assert git_state(tmp_path) == {}
    monkeypatch.setenv("PATH", os.devnull)
    assert git_state(tmp_path) == {}


def test_a_git_that_hangs_is_given_up(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text("#!/bin/sh\nsleep 20 &\nsleep 20\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("lockstep.record.git_state._GIT_S", 0.2)
    began = time.monotonic()
    assert git_state(repository) == {}
    assert time.monotonic() - began < 10
