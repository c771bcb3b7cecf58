"""The manifest of a checkpoint: its files, its run and step, and what made it.

A manifest is canonical: there is one way to write it, it contains its own hash, and anything else is
refused. So no flipped bit goes unnoticed. Another version of the format is refused as such before anything else in it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from lockstep.checkpoint import layout, problems
from lockstep.checkpoint.errors import BadCheckpointError
from lockstep.checkpoint.tree_decoder import unpack
from lockstep.parsing import (
    OtherVersionError,
    check_version,
    one_line,
    strict_json,
    with_hash,
    without_hash,
)
from lockstep.paths import shown

T = TypeVar("T")

FORMAT = "lockstep-checkpoint"
VERSION = 2

_FACTS = ("identity_fields", "environment", "counters", "metrics")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint. `kind` is one of `tensors`, `tree` and `bytes`; `sha256` is in hexadecimal."""

    name: str
    section: str
    kind: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class SharedFile:
    """A file that several checkpoints of the run share: it lies beside them, never changes, and has its content's hash in its name."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Facts:
    """What a checkpoint records of its run besides the sections: plain values, kept exactly."""

    identity: str = ""
    """The digest of the run identity."""
    identity_fields: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    counters: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Evaluation metrics of this very step, for keeping the best; empty where it was not evaluated."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint's table of contents. `written_at` is Unix time in seconds."""

    run: str
    step: int
    attempt: int
    written_at: float
    files: tuple[FileEntry, ...]
    facts: Facts
    shared: tuple[SharedFile, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of the checkpoint's own files, without the manifest."""
        return sum(entry.size for entry in self.files)

    def encode(self) -> bytes:
        """The manifest as it is written. JobError or TypeError where the facts are not plain."""
        from lockstep.checkpoint.tree import plain  # imports torch, which readers do without

        facts = {name: plain(dict(getattr(self.facts, name)), name) for name in _FACTS}
        if not all(map(_is_number, self.facts.metrics.values())):
            raise TypeError(f"metrics are {dict(self.facts.metrics)}, wanted numbers")
        document = {
            "format": FORMAT,
            "version": VERSION,
            "run": self.run,
            "step": self.step,
            "attempt": self.attempt,
            "written_at": self.written_at,
            "files": [asdict(entry) for entry in self.files],
            "identity": self.facts.identity,
            **facts,
            "shared": [
                f"{shared_file.name} {shared_file.size} {shared_file.sha256}" for shared_file in self.shared
            ],
        }
        return with_hash(document)

    @classmethod
    def decode(cls, text: bytes) -> Manifest:
        """Read what `encode` wrote. BadCheckpointError (or its OtherFormatError) says what is wrong."""
        try:
            document = strict_json(text)
        except ValueError as error:
            raise _no_manifest(one_line(error) or "no JSON") from None
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise _no_manifest(f"wanted the format {FORMAT!r}")
        version = document.get("version")
        try:
            check_version(version, VERSION)
            return _manifest(without_hash(document, text))
        except OtherVersionError as error:
            raise problems.OTHER_FORMAT(got=str(version)[:20], wanted=VERSION) from error
        except (KeyError, TypeError, ValueError) as error:
            raise _no_manifest(one_line(error)) from error


def _no_manifest(got: str) -> BadCheckpointError:
    return problems.UNREADABLE(wanted="manifest of a checkpoint", got=got)


def _manifest(document: dict[str, Any]) -> Manifest:
    manifest = Manifest(
        run=_typed(str, document["run"]),
        step=_typed(int, document["step"]),
        attempt=_typed(int, document["attempt"]),
        written_at=_typed(float, document["written_at"]),
        files=tuple(FileEntry(**entry) for entry in _typed(list, document["files"])),
        shared=tuple(map(_shared, _typed(list, document["shared"]))),
        facts=Facts(
            identity=_typed(str, document["identity"]),
            **{name: _typed(dict, unpack(document[name], {})) for name in _FACTS},
        ),
    )
    for entry in manifest.files:
        check_entry(entry)
    if not all(map(_is_number, manifest.facts.metrics.values())):
        raise ValueError("its metrics are not all numbers")
    if len({entry.name for entry in manifest.files}) != len(manifest.files):
        raise ValueError("it names a file twice")
    return manifest


def _shared(text: str) -> SharedFile:
    """A shared file from its line. One text per file: with thousands of files, JSON objects would be most of the cost of a save."""
    name, size, sha256 = _typed(str, text).split(" ")
    if not layout.is_shared(name):
        raise ValueError(f"it names {shown(name)}, which is no file that checkpoints share")
    entry = SharedFile(name, int(size), sha256)
    if entry.size < 0 or len(sha256) != 64:
        raise ValueError(f"it gives {shown(name)} no size or hash")
    return entry


def check_entry(entry: FileEntry) -> None:
    """ValueError for a file whose name this store did not make: it could lie anywhere."""
    name = layout.file_name(_typed(str, entry.name))
    if name is None or (name.section, name.kind) != (entry.section, entry.kind):
        raise ValueError(f"it names {shown(entry.name)}, which is no file of a checkpoint")
    if _typed(int, entry.size) < 0 or len(_typed(str, entry.sha256)) != 64:
        raise ValueError(f"it gives {shown(entry.name)} no size or hash")


def _typed(kind: type[T], value: Any) -> T:
    """A value that is of exactly this type. TypeError for any other."""
    if type(value) is not kind:
        raise TypeError(f"got {shown(value)}, wanted {kind.__name__}")
    return value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
