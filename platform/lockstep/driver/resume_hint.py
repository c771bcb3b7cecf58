"""How a run or a sweep that was stopped is gone on with, in the words that a shell or Python takes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from lockstep.record.redaction import without_uri_secrets
from lockstep.spec.fields import Checkpoint
from lockstep.spec.locations import RECORD_OFF, absolute, unchecked_uri


def resume_command(run_id: str, uri: str, folder: str) -> str:
    """The command for a run or a sweep that is recorded at `uri`, and in `folder`: it names what it would not find by itself.

    Passwords in the URI are hidden, here and below: what a command prints is kept in logs, and a notebook in its file.
    """
    import yaml

    words = ["lockstep", "resume", run_id]
    if uri != unchecked_uri(None):
        words += ["--uri", without_uri_secrets(uri)]
    if (runs_folder := _folder_to_name(uri, folder)) is not None:
        words.append(
            f"record.folder={runs_folder if yaml.safe_load(runs_folder) == runs_folder else json.dumps(runs_folder)}"
        )
    return shlex.join(words)


def resume_call(run_id: str, uri: str, folder: str) -> str:
    """The same as a call, for a notebook."""
    runs_folder = _folder_to_name(uri, folder)
    overrides = "" if runs_folder is None else f"[{f'record.folder={runs_folder}'!r}], "
    return f"lockstep.resume({run_id!r}, {overrides}uri={without_uri_secrets(uri)!r})"


def look_at(url: str, uri: str) -> str:
    """Where a run or a sweep is looked at: at its own page, or with a command."""
    return url or shlex.join(["lockstep", "ui", "--uri", without_uri_secrets(uri)])


def _folder_to_name(uri: str, folder: str) -> str | None:
    """The folder of runs that a command must name to find a run that is recorded in its folder alone; None if it is the default one."""
    runs_folder = str(Path(folder).parent)
    return runs_folder if uri == RECORD_OFF and runs_folder != absolute(Checkpoint().storage) else None
