"""Each call of the file system and of the store fails, once or for good: no record lies, and a resume makes it whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.record.mirror.projection import Projection
from lockstep.record.writer import Writer
from lockstep.spec.fields import Spec
from tests.unit.record.failed_at_every_call import Case, cases, lies, quick

COVER = 20


@pytest.fixture(autouse=True)
def fast() -> Iterator[None]:
    with quick():
        yield


def found(storage: Path, spec: Spec, chosen: list[Case]) -> dict[Case, list[str]]:
    return {case: wrong for case in chosen if (wrong := lies(storage, spec, case))}


@pytest.mark.scenario
def test_some_faults_leave_no_lie(spec: Callable[..., Spec], tmp_path: Path) -> None:
    """Twenty, as a seed has chosen them."""
    whole = cases(tmp_path / "runs", spec())
    assert len(whole) >= 2000
    assert found(tmp_path / "runs", spec(), whole[:COVER]) == {}


def test_a_writer_that_drops_what_the_disk_refused_and_looks_for_no_holes_lies(
    spec: Callable[..., Spec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the search finds a record that drops rows on a full disk."""

    def dropped(self: Writer, error: Exception) -> None:
        self._unwritten = []

    monkeypatch.setattr(Writer, "_not_written", dropped)
    monkeypatch.setattr(Projection, "_missing", lambda self, last: "")
    chosen = [
        Case("journal", "new", at, "ENOSPC", False) for at in range(4)
    ]  # the last one has the run's end
    assert found(tmp_path / "runs", spec(), chosen)


@pytest.mark.exact
def test_no_fault_leaves_a_lie(spec: Callable[..., Spec], tmp_path: Path) -> None:
    """All of them: some twenty minutes."""
    whole = cases(tmp_path / "runs", spec())
    wrong: dict[Case, Any] = found(tmp_path / "runs", spec(), whole)
    print(f"{len(whole)} cases, {len(wrong)} lies")
    assert len(whole) >= 2000
    assert wrong == {}
