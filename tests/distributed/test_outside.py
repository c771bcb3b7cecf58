"""G1: what a job takes from its process and machine and no spec names is refused, in the identity, or told by name where it changed; nothing else is."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.run_folder import AttemptOrigin
from lockstep.errors import LockstepError
from tests.distributed.outside_kinds import HONEST, KINDS, Kind, source, undo
from tests.distributed.test_resume import taken_up
from tests.distributed.training import Document, Trained, train_attempt
from tests.unit.test_source import forget

RUN = "run"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for folder in ("project", "elsewhere", "site-packages"):
        (tmp_path / folder).mkdir()
    folders = [str(tmp_path / name) for name in ("project", "elsewhere", "site-packages")]
    monkeypatch.setattr(sys, "path", [*folders, *sys.path])
    yield tmp_path
    undo()
    forget(tmp_path)


def document(project: Path, **data: Any) -> Document:
    return {
        "job": {"use": "job_of_outside:Mine"},
        "batch": {"global": 4, "micro": 2},
        "data": {"shuffle": "none", **data},
        "length": {"steps": 4},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "rehearsal": "off",
        "checkpoint": {"storage": str(project / "runs"), "every": {"steps": 1}},
    }


def attempt(project: Path, stop_after: int | None, **data: Any) -> Trained:
    """As in another process: the first attempt, or the next one from the newest checkpoint."""
    forget(project)
    origin = taken_up(str(project / "runs"), None) if (project / "runs").exists() else AttemptOrigin()
    return train_attempt(document(project, **data), RUN, origin, stop_after)


def taken() -> list[Any]:
    module: Any = sys.modules["job_of_outside"]
    return list(module.TAKEN)


def begin(project: Path, kind: Kind, patch: pytest.MonkeyPatch) -> None:
    (project / "project" / "job_of_outside.py").write_text(source(kind.code, kind.where))
    kind.before(project, patch)


def resume_lines(trained: Trained) -> list[str]:
    return [line for line in trained.warnings if "resume:" in line]


pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.mark.parametrize("name", KINDS)
def test_what_changed_is_seen(project: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = KINDS[name]
    begin(project, kind, monkeypatch)
    attempt(project, 2)
    before = taken()
    kind.change(project, monkeypatch)
    try:
        lines = attempt(project, None).warnings
    except LockstepError as error:
        lines = (str(error),)
    assert taken()[-1] != before[-1], "the change changes nothing"
    assert [line for line in lines if re.search(kind.told, line)], lines


@pytest.mark.parametrize("name", HONEST)
def test_what_matters_not_is_silent(project: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = HONEST[name]
    begin(project, kind, monkeypatch)
    first = attempt(project, 2)
    kind.change(project, monkeypatch)
    rest = attempt(project, None)
    assert [*first.warnings, *rest.warnings] == []
    assert rest.identity == first.identity
