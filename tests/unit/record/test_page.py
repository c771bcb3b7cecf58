"""The page of a run, as several threads of its recorder write it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep import files
from lockstep.record import figures
from lockstep.record.events import Failed
from lockstep.record.folder_store import FolderStore
from lockstep.record.journal import Journal
from lockstep.record.page import Page
from lockstep.spec.fields import Spec
from tests.unit.record.rows import step_row
from tests.without_figures import DRAW


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

    monkeypatch.setattr("lockstep.record.texts.append", slow)
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


def test_runs_that_end_together_in_one_process_draw_one_after_another(
    spec: Callable[..., Spec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holds all of its rows while it draws, and the trials of a sweep end by hundreds; all have their figures."""
    at_once: list[int] = []
    drawing = 0

    def watched(*given: Any, **named: Any) -> list[Path]:
        nonlocal drawing
        drawing += 1
        at_once.append(drawing)
        time.sleep(0.05)
        try:
            return DRAW(*given, **named)
        finally:
            drawing -= 1

    monkeypatch.setattr(figures, "draw", watched)
    runs = [tmp_path / str(number) for number in range(4)]

    def end(folder: Path) -> None:
        folder.mkdir()
        with contextlib.closing(Journal(folder)) as journal:
            journal.add([step_row(step) for step in range(1, 9)])
            page = Page(spec(), folder, journal, FolderStore(folder, ""), lambda *_, **__: None)
            page.take(Failed("its job is wrong"))

    threads = [threading.Thread(target=end, args=(folder,)) for folder in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert at_once == [1, 1, 1, 1]
    assert all(list(folder.glob("figures/*.png")) for folder in runs)
