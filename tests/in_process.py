"""The command in the tests' own process, where it is not the process that is tested: starting one costs seconds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lockstep.cli.main import app


def here(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], folder: Path, *words: str
) -> tuple[int, str, str]:
    """A command that trains nothing, called in `folder`: its exit code, and what it prints."""
    with monkeypatch.context() as patched:
        patched.chdir(folder)
        patched.setattr(sys, "path", list(sys.path))
        capfd.readouterr()
        code = app(list(words), standalone_mode=False) or 0
        return (code, *capfd.readouterr())
