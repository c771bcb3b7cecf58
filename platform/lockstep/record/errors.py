"""What the recording of a run raises on purpose, apart from RecordError itself.

RecordError
├── LockedError            another process records the run
├── UnavailableError       the store does not answer now
│   └── DeniedError        it denies this process everything for now
└── RejectedError          the store refuses this content
"""

from __future__ import annotations

from lockstep.errors import RecordError


class LockedError(RecordError):
    """Another process records the run. Example: the run was resumed by another command."""


class UnavailableError(RecordError):
    """The store does not answer now; the same call may succeed later. Example: the tracking server restarts."""


class DeniedError(UnavailableError):
    """The store, or a proxy before it, denies this process everything for now. Example: a token was changed (401), a route is missing (404)."""


class RejectedError(RecordError):
    """The store refuses this content, now and later. Example: a file is larger than a proxy lets through (413)."""
