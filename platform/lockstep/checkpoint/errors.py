"""What the checkpoint store raises on purpose, apart from StorageError itself.

StorageError
├── LostFileError          a file does not exist, or its disk cannot read it
├── TakenError             something that must be new already exists
├── StaleAttemptError      a newer attempt has replaced this one
└── BadCheckpointError     a checkpoint is incomplete, or differs from its manifest
    └── OtherFormatError   another Lockstep wrote it
"""

from __future__ import annotations

from lockstep.errors import StorageError


class LostFileError(StorageError):
    """A file does not exist, or its disk cannot read it. Example: a checkpoint's file was deleted by hand."""


class TakenError(StorageError):
    """Something that must be new already exists. Example: the folder of a run belongs to another one."""


class StaleAttemptError(StorageError):
    """A newer attempt has replaced this one. Example: a worker behind a cut network comes back. Trying again does not help."""


class BadCheckpointError(StorageError):
    """A checkpoint is incomplete, or differs from its manifest. Example: a file was truncated."""


class OtherFormatError(BadCheckpointError):
    """Another Lockstep wrote the checkpoint, in another version of the format. It may be good, but this one cannot read it."""
