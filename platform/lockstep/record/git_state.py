"""The state of the source as git has it: the commit, and what was changed since. A fact to record."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from lockstep.files import as_text

_GIT_S = 5.0
_LONGEST_DIFF = 2_000_000


def git_state(folder: Path | str) -> dict[str, Any]:
    """`commit`, `dirty` and, where dirty, the `diff` and the `untracked` names of the repository around `folder`.

    Empty without git, a repository or a commit, or if one of git's answers takes longer than five seconds. Never raises.
    """
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    changes = _git(folder, "status", "--porcelain", "-z")
    if commit is None or changes is None:
        return {}
    state: dict[str, Any] = {"commit": commit.strip(), "dirty": bool(changes)}
    if changes:
        state["diff"] = _bounded(
            _git(folder, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD") or ""
        )
        state["untracked"] = [entry[3:] for entry in changes.split("\0") if entry.startswith("??")]
    return state


def _git(folder: Path | str, *arguments: str) -> str | None:
    variables = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    command = ["git", "-C", str(folder), "-c", "core.fsmonitor=false", *arguments]
    # Use a file: after a timeout, a pipe would be waited on for as long as any process that git started holds it.
    with tempfile.TemporaryFile() as output:
        try:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.DEVNULL,
                timeout=_GIT_S,
                env=variables,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None  # no git, no repository, no commit or too slow: a run does without
        output.seek(0)
        return as_text(output.read())


def _bounded(diff: str) -> str:
    if len(diff) <= _LONGEST_DIFF:
        return diff
    return f"{diff[:_LONGEST_DIFF]}\n… cut here by lockstep: {_LONGEST_DIFF} of {len(diff)} characters\n"
