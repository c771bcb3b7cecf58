"""A guardian that ends before its time is told to whoever watches the run, which goes on."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from lockstep.driver.guardian import Guardian


def ended_before_its_time(guardian: Guardian, lines: list[str]) -> None:
    until = time.monotonic() + 30
    while not lines:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert lines == [f"warning: {text}" for text in guardian.warnings]


def test_a_guardian_that_ends_before_its_time_is_told(tmp_path: Path) -> None:
    lines = list[str]()
    with Guardian({}, tmp_path, say=lines.append) as guardian:
        assert guardian._process is not None
        guardian._process.kill()
        ended_before_its_time(guardian, lines)
    assert lines == [
        "warning: the process that guards this run was killed by signal 9: if this one is killed or hangs, nobody records that it ended"
    ]


def test_a_guardian_that_cannot_start_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = list[str]()
    monkeypatch.setattr(
        "lockstep.driver.guardian.library_words", lambda *_: [sys.executable, "-c", "raise SystemExit(1)"]
    )
    with Guardian({}, tmp_path, say=lines.append) as guardian:
        ended_before_its_time(guardian, lines)
    assert "this run ended with exit code 1:" in lines[0]


def test_nothing_is_said_of_a_guardian_that_is_released(tmp_path: Path) -> None:
    lines = list[str]()
    with Guardian({}, tmp_path, say=lines.append) as guardian:
        pass
    assert (lines, guardian.warnings) == ([], [])
