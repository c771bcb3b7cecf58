"""What a worker raises where its group changes.

ClusterError
├── RegroupError   the group is to change, because workers join or leave
└── LeftError      this worker leaves the run, as planned
"""

from __future__ import annotations

from lockstep.errors import ClusterError


class RegroupError(ClusterError):
    """Raised after the agreed step at which the group is to change, because workers join or leave. Reported only if no new group can be formed."""


class LeftError(ClusterError):
    """Raised in a worker that leaves the run as planned; the others go on."""
