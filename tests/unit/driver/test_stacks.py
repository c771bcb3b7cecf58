"""The file for a worker's stacks: in a folder of the user's own, never through a link, and gone with its process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


WRITES_SLOWLY = """
import pathlib, signal, sys, time
stream = pathlib.Path(sys.argv[1], f"stacks-{__import__('os').getpid()}.txt").open("w", buffering=1)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # as a handler of it does
print("ready", flush=True)
stream.write("Thread 1\\n")
time.sleep(3)
stream.write("(most recent call first)\\n")
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
sys.stdin.read()
"""


def test_stacks_are_waited_for_until_they_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine takes its time; a process that writes none is not waited for without end."""
    command = [sys.executable, "-c", WRITES_SLOWLY, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        slow, silent = tmp_path / f"stacks-{process.pid}.txt", tmp_path / "stacks-silent.txt"
        monkeypatch.setattr(stacks, "STACKS_S", 60.0)
        stacks.await_stacks([slow])
        assert stacks_in(slow) == "Thread 1\n(most recent call first)\n"
        monkeypatch.setattr(stacks, "STACKS_S", 1.0)
        stacks.await_stacks([slow, silent])
        process.communicate()
    assert stacks_in(silent) == "it wrote no stacks: stopped, or deaf to signals"
