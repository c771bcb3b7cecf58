"""Errors of this room that callers tell from others of their class."""

from __future__ import annotations

from lockstep.errors import JobError, SpecError


class UnfitError(SpecError):
    """A state of the code that cannot be trained. Example: the job's module has a syntax error in this commit."""


class ProtocolError(JobError):
    """A process that executes a job said what Lockstep does not say. Example: a job that writes into the pipe of its process."""
