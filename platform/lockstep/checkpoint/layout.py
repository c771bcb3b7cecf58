"""Names of folders and files in the store: the one place where they are made and read.

    <storage>/<run_id>/owner.json                                the run it belongs to
    <storage>/<run_id>/attempt.json                              the attempt that may publish and delete
    <storage>/<run_id>/pins/step-000000200.asked                 a checkpoint that stays
    <storage>/<run_id>/attempt-0003/                             where that attempt writes aside (on a disk)
    <storage>/<run_id>/step-000000200/manifest.json              what makes the checkpoint exist
    <storage>/<run_id>/step-000000200/model.a0003.r0000.safetensors

Every file but the manifest bears the attempt and the rank that wrote it, so that no two writers share a name.
"""

from __future__ import annotations

import re
from typing import NamedTuple

OWNER = "owner.json"
ATTEMPT = "attempt.json"
MANIFEST = "manifest.json"
PINS = "pins"
RECEIPT = "receipt"

KINDS = {"tensors": "safetensors", "tree": "json", "bytes": "bin", RECEIPT: "part"}
"""Kinds of files and the endings of their names. A receipt tells that a rank has written its part."""

_STEP = re.compile(r"step-(\d{9,})")
_STAGING = re.compile(r"attempt-(\d{4,})")
_FILE = re.compile(r"([a-z][a-z0-9_]*)\.a(\d{4,})\.r(\d{4,})\.([a-z]+)")
_SECTION = re.compile(r"[a-z][a-z0-9_]*")
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class FileName(NamedTuple):
    """What the name of a file tells."""

    section: str
    attempt: int
    rank: int
    kind: str

    def __str__(self) -> str:
        return f"{self.section}.a{self.attempt:04d}.r{self.rank:04d}.{KINDS[self.kind]}"


def file_name(name: str) -> FileName | None:
    """The parts of a name that this module made; None for any other."""
    found = _FILE.fullmatch(name)
    kind = next((kind for kind, ending in KINDS.items() if found and ending == found[4]), None)
    return FileName(found[1], int(found[2]), int(found[3]), kind) if found and kind else None


def step_folder(step: int) -> str:
    return f"step-{step:09d}"


def step_of(folder: str) -> int | None:
    """The step of a folder's name; None for any other folder."""
    found = _STEP.fullmatch(folder)
    return int(found[1]) if found and folder == step_folder(int(found[1])) else None


def staging_folder(attempt: int) -> str:
    return f"attempt-{attempt:04d}"


def attempt_of(folder: str) -> int | None:
    """The attempt of a staging folder's name; None for any other folder."""
    found = _STAGING.fullmatch(folder)
    return int(found[1]) if found else None


def is_section(name: str) -> bool:
    """Whether a section may have this name."""
    return _SECTION.fullmatch(name) is not None and name != RECEIPT


def is_run_id(name: str) -> bool:
    """Whether a run's folder may have this name: one plain word, nothing that leads elsewhere."""
    return _RUN_ID.fullmatch(name) is not None
