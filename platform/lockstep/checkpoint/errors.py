"""What the checkpoint store raises on purpose, apart from StorageError itself.

StorageError
├── LostFileError          a file is not there, or its disk cannot give it back
├── TakenError             what had to be new is there already
├── StaleAttemptError      a newer attempt has taken this one's place
└── BadCheckpointError     a checkpoint is not whole, or not what its manifest says
    └── NewerFormatError   a newer Lockstep wrote it
"""

from __future__ import annotations

from lockstep.errors import StorageError


class LostFileError(StorageError):
    """A file is not there, or its disk cannot give it back. Example: a checkpoint's file was deleted by hand."""


class TakenError(StorageError):
    """What had to be new is there already. Example: the folder of a run belongs to another one."""


class StaleAttemptError(StorageError):
    """A newer attempt has taken this one's place. Example: a worker behind a cut network comes back. Trying again does not help."""


class BadCheckpointError(StorageError):
    """A checkpoint is not whole, or not what its manifest says. Example: a file was truncated."""


class NewerFormatError(BadCheckpointError):
    """A newer Lockstep wrote the checkpoint. It may be good, but not for this version."""
