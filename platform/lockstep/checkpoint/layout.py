"""Names of folders and files in the store: the one place where they are made and read.

    <storage>/<run_id>/owner.json                                the run it belongs to
    <storage>/<run_id>/attempt.json                              the attempt that may publish and delete
    <storage>/<run_id>/attempts/0003.1f6c…                       the same in an object store: the highest number counts
    <storage>/<run_id>/holds/0003.json                           the command that holds the run
    <storage>/<run_id>/pins/step-000000200.asked                 a checkpoint that stays
    <storage>/<run_id>/attempt-0003/                             where that attempt writes aside (on a disk)
    <storage>/<run_id>/shared/…                                  files that several checkpoints name: the steps behind them
    <storage>/<run_id>/step-000000200/manifest.json              what makes the checkpoint exist
    <storage>/<run_id>/step-000000200/manifest.a0003.json        the same in an object store
    <storage>/<run_id>/step-000000200/model.a0003.r0000.safetensors

Every file of a step but the manifest has the attempt and the rank that wrote it in its name, so that no two writers share a name. In an
object store the manifest has its attempt too: a late put cannot overwrite a newer attempt's manifest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

OWNER = "owner.json"
ATTEMPT = "attempt.json"
MANIFEST = "manifest.json"
PINS = "pins"
CLAIMS = "attempts"
HOLDS = "holds"
SHARED = "shared"
RECEIPT = "receipt"

KINDS = {"tensors": "safetensors", "tree": "json", "bytes": "bin", RECEIPT: "part"}
"""Kinds of files and the endings of their names. A receipt says that a rank has written its part."""

_STEP = re.compile(r"step-(\d{9,})")
_STAGING = re.compile(r"attempt-(\d{4,})")
_MANIFEST = re.compile(r"manifest(?:\.a(\d{4,}))?\.json")
_CLAIM = re.compile(r"(\d{4,})\.([0-9a-f]+)")
_HOLD = re.compile(r"(\d{4,})\.json")
_FILE = re.compile(r"([a-z][a-z0-9_]*)\.a(\d{4,})\.r(\d{4,})\.([a-z]+)")
_SECTION = re.compile(r"[a-z][a-z0-9_]*")
_SHARED = re.compile(r"[0-9][0-9a-f.-]*\.rows")
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class FileName(NamedTuple):
    """The parts of a file's name."""

    section: str
    attempt: int
    rank: int
    kind: str

    def __str__(self) -> str:
        return f"{self.section}.a{self.attempt:04d}.r{self.rank:04d}.{KINDS[self.kind]}"


def file_name(name: str) -> FileName | None:
    """The parts of a name that this module made; None for any other."""
    match = _FILE.fullmatch(name)
    kind = next((kind for kind, ending in KINDS.items() if match and ending == match[4]), None)
    return FileName(match[1], int(match[2]), int(match[3]), kind) if match and kind else None


def step_folder(step: int) -> str:
    return f"step-{step:09d}"


def step_of(folder: str) -> int | None:
    """The step of a folder's name; None for any other folder."""
    match = _STEP.fullmatch(folder)
    return int(match[1]) if match and folder == step_folder(int(match[1])) else None


def staging_folder(attempt: int) -> str:
    return f"attempt-{attempt:04d}"


def attempt_of(folder: str) -> int | None:
    """The attempt of a staging folder's name; None for any other folder."""
    match = _STAGING.fullmatch(folder)
    return int(match[1]) if match else None


def manifest_of(attempt: int) -> str:
    """The name of an attempt's manifest in a store without rename, where older attempts could still publish."""
    return f"manifest.a{attempt:04d}.json"


def manifests(names: Iterable[str]) -> list[str]:
    """The names of manifests among `names`, that of the newest attempt first."""
    numbered = [(int(match[1] or 0), name) for name in names if (match := _MANIFEST.fullmatch(name))]
    return [name for _, name in sorted(numbered, reverse=True)]


def claim_name(attempt: int, token: str) -> str:
    return f"{attempt:04d}.{token}"


def claim_of(name: str) -> tuple[int, str] | None:
    """Attempt and token of a claim's name; None for any other name."""
    match = _CLAIM.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def hold_name(number: int) -> str:
    return f"{number:04d}.json"


def hold_of(name: str) -> int | None:
    """The number of a hold's name; None for any other name."""
    match = _HOLD.fullmatch(name)
    return int(match[1]) if match else None


def is_section(name: str) -> bool:
    """Whether a section may have this name."""
    return _SECTION.fullmatch(name) is not None and name != RECEIPT


def is_shared(name: str) -> bool:
    """Whether this can name a file that checkpoints share: it contains the hash of its content, so no two contents share a name."""
    return _SHARED.fullmatch(name) is not None


def is_run_id(name: str) -> bool:
    """Whether a run's folder may have this name: one plain word, which cannot lead elsewhere."""
    return _RUN_ID.fullmatch(name) is not None
