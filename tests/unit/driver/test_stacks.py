"""The file for a worker's stacks: in a folder of the user's own, never through a link, and gone with its process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest

from lockstep.driver import stacks
from lockstep.driver.stacks import stacks_in
from lockstep.files import own_folder


def test_files_of_processes_that_were_killed_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks.tempfile, "gettempdir", lambda: str(tmp_path))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    folder = own_folder(tmp_path)
    for pid in (gone.pid, os.getppid(), os.getpid()):
        (folder / f"stacks-{pid}.txt").write_text("")
    assert stacks._stacks_file() == folder / f"stacks-{os.getpid()}.txt"
    assert [path.name for path in folder.iterdir()] == [f"stacks-{os.getppid()}.txt"]


def test_a_link_that_another_user_has_laid_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks.tempfile, "gettempdir", lambda: str(tmp_path))
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    Path(tmp_path, f"lockstep-{os.getuid()}").symlink_to(theirs)
    assert stacks._stacks_file().parent == own_folder(tmp_path)
    assert list(theirs.iterdir()) == []


def test_stacks_are_waited_for_until_they_no_longer_grow(tmp_path: Path) -> None:
    """A busy machine takes its time; a process that writes none is not waited for without end."""
    slow, silent = tmp_path / "slow", tmp_path / "silent"

    def write() -> None:
        for text in ("Thread 1 ", "(most recent call first)"):
            time.sleep(0.7)
            with slow.open("a") as stream:
                stream.write(text)

    writing = threading.Thread(target=write)
    writing.start()
    stacks.await_stacks([slow])
    assert stacks_in(slow) == "Thread 1 (most recent call first)"
    writing.join()
    with mock.patch.object(stacks, "STACKS_S", 1.0):
        stacks.await_stacks([slow, silent])
    assert stacks_in(silent) == "it wrote no stacks: stopped, or deaf to signals"
