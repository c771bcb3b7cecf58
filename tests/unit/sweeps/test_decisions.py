"""The decisions of a sweep outlive a disk that is full for a while: each is there once, in order, and whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from lockstep.attempts.storage_retries import PAUSES_S
from lockstep.sweeps import problems
from lockstep.sweeps.decisions import NAME, Decisions
from tests.raised import raises


class FullDisk:
    """`os.write` to the decisions fails so many times, as on a disk without room; every other time a part is left behind first."""

    def __init__(self) -> None:
        self.left = 0
        self._write = os.write

    def __call__(self, descriptor: int, data: Any) -> int:
        if self.left and Path(f"/proc/self/fd/{descriptor}").readlink().name == NAME:
            self.left -= 1
            if self.left % 2:
                return self._write(descriptor, bytes(data)[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._write(descriptor, data)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    disk = FullDisk()
    monkeypatch.setattr(os, "write", disk)
    return disk


def test_a_full_disk_is_waited_for_and_leaves_no_half_line(tmp_path: Path, disk: FullDisk) -> None:
    waited, told = list[float](), list[str]()
    decisions = Decisions(tmp_path, waited.append, told.append)
    decisions.begin(0, {"optimizer.lr": 0.1})
    disk.left = 4  # half of the line, and no more; and once more
    decisions.hear(0, 8, 0.5, "asha")
    decisions.end(0, "pruned", 8, 0.5, "asha")
    assert waited == [1.0, 2.0]
    assert told[0] == "OSError: [Errno 28] No space left on device; tried again in 1 s"
    again = Decisions(tmp_path)
    assert again.events == [
        {"trial": 0, "fields": {"optimizer.lr": 0.1}},
        {"trial": 0, "heard": 8, "metric": 0.5, "stop": 8, "reason": "asha"},
        {"trial": 0, "status": "pruned", "step": 8, "metric": 0.5, "reason": "asha"},
    ]
    assert again.stopped(0, 8) == "asha"


def test_a_disk_that_stays_full_is_raised_and_what_was_decided_can_be_read(
    tmp_path: Path, disk: FullDisk
) -> None:
    waited = list[float]()
    decisions = Decisions(tmp_path, waited.append)
    decisions.begin(0, {"optimizer.lr": 0.1})
    disk.left = 10_000
    with pytest.raises(OSError, match="No space left"):
        decisions.hear(0, 8, 0.5, "asha")
    assert tuple(waited) == PAUSES_S
    disk.left = 0
    assert Decisions(tmp_path).began == {0: {"optimizer.lr": 0.1}}


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    """What a loss of power has left at the end is dropped, as half a line is: only results that nothing depends on are not safe."""
    decisions = Decisions(tmp_path)
    decisions.begin(0, {"optimizer.lr": 0.1})
    whole = (tmp_path / NAME).read_bytes()
    decisions.hear(0, 8, 0.5)
    for torn in (
        b"\0" * 40,
        b"\0" * 40 + b"\n",
        b'{"trial": 0, "hea\0\0\n{"trial": 0, "heard": 9, "metric": 0.5}\n',
    ):
        (tmp_path / NAME).write_bytes(whole + torn)
        assert Decisions(tmp_path).events == [{"trial": 0, "fields": {"optimizer.lr": 0.1}}]
        assert (tmp_path / NAME).read_bytes() == whole
    for damaged in (b"{}\n", b'{"trial": 0, "fie\xe9lds": 1}\n', b"[1]\n"):
        (tmp_path / NAME).write_bytes(damaged + whole)
        with raises(problems.DECISION_DAMAGED, line=1, file=tmp_path / NAME):
            Decisions(tmp_path)
        assert (tmp_path / NAME).read_bytes() == damaged + whole
