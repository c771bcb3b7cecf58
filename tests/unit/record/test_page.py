"""The page of a run, as several threads of its recorder write it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep import files
from lockstep.record.folder_store import FolderStore
from lockstep.record.journal import Journal
from lockstep.record.page import Page
from lockstep.spec.fields import Spec


def test_a_line_that_two_threads_log_at_once_is_in_the_log_once(
    spec: Callable[..., Spec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer's thread, the lane of files and the thread of copies log."""
    began, other_is_done = threading.Event(), threading.Event()

    def slow(path: Path, text: str) -> int:
        size = files.append(path, text)
        if not began.is_set():
            began.set()
            other_is_done.wait(0.1)
        return size

    monkeypatch.setattr("lockstep.record.page.append", slow)
    journal = Journal(tmp_path)
    page = Page(spec(), tmp_path, journal, FolderStore(tmp_path, ""), lambda *_, **__: None)
    first = threading.Thread(target=page.log, args=("one",))
    first.start()
    began.wait()
    page.log("two")
    other_is_done.set()
    first.join()
    journal.close()
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split()[-1] for line in lines] == ["one", "two"]
