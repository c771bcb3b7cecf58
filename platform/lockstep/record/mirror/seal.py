"""The seal of a finished run: the size and sha256 of each file in its folder, so that one that is changed, added or lost later is found.

A recorder writes it before anyone learns that the run has finished, and again when it adds something. It does not say who wrote the files: who may
change them may seal them again. A signed statement has the same digests. Of a file that only grows the seal has the beginning.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from lockstep.files import write_text
from lockstep.parsing import MOST_BYTES, conforms, flat_record, json_document
from lockstep.paths import open_beneath, read_beneath
from lockstep.record.ledger.journal_file import NAME as JOURNAL
from lockstep.record.mirror.documents import as_json
from lockstep.record.mirror.run_texts import LOG

SEAL = "seal.json"

GROWING = (JOURNAL, LOG)
"""What is sent to the store is noted in these after the end."""

_APART = re.compile(
    r"(?:step-\d{9,}|attempt-\d{4,}|attempts|holds|pins|shared|export)/.*|(?:.*/)?\.[^/]*(?:/.*)?"
    r"|owner\.json|attempt\.json|run\.json|seal\.json"
)
"""No part of what is sealed: checkpoints, which have hashes of their own, and who may write them; exported models; what the store of `record.uri: off` keeps;
hidden files, such as those that are being written."""

_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Sealed:
    """A file as it was sealed: its first `bytes` have this sha256."""

    bytes: int
    sha256: str


class Broken(NamedTuple):
    """A file that is not as it was sealed. `sealed` is None where it was not there, `found` where it is not there now."""

    name: str
    sealed: str | None
    found: str | None


Known = dict[str, tuple[tuple[int, int, int], Sealed]]
"""What was hashed before, with the file's inode, size and time of change: weights may be large."""


def seal(folder: Path, known: Known | None = None) -> Path:
    """Write the seal of what is in a run's folder now. Returns its file. Raises OSError."""
    known = {} if known is None else known
    files = {}
    for name in _names(folder):
        with suppress(
            FileNotFoundError, ValueError
        ):  # a link that leads out, or nowhere, is no file of the record
            status = (folder / name).stat()
            state = status.st_ino, status.st_size, status.st_mtime_ns
            if name not in known or known[name][0] != state:
                known[name] = state, _digest(folder, name, None)
            files[name] = asdict(known[name][1])
    write_text(folder / SEAL, as_json({"files": files}))
    return folder / SEAL


def parsed(content: bytes) -> dict[str, Sealed]:
    """The files of a seal that was written. ValueError where it is none."""
    document = json_document(content)
    if not conforms(document, Mapping[str, Mapping[str, Mapping[str, Any]]]) or document.keys() != {"files"}:
        raise ValueError("it has no files, or more than these")
    return {name: flat_record(Sealed, file) for name, file in document["files"].items()}


def sealed_files(folder: Path) -> dict[str, Sealed]:
    """The files of a folder's seal. OSError where there is none, ValueError where it cannot be read."""
    return parsed(read_beneath(folder, SEAL, MOST_BYTES))


def broken(folder: Path, files: Mapping[str, Sealed]) -> Iterator[Broken]:
    """The files in a folder that are not as they were sealed, by name."""
    present = set(_names(folder))
    for name in sorted({*present, *files}):
        if name not in files:
            yield Broken(name, None, "there")
            continue
        try:
            found = _digest(folder, name, files[name].bytes if name in GROWING else None)
        except FileNotFoundError:
            yield Broken(name, files[name].sha256, None)
        except (OSError, ValueError) as error:
            yield Broken(name, files[name].sha256, str(error))
        else:
            if found != files[name]:
                yield Broken(name, files[name].sha256, found.sha256)


def _names(folder: Path) -> list[str]:
    """The files that belong to a run's record, by their paths below its folder. A link is named, and nothing behind it."""
    names = []
    for parent, _, files in os.walk(folder):
        below = [Path(parent, name).relative_to(folder).as_posix() for name in files]
        names += [name for name in below if not _APART.fullmatch(name)]
    return sorted(names)


def _digest(folder: Path, name: str, size: int | None) -> Sealed:
    """The first `size` bytes of a file, or all of it. ValueError where a link leads out of the folder."""
    with os.fdopen(open_beneath(folder, name), "rb") as file:
        return digest_of(file, size)


def digest_of(file: BinaryIO, size: int | None) -> Sealed:
    """The first `size` bytes of an open file, or all of it."""
    digest, count = hashlib.sha256(), 0
    while piece := file.read(_PIECE if size is None else min(_PIECE, size - count)):
        digest.update(piece)
        count += len(piece)
    return Sealed(count, digest.hexdigest())
